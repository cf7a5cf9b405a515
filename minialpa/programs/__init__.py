"""Programs: the instructions that a runtime executes, for all meshes or for one, and reshardings between meshes.

Made by `inter.lower`, run by `runtime`. Imports: `cluster`, `sharding` and `errors`; nothing that plans or traces.
"""
