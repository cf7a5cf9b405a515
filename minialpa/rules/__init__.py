"""Rules of named factors: which dimensions of an equation's operands and results are split together.

Sharding (`intra`) and micro-batches (`inter.microbatch`) both use them. Imports: `tracing`.
"""
