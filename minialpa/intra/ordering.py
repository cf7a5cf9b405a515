"""Barriers that compilers for GPUs keep: what is behind one depends on what is in front of it, by data.

XLA for GPUs drops optimization barriers before it orders its kernels. What a backward pass computes again would then
run long before that pass needs it, and save no memory. So each array behind a barrier is chosen between itself and
zeros by a condition that reads an element of every array in front of it, and that never holds, which no compiler knows.
The choice is elementwise, and becomes a part of the kernels that read the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def wait_for_all(arrays: Sequence[Any]) -> list[Any]:
    """The same arrays, each of which is there when all are."""
    return list(lax.platform_dependent(*arrays, cuda=chosen_when_all_are_there, default=_barrier))


def chosen_when_all_are_there(*arrays: Any) -> tuple[Any, ...]:
    """The same arrays, to the last bit, computed from an element of each that holds floating point numbers."""
    elements = [
        array[(0,) * array.ndim].astype(jnp.float32)
        for array in arrays
        if array.size and jnp.issubdtype(array.dtype, jnp.floating)
    ]
    if not elements:
        return _barrier(*arrays)

    # What is no number is equal to nothing, also not to 0.
    read = jnp.stack(elements)
    never = jnp.any((read != read) & (read == 0))
    return tuple(jnp.where(never, jnp.zeros_like(array), array) for array in arrays)


def _barrier(*arrays: Any) -> tuple[Any, ...]:
    return tuple(lax.optimization_barrier(arrays))
