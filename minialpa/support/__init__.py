"""Small helpers that know nothing of steps: files, caches, disjoint sets, compiled loops, and private names of jax.

All take and return plain values or jax's own. Imports: nothing of minialpa but `errors`.
"""
