"""Programs as blocks of operations: jax equations in, the same with facts of later phases out, as values and as text.

README.md explains the package.
"""
