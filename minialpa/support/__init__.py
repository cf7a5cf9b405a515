"""Small helpers for all packages: files, caches, disjoint sets, compiled loops, and the private names of jax."""
