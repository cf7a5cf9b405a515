"""Programs as blocks: equations of jax in; operations with the facts that phases find, rewritten and printed, out.

Every value of a block is defined once. Imports: `errors` and `support`.
"""
