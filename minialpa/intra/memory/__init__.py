"""The memory model: the bytes that the program of one device takes while it runs.

    recording    programs and equations        -> operations over values            operations, lowering
    compiler     operations                    -> kernels in the order they run     scatters, merging, fusion
    timeline     kernels, donated arguments    -> when buffers are in use
    packing      times and sizes of buffers    -> bytes
    liveness     the same for the callers: `peak_bytes` of a program, `lifetimes` of equations

All that depends on the compiler (XLA) is in compiler.py and lowering.py and what these two import.
Imports: `intra.strategies`, `intra.spmd` and `rules`.
"""
