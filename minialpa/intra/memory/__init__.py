"""The memory model: the program of one device becomes the bytes that it takes while it runs; see `liveness`.

`compiler` says what is asked of a compiler, and each compiler answers in a package of its own, such as `xla`.
Imports: `attention`, `intra.strategies`, `intra.spmd` and `rules`; none of the packages of compilers.
"""
