"""Micro-batches: a traced step as loops over micro-batches (`SplitStep`).

Imports: `rules` and `tracing`.
"""
