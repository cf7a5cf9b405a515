"""Between meshes: a traced step and a cluster in, a plan with its stages, or the program of a plan, out.

Imports: `intra`, `rules`, `tracing`, `plan` and `programs`; nothing that runs.
"""
