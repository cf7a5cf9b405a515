"""Collectives of `shard_map` as operations along one mesh axis, which `jax.vmap` over this axis writes out.

`along_axis` is an operation of one device. Under `vmap`, the axis is dimension 0, and the operation moves, sums or
selects along it. A collective over several axes is one operation for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from minialpa.support.private_jax import define_axis_batching, new_aval
from minialpa.tracing.rotation import rotate

#: (axis, kind, value, option) -> result, see `along_axis`.
Along = Callable[[str, str, Any, Any], Any]


# ---- collectives -----------------------------------------------------------------------------------------------------


def _names(params: Mapping[str, Any]) -> tuple[str, ...]:
    given = params["axis_name"]
    return given if isinstance(given, tuple) else (given,)


def _all_gather(along: Along, x: Any, params: Mapping[str, Any]) -> Any:
    dim = params["all_gather_dimension"]
    x = x if params["tiled"] else jnp.expand_dims(x, dim)
    for axis in reversed(_names(params)):
        x = along(axis, "gather", x, dim)
    return x


def _reduce_scatter(along: Along, x: Any, params: Mapping[str, Any]) -> Any:
    dim = params["scatter_dimension"]
    for axis in _names(params):
        x = along(axis, "scatter", x, dim)
    return x if params["tiled"] else jnp.squeeze(x, dim)


def _all_to_all(along: Along, x: Any, params: Mapping[str, Any]) -> Any:
    """Cut the split dimension into one part for each device, exchange the parts, and join them.

    Without `tiled`, the split dimension has one position for each device, and the other dimension has one position.
    """
    axes, split, concat = _names(params), params["split_axis"], params["concat_axis"]
    sizes = [lax.axis_size(axis) for axis in axes]
    n = math.prod(sizes)
    length = x.shape[split] // n
    x = jnp.reshape(x, (*x.shape[:split], *sizes, length, *x.shape[split + 1 :]))
    for i, axis in enumerate(axes):
        x = along(axis, "swap", x, split + i)
    x = jnp.reshape(x, (*x.shape[:split], n, length, *x.shape[split + len(axes) + 1 :]))
    x = jnp.moveaxis(x, split, concat)
    return jnp.reshape(x, (*x.shape[:concat], n * x.shape[concat + 1], *x.shape[concat + 2 :]))


def _ppermute(along: Along, x: Any, params: Mapping[str, Any]) -> Any:
    axes, pairs = _names(params), params["perm"]
    if len(axes) == 1:
        return along(axes[0], "permute", x, tuple(pairs))

    # A permutation along several axes at once: each device selects its source among all parts.
    sizes = [lax.axis_size(axis) for axis in axes]
    x = jnp.expand_dims(x, 0)
    for axis in reversed(axes):
        x = along(axis, "gather", x, 0)
    number = jnp.int32(0)
    for axis, size in zip(axes, sizes, strict=True):
        number = number * jnp.int32(size) + lax.axis_index(axis)
    return lax.dynamic_index_in_dim(_permuted(x, math.prod(sizes), pairs), number, 0, keepdims=False)


def _pbroadcast(along: Along, x: Any, params: Mapping[str, Any]) -> Any:
    (axis,) = _names(params)
    return along(axis, "select", x, params["source"])


#: By name: (`along_axis` on the user's mesh, value, parameters) -> result.
COLLECTIVES: dict[str, Callable[[Along, Any, Mapping[str, Any]], Any]] = {
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "all_to_all": _all_to_all,
    "pbroadcast": _pbroadcast,
    "pmax": lambda _, x, params: lax.pmax(x, params["axes"]),
    "pmin": lambda _, x, params: lax.pmin(x, params["axes"]),
    "ppermute": _ppermute,
    "psum": lambda _, x, params: lax.psum(x, params["axes"]),
    "psum_invariant": lambda _, x, params: lax.psum(x, params["axes"]),
    "reduce_scatter": _reduce_scatter,
}


# ---- operations along one axis ---------------------------------------------------------------------------------------


def on_each(x: Any, n: int) -> Any:
    return jnp.broadcast_to(x, (n, *x.shape))


def _gather(x: Any, n: int, is_mapped: bool, dim: int) -> tuple[Any, bool]:
    parts = jnp.moveaxis(x if is_mapped else on_each(x, n), 0, dim)
    return jnp.reshape(parts, (*parts.shape[:dim], -1, *parts.shape[dim + 2 :])), False


def _scatter(x: Any, n: int, is_mapped: bool, dim: int) -> tuple[Any, bool]:
    total = jnp.sum(x, 0, dtype=x.dtype) if is_mapped else x * np.asarray(n, x.dtype)
    parts = jnp.reshape(total, (*total.shape[:dim], n, total.shape[dim] // n, *total.shape[dim + 1 :]))
    return jnp.moveaxis(parts, dim, 0), True


def _swap(x: Any, n: int, is_mapped: bool, dim: int) -> tuple[Any, bool]:
    return jnp.swapaxes(x if is_mapped else on_each(x, n), 0, dim + 1), True


def _permute(x: Any, n: int, is_mapped: bool, pairs: tuple[tuple[int, int], ...]) -> tuple[Any, bool]:
    return _permuted(x if is_mapped else on_each(x, n), n, pairs), True


def _permuted(x: Any, n: int, pairs: Sequence[tuple[int, int]]) -> Any:
    """The parts in dimension 0 at their targets; zeros where no pair has a target."""
    source_of = {target: source for source, target in pairs}
    shifts = {(source - target) % n for source, target in pairs}
    if len(shifts) == 1:
        moved = rotate(x, shifts.pop(), 0)
    else:
        moved = jnp.take(x, np.array([source_of.get(target, 0) for target in range(n)], np.int32), 0, mode="clip")
    if len(pairs) == n:
        return moved
    is_target = np.array([target in source_of for target in range(n)]).reshape(n, *[1] * (x.ndim - 1))
    return jnp.where(is_target, moved, jnp.zeros((), x.dtype))


def _select(x: Any, n: int, is_mapped: bool, source: int) -> tuple[Any, bool]:
    return lax.index_in_dim(x, source, 0, keepdims=False) if is_mapped else x, False


#: By kind: (value, size of the axis, whether dimension 0 is the axis, option) -> (result, the same of the result).
_OPERATIONS: dict[str, Callable[..., tuple[Any, bool]]] = {
    "gather": _gather,
    "permute": _permute,
    "scatter": _scatter,
    "select": _select,
    "swap": _swap,
}

along_axis_p = Primitive("along_axis")


def along_axis(mesh: AbstractMesh, axis: str, kind: str, x: Any, option: Any) -> Any:
    return along_axis_p.bind(x, mesh=mesh, axis=axis, size=lax.axis_size(axis), kind=kind, option=option)


def _type_along(x: Any, *, mesh: AbstractMesh, axis: str, size: int, kind: str, option: Any) -> Any:
    shape = list(x.shape)
    if kind == "gather":
        shape[option] *= size
    elif kind == "scatter":
        shape[option] //= size
    return new_aval(shape, x.dtype)


along_axis_p.def_abstract_eval(_type_along)


def _batch_along(name: str, n: int, x: Any, dim: int | None, /, **params: Any) -> tuple[Any, int | None]:
    """The rule of `vmap` over the axis `name`, or over another axis, which then is the last dimension."""
    if name == params["axis"]:
        operation = _OPERATIONS[params["kind"]]
        moved = x if dim is None else jnp.moveaxis(x, dim, 0)
        result, is_mapped = operation(moved, n, dim is not None, params["option"])
        if not is_mapped:
            return result, None
        spec = PartitionSpec(name, *[PartitionSpec.UNCONSTRAINED] * (result.ndim - 1))
        return lax.with_sharding_constraint(result, NamedSharding(params["mesh"], spec)), 0
    if dim is None:
        return along_axis_p.bind(x, **params), None
    return along_axis_p.bind(jnp.moveaxis(x, dim, -1), **params), x.ndim - 1


define_axis_batching(along_axis_p, _batch_along)
