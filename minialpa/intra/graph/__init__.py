"""The sharding problem of a mesh: its equations and the user's options in, the cost graph and what it decides out.

Imports: `intra.strategies`, `intra.solver`, and `rules`.
"""
