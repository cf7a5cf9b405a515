"""Micro-batches: a traced step in, the same step as loops over micro-batches out (`SplitStep`).

Imports: `rules` and `tracing`.
"""
