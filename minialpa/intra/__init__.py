"""The equations of one mesh and their specs in; the program of one device out."""
