"""Lowering: instructions for all meshes, and for each worker, from a plan and its step.

Imports: `inter.staging`, `inter.schedule`, `intra.spmd` and `programs`.
"""
