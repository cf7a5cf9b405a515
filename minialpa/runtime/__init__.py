"""The runtime: programs of instructions in, results out; in this process or on the workers of a Ray cluster.

Imports: `programs`, `plan` and the values at the top level; nothing that plans.
"""
