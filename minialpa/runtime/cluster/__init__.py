"""The runtime of a cluster: programs and arguments go in, and arrays that stay on workers come out.

Asks a launcher for workers, and knows nothing of Ray.
Imports: runtime.workers, arrays, cluster, errors, programs, sharding.
"""
