"""The memory model: the program of one device in, the bytes that it takes while it runs out.

Imports: `intra.strategies`, `intra.spmd` and `rules`.
"""
