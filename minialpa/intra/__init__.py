"""Inside one mesh: chooses a spec for every value of its tasks, and makes the program of one device from the specs.

Imports: `rules`, `tracing`, and the values at the top level; no stages or micro-batches.
"""
