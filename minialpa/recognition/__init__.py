"""A `TracedStep` in, the same step with attentions as operations out.

Imports: `attention`, `tracing`, and `support` for the source lines of equations.
"""
