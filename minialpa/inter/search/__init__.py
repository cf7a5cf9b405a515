"""The search for stages: layers and a cluster in, which layers run on which devices out.

Imports: `inter.staging`, `inter.schedule`, `inter.layers` and `intra`.
"""
