"""The sharding problem of one mesh as a cost graph of its equations and options, and the specs of a solution.

Imports: `intra.strategies`, `intra.solver`, and `rules`.
"""
