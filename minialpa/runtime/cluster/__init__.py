"""The driver of a cluster: programs and arguments go in, and arrays that stay on workers come out. See README.md.

A launcher starts the workers; no module here knows Ray.
"""
