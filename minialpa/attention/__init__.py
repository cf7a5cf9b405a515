"""Queries, keys and values in; their attention, or its gradients, as one operation out. See README.md."""
