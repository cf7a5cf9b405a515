"""A worker: the mesh program and the process that runs it go in; arrays, messages and failures come out.

Does not know its launcher. Imports: runtime.steps, runtime.transports, errors, programs, samples, sharding, support.
"""
