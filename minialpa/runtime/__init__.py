"""The runtime: runs programs of instructions on argument leaves, and returns result leaves.

Its own modules run them in this process and say what an executable is; the rooms run them on the workers of a cluster.

Imports: `programs`, `plan` and the values at the top level; nothing that plans.
"""
