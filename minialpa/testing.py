"""Comparisons for tests of parallelized functions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from minialpa.arrays import RemoteArray, prefetch


def assert_allclose(actual: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-4) -> None:
    """Raise AssertionError with the leaf unless two pytrees agree: |actual - expected| <= atol + rtol |expected|.

    PRNG keys compare by their bits, bfloat16 values as float32.
    """
    prefetch(actual)
    left, right = jax.tree.leaves(actual), jax.tree_util.tree_leaves_with_path(expected)
    if len(left) != len(right):
        raise AssertionError(f"The trees differ: {jax.tree.structure(actual)} against {jax.tree.structure(expected)}.")
    for a, (path, b) in zip(left, right, strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(_numbers(a), _numbers(b), rtol=rtol, atol=atol, err_msg=f"at {name or 'the leaf'}")


def _numbers(leaf: Any) -> np.ndarray:
    if isinstance(leaf, RemoteArray):
        leaf = leaf[...]
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
