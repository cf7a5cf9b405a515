"""Programs: what the runtime reads. Instructions over numbered buffers, for all meshes or one, and reshardings.

Made by `inter.lower`, run by `runtime`. Imports: `cluster`, `sharding` and `errors`; nothing that plans or traces.
"""
