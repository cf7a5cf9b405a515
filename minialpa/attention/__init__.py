"""Attention as one operation: its primitives, and their programs for each platform.

Queries, keys and values in, the attention or its gradients out. Memory grows linearly with the number of positions.
Imports: `support`.
"""
