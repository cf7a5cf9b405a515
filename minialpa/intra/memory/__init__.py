"""The memory model: bytes that the program of one device needs while it runs; see `liveness`.

`compiler` is the interface of compilers, which are packages such as `xla`.
Imports: `attention`, `intra.strategies`, `intra.spmd` and `rules`; no package of a compiler.
"""
