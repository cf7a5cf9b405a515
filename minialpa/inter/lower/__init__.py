"""Lowering: a plan and its step in, the instructions for all meshes and for each worker out.

Imports: `inter.staging`, `inter.schedule`, `intra.spmd` and `programs`.
"""
