"""The equations of one mesh and the options of the user go in; the cheapest specs of all values come out."""
