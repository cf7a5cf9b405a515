"""Layers: a traced step in, the layer of each forward equation and what layers compute again out (`LayeredStep`).

Scans over layers are cut here. Imports: `inter.microbatch`, `rules` and `tracing`.
"""
