"""A worker: the mesh program and the process that runs it go in; arrays, messages and failures come out.

Knows nothing of who launched it.
Imports: runtime.steps, runtime.transports, errors, programs, sharding, support.
"""
