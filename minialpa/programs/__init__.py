"""Programs: the instructions that a runtime executes, for all meshes or for one, and reshardings between meshes.

`inter.lower` makes them and `runtime` runs them. Imports: `cluster`, `sharding` and `errors`, no planning or tracing.
"""
