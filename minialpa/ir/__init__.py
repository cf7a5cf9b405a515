"""Programs as blocks of operations: jax equations with the facts that phases find, rewritten, checked and printed.

Each value of a block is defined once. Imports: `errors` and `support`.
"""
