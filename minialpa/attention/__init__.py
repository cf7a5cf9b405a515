"""Attention as one operation: its primitives, and what computes them on each platform.

Arrays of queries, keys and values go in, and the attention or its gradients come out, in memory that grows linearly
with the number of positions. The rules of splitting them are in `rules`.
Imports: `support`.
"""
