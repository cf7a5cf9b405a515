"""The runtime of a cluster: programs and arguments go in, and arrays that stay on workers come out.

A launcher starts the workers; nothing here knows Ray. Imports: runtime.workers, arrays, cluster, errors, programs,
sharding.
"""
