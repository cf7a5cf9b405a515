"""Lowering: a traced step and its plan in, instructions for all meshes or for each worker out. See README.md."""
