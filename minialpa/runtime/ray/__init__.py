"""Ray as a launcher: a request for hosts goes in; workers on them, their answers and their faults come out.

The only room that knows Ray.
Imports: runtime.cluster, cluster, errors.
"""
