"""Small helpers for all packages: files, caches, disjoint sets, compiled loops, and the private names of jax.

They take and return plain values or values of jax.
"""
