"""The solver: a graph of costs with limits on what its choices use in, one choice for each node out.

Knows nothing of shardings. Imports: `support`, `errors`.
"""
