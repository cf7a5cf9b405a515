"""Inside one mesh: the equations of its tasks in, a spec for every value and the program of one device out.

Imports: `rules`, `tracing`, and the values at the top level; nothing of stages or micro-batches.
"""
