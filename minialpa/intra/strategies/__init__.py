"""Strategies, the ways to run an equation on a logical mesh with their seconds, and resharding between specs.

Imports: `rules`, `tracing`, `cluster`, `sharding` and `cost`.
"""
