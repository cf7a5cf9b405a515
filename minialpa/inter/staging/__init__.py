"""Staging: a step, its chunks and meshes in; the tasks of each mesh and their sharding problems out; see README.md.

Plans are bound to their step and verified here. Imports: `inter.microbatch`, `inter.layers`, `inter.schedule` and
`intra`.
"""
