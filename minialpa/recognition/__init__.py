"""Recognition: the attentions of a traced step become one operation each.

A `TracedStep` goes in, and the same step comes out, with `attention_p` and `attention_gradient_p` in the place of the
equations that compute scores, softmax and products. Imports `attention` and `tracing`.
"""
