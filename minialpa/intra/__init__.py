"""The equations of one mesh and their specs go in; the program of one device comes out."""
