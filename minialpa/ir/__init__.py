"""Programs as blocks of operations: an equation of jax with what planning knows of it, printed, rewritten, verified.

In: equations of jax. Out: blocks, in which every value is defined once and every operation carries its own facts.
"""
