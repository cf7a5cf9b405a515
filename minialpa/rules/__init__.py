"""Rules of named factors: an equation in, which dimensions of its operands and results go together out.

Sharding (`intra`) and micro-batches (`inter.microbatch`) both read them. Imports: `tracing`.
"""
