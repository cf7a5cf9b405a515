"""Argument leaves of a step as types, for tracing, and which of their dimensions hold the examples of a batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from minialpa.arrays import RemoteArray
from minialpa.errors import TraceError
from minialpa.ir.equations import is_extended
from minialpa.tracing.host_memory import why_in_host


def argument_name(path: str) -> str:
    """The name of the argument that a leaf belongs to: `batch` for `batch['x']`."""
    found = re.match(r"\w+|\[\d+\]", path)
    return found[0] if found else path


def leaf_type(leaf: Any, path: str) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of a leaf, without a sharding: the plan decides how arguments are sharded.

    Raises TraceError, with the leaf's path, for what is no array of numbers, and for what is in host memory.
    """
    found = leaf
    if not isinstance(leaf, jax.ShapeDtypeStruct | jax.core.ShapedArray | RemoteArray):
        try:
            found = jax.typeof(leaf)
        except Exception as error:  # a ValueError for what jax took once, or what a leaf's own code raises
            raise TraceError(_why_no_array(leaf, path)) from error
        if not isinstance(found, jax.core.ShapedArray):  # a Ref has a shape, too
            raise TraceError(_why_no_array(leaf, path))

    if not is_extended(found.dtype) and np.dtype(found.dtype).kind in "OSTUMm":
        # jax has arrays of strings, and no functions that take them.
        raise TraceError(_why_no_array(np.empty((), found.dtype), path))
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in found.shape):
        raise TraceError(
            f"Argument leaf `{path}` has shape {found.shape} and dtype {found.dtype}. Steps are planned for arrays of "
            "numbers whose dimensions are known."
        )

    reason = why_in_host(leaf, path)
    if reason is not None:
        raise TraceError(reason)
    return jax.ShapeDtypeStruct(found.shape, found.dtype, weak_type=bool(getattr(found, "weak_type", False)))


def _why_no_array(leaf: Any, path: str) -> str:
    """The message for an argument leaf that jax does not accept as an array: what is wrong, and what to pass."""
    otherwise = "other values as whole arguments listed in `static_argnums`"
    if not isinstance(leaf, np.ndarray | np.generic):
        kind = type(leaf).__name__
        if hasattr(type(leaf), "__jax_array__"):
            return (
                f"Argument leaf `{path}` is a {kind}, which has `__jax_array__` and is no array. Pass `jnp.asarray(x)`."
            )
        return f"Argument leaf `{path}` is a {kind}, not an array. Pass arrays and numbers in pytrees, and {otherwise}."

    if isinstance(leaf, np.ma.MaskedArray):
        return f"Argument leaf `{path}` is a masked array, and jax has none. Pass `x.filled()`, and the mask by itself."

    dtype = leaf.dtype
    given = f"Argument leaf `{path}` is a NumPy array of {dtype}"
    if dtype.names is not None:
        first = dtype.names[0] if dtype.names else "name"
        return f"{given}, a structured dtype, and jax has none. Pass its fields as arrays of their own: `x[{first!r}]`."
    if dtype.kind in "SUT":
        return f"{given}, which are strings, and jax has none. Pass numbers that stand for them, and {otherwise}."
    if dtype.kind in "mM":
        return f"{given}, which are times, and jax has none. Pass numbers, as `x.astype('int64')` gives them."
    if not dtype.isnative:
        return f"{given}, whose bytes are in another order than jax has them. Pass `x.astype({dtype.name!r})`."
    if dtype.kind in "fc":
        narrower = "complex128" if dtype.kind == "c" else "float64"
        return f"{given}, which is wider than the numbers of jax. Pass `x.astype({narrower!r})`."
    return f"{given}, and jax has no such arrays. Pass numbers in arrays, and {otherwise}."


def find_batch_dims(
    structs: Sequence[jax.ShapeDtypeStruct], paths: Sequence[str], is_batch: Sequence[bool]
) -> tuple[tuple[int | None, ...], int | None]:
    """The batch dimension of each leaf, and the number of examples.

    It is dimension 0 of every array in a batch argument; scalars and raw PRNG keys have none.
    """
    dims: list[int | None] = []
    sizes: dict[str, int] = {}
    for struct, path, batch in zip(structs, paths, is_batch, strict=True):
        is_raw_key = struct.dtype == np.uint32 and struct.shape == (2,)
        if not batch or struct.ndim == 0 or is_raw_key:
            dims.append(None)
        else:
            dims.append(0)
            sizes[path] = struct.shape[0]

    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"`{path}` {size}" for path, size in list(sizes.items())[:4])
        raise TraceError(
            f"The leading dimensions of the batch differ: {listed}. Check the order of the arguments, or "
            "name the batch by `batch_argnums`. Values of other shapes go into an argument that is no batch."
        )
    if 0 in sizes.values():
        raise TraceError(f"The batch has no examples: `{next(iter(sizes))}` has shape {structs[dims.index(0)].shape}.")
    return tuple(dims), next(iter(sizes.values()), None)
