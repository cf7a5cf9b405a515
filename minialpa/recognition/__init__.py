"""In: a `TracedStep`. Out: the same step with attentions as operations, in the place of scores, softmax and products.

Imports: `attention`, `tracing`, and `support` for the source lines of equations.
"""
