"""The sharding problem of one mesh as a cost graph of its equations and options, and what a solution of it decides.

Imports: `intra.strategies`, `intra.solver`, and `rules`.
"""
