"""A plan, its exported functions and a GPU in; memory, collectives and seconds of the programs that XLA compiles, out.

No GPU is needed. See README.md. Imports: `attention`, `cluster`, `hlo`, `plan`, `programs` and `support`.
"""
