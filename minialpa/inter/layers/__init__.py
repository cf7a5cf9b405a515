"""Layers: a `TracedStep` and a `LayerOption` in, the layer of each forward group (`LayeredStep`) out; see README.md.

Scans over layers are cut here. Imports: `inter.microbatch`, `rules` and `tracing`.
"""
