"""Layers: the layer of each forward equation of a traced step, and what each layer computes again (`LayeredStep`).

Scans over layers are cut here. Imports: `inter.microbatch`, `rules` and `tracing`.
"""
