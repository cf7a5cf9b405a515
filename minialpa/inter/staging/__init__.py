"""Staging: divides a step among its stages, into the tasks of every mesh and the equations to shard there.

Plans are also bound to their step here, and verified. Imports: `inter.microbatch`, `inter.layers`, `inter.schedule` and
`intra`.
"""
