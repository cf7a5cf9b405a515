"""The equations of one mesh and the options of the user in; the cheapest specs of all values out."""
