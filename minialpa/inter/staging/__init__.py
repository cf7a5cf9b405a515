"""Staging: a step with layers, and stages, in; the tasks of every mesh and the equations to shard out.

A plan is tied to its step again here, and verified. Imports: `inter.microbatch`, `inter.layers`, `inter.schedule` and
`intra`.
"""
