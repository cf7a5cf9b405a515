"""The memory model: the bytes that the program of one device takes while it runs. `liveness` lists its modules.

What depends on the compiler (XLA) is in `compiler` and `lowering` and what these two import.
Imports: `intra.strategies`, `intra.spmd` and `rules`.
"""
