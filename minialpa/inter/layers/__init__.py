"""Layers: the layer of each forward equation of a traced step, and the rematerialisation of each layer (`LayeredStep`).

Scans over layers are cut here. Imports: `inter.microbatch`, `rules` and `tracing`.
"""
