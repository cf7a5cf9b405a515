"""Ray as a launcher: a request for hosts goes in; workers, their answers and their faults come out. See README.md.

The only package that knows Ray.
"""
