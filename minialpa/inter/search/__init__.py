"""The search for stages: chooses which layers run on which devices of a cluster.

Imports: `inter.staging`, `inter.schedule`, `inter.layers` and `intra`.
"""
