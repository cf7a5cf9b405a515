"""Staging: divides a step among its stages, into the tasks of every mesh and the equations to shard there.

A plan is tied to its step again here, and verified. Imports: `inter.microbatch`, `inter.layers`, `inter.schedule` and
`intra`.
"""
