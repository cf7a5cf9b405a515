"""Rules of named factors: the dimensions of an equation's arrays that are split together.

Sharding (`intra`) and micro-batches (`inter.microbatch`) use them. Imports: `tracing`.
"""
