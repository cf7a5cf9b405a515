"""Between meshes: makes a plan with its stages for a traced step and a cluster, and the program of a plan.

Imports: `intra`, `rules`, `tracing`, `plan` and `programs`; no module that runs.
"""
