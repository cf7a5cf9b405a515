"""Small helpers for all rooms: files, caches, disjoint sets, compiled loops, and private names of jax.

They take and return plain values or jax's own. Imports: nothing of minialpa.
"""
