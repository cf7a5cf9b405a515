"""Errors of Python code that a step calls, as `jax.pure_callback` and `eqx.error_if` do.

They are the user's own and not failures of the runtime, so the caller gets them as `jax.jit` raises them.
"""

from __future__ import annotations

from minialpa.errors import MinialpaError


def is_of_callback(error: Exception) -> bool:
    """Whether Python code that XLA called has raised: jax puts the traceback of that code into its message."""
    text = str(error)
    is_from_jax = not isinstance(error, MinialpaError)
    return is_from_jax and "callback" in text and "Traceback (most recent call last)" in text
