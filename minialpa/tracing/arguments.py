"""Checks the argument leaves of a step, and finds their types and batch dimensions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from minialpa.arrays import RemoteArray
from minialpa.errors import TraceError
from minialpa.ir.equations import host_type, is_extended
from minialpa.tracing.host_memory import argument_is_in_host
from minialpa.tracing.refs import is_ref_leaf, type_in_ref
from minialpa.tracing.user_meshes import explicit_sharding


def argument_name(path: str) -> str:
    """`batch` for `batch['x']`."""
    found = re.match(r"\w+|\[\d+\]", path)
    return found[0] if found else path


def leaf_type(leaf: Any, path: str) -> Any:
    """Shape, dtype, weak type and memory of a leaf, and its sharding on Explicit axes, which code may read.

    Raises TraceError, with the leaf's path, unless the leaf is an array of numbers with known dimensions.
    """
    found = leaf = type_in_ref(leaf, path) if is_ref_leaf(leaf) else leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct | jax.core.ShapedArray | RemoteArray):
        try:
            found = jax.typeof(leaf)
        except Exception as error:  # also one from the leaf's own code
            raise TraceError(_why_no_array(leaf, path)) from error
        if not isinstance(found, jax.core.ShapedArray):
            raise TraceError(_why_no_array(leaf, path))

    if not is_extended(found.dtype) and np.dtype(found.dtype).kind in "OSTUMm":
        # jax has arrays of strings, but no functions of them.
        raise TraceError(_why_no_array(np.empty((), found.dtype), path))
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in found.shape):
        raise TraceError(
            f"The argument `{path}` has the shape {found.shape} and the dtype {found.dtype}. Pass an array whose "
            "dimensions are all known integers of at least 0."
        )

    is_weak = bool(getattr(found, "weak_type", False))
    if argument_is_in_host(leaf, path):
        return host_type(found.shape, found.dtype, weak_type=is_weak)
    return jax.ShapeDtypeStruct(found.shape, found.dtype, weak_type=is_weak, sharding=explicit_sharding(found))


def _why_no_array(leaf: Any, path: str) -> str:
    otherwise = "other values as whole arguments listed in `static_argnums`"
    if isinstance(leaf, np.ma.MaskedArray):
        wrong, instead = "a masked array, and jax has none", "`x.filled()`, and the mask by itself"
    elif isinstance(leaf, np.ndarray | np.generic):
        wrong, instead = _why_no_dtype(leaf.dtype, otherwise)
    elif hasattr(type(leaf), "__jax_array__"):
        wrong = f"a {type(leaf).__name__}, which has `__jax_array__` and is no array"
        instead = "`jnp.asarray(x)`"
    else:
        wrong, instead = f"a {type(leaf).__name__}, not an array", f"arrays and numbers in pytrees, and {otherwise}"
    return f"The argument `{path}` is {wrong}. Pass {instead}."


def _why_no_dtype(dtype: np.dtype[Any], otherwise: str) -> tuple[str, str]:
    """What is wrong with this dtype, and what to pass instead."""
    given = f"a NumPy array of {dtype}"

    if dtype.names is not None:
        first = dtype.names[0] if dtype.names else "name"
        return f"{given}, a structured dtype, and jax has none", f"its fields as arrays of their own: `x[{first!r}]`"
    if dtype.kind in "SUT":
        return f"{given}, which are strings, and jax has none", f"numbers that stand for them, and {otherwise}"
    if dtype.kind in "mM":
        return f"{given}, which are times, and jax has none", "numbers, as `x.astype('int64')` gives them"
    if not dtype.isnative:
        return f"{given}, whose byte order is not native, as jax needs it", f"`x.astype({dtype.name!r})`"
    if dtype.kind in "fc":
        narrower = "complex128" if dtype.kind == "c" else "float64"
        return f"{given}, which is wider than any dtype of jax", f"`x.astype({narrower!r})`"
    return f"{given}, and jax has no such arrays", f"numbers in arrays, and {otherwise}"


def find_batch_dims(
    structs: Sequence[Any], paths: Sequence[str], is_batch: Sequence[bool]
) -> tuple[tuple[int | None, ...], int | None]:
    """The batch dimension of each leaf, and the number of examples.

    structs: arrays or their types. Arrays in batch arguments have batch dimension 0. Scalars and raw PRNG keys
    (uint32[2]) have None. Raises TraceError if the arrays differ in their number of examples, or if it is 0.
    """
    holds_examples = [
        batch and struct.ndim > 0 and not (struct.dtype == np.uint32 and struct.shape == (2,))
        for struct, batch in zip(structs, is_batch, strict=True)
    ]
    found = zip(structs, paths, holds_examples, strict=True)
    sizes = {path: struct.shape[0] for struct, path, holds in found if holds}
    if reason := why_sizes_differ(sizes):
        raise TraceError(reason)
    if 0 in sizes.values():
        raise TraceError(
            f"The batch has no examples, as `{next(iter(sizes))}` has the shape "
            f"{structs[holds_examples.index(True)].shape}. Pass at least one example, or set `batch_argnums` if this "
            "argument is not the batch."
        )
    return tuple(0 if holds else None for holds in holds_examples), next(iter(sizes.values()), None)


def why_sizes_differ(sizes: Mapping[str, int]) -> str | None:
    """Why arrays with these leading dimensions, by path, are no batch; None if the dimensions are equal."""
    if len(set(sizes.values())) <= 1:
        return None
    listed = ", ".join(f"`{path}` {size}" for path, size in list(sizes.items())[:4])
    return (
        f"The arrays of the batch differ in their first dimension ({listed}). Check the order of the arguments, "
        "set `batch_argnums` to the batch, or pass arrays of other lengths in another argument."
    )
