"""Strategies: one equation and a logical mesh in, the ways to run it there with their seconds out.

Also resharding between two specs. Imports: `rules`, `tracing`, `cluster`, `sharding` and `cost`.
"""
