"""Grouped products (`minialpa.grouped`) of rows in slots (`minialpa.routing`): `routed_product_p`, `routed_sum_p`.

Owner y has e matrices, and c slots for the rows of each block x. Slots from `starts` to `ends` have rows of its own
groups, slots from `foreign_starts` to `foreign_ends` rows of any of the y e groups. Other slots give zeros.

    product: out[y x c n] = sum_k lhs[y x c k] rhs[g k n], for slot c of group g
    sum:     out[g k n] = sum_(y x c) lhs[y x c k] rhs[y x c n], over the slots of group g

Devices may share the owners. If a foreign slot is in use, they receive each matrix, or sum its results, in turn.
Otherwise, they send nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from minialpa.grouped import NEVER, product, product_aval, sum_aval, sum_of_products
from minialpa.support.private_jax import define_function

#: Operands: lhs [y x c k], rhs [y e k n], or [y e n k] if `summed` is 3, starts and ends [y x e], positions [c], and
#: foreign_starts and foreign_ends [y x y*e]. Result: [y x c n] of `dtype`. n_rows: expected rows of c slots.
routed_product_p = Primitive("minialpa_routed_product")

#: Operands: lhs [y x c k], rhs [y x c n], then as above. Result: [y e k n] of `dtype`.
routed_sum_p = Primitive("minialpa_routed_sum")

PRIMITIVES = (routed_product_p, routed_sum_p)

#: Of a matrix that devices send at once, for little memory.
_MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class OwnerDevices:
    """The n devices that share owners, along the axes `names` of a mesh."""

    names: tuple[str, ...] = ()
    n: int = 1

    @property
    def number(self) -> Any:
        return lax.axis_index(self.names) if self.names else 0

    def received(self, array: Any, device: Any) -> Any:
        """The array of one device."""
        if not self.names:
            return array
        wide = array.astype(np.float32) if array.dtype.itemsize < np.dtype(np.float32).itemsize else array
        return lax.psum(jnp.where(self.number == device, wide, 0), self.names).astype(array.dtype)

    def summed(self, array: Any, device: Any) -> Any:
        """On one device, the sum; on others, zeros."""
        if not self.names:
            return array
        # Without the barrier, XLA moves the sum out of the loop that adds it, where it always runs.
        return jnp.where(self.number == device, lax.optimization_barrier(lax.psum(array, self.names)), 0)


def _product(devices: OwnerDevices, lhs: Any, rhs: Any, *bounds: Any, **params: Any) -> list[Any]:
    (out,) = product(lhs, rhs, *bounds[:3], **params)

    def part(device: Any, group: Any, column: Any, old: Any, *bounds: Any) -> Any:
        matrix = lax.dynamic_slice_in_dim(_joined(rhs), group, 1, 1)
        matrix = lax.dynamic_slice_in_dim(matrix, column, old.shape[3], 5 - params["summed"])
        return product(_joined(lhs), devices.received(matrix, device), *bounds, old, **params)[0]

    return [_with_foreign_slots(devices, part, out, rhs.shape[params["summed"]], *bounds[2:])]


def _sum(devices: OwnerDevices, lhs: Any, rhs: Any, *bounds: Any, dtype: str, **params: Any) -> list[Any]:
    wide = np.promote_types(dtype, np.float32).name if jnp.issubdtype(dtype, jnp.inexact) else dtype
    (out,) = sum_of_products(lhs, rhs, *bounds[:3], dtype=dtype, **params)

    def part(device: Any, group: Any, column: Any, old: Any, *bounds: Any) -> Any:
        columns = lax.dynamic_slice_in_dim(_joined(rhs), column, old.shape[3], 3)
        (made,) = sum_of_products(_joined(lhs), columns, *bounds, dtype=wide, **params)
        before = lax.dynamic_slice_in_dim(old, group, 1, 1)
        return lax.dynamic_update_slice_in_dim(old, (before + devices.summed(made, device)).astype(dtype), group, 1)

    return [_with_foreign_slots(devices, part, out, lhs.shape[3], *bounds[2:])]


def _with_foreign_slots(
    devices: OwnerDevices, part: Callable[..., Any], out: Any, height: int, positions: Any, *bounds: Any
) -> Any:
    """`out` with `part` for some columns of each matrix of each device in turn, if a foreign slot is in use.

    height: of a matrix. bounds: of all foreign slots.
    """
    n_owners, n_all, width = out.shape[0], bounds[0].shape[2], out.shape[3]
    n_parts = next(
        n for n in range(1, width + 1) if n == width or (width % n == 0 and height * width <= n * _MOST_ELEMENTS)
    )
    columns, n_groups = width // n_parts, n_all // devices.n
    here = [lax.dynamic_slice_in_dim(one, devices.number * n_owners, n_owners, 0) for one in bounds]

    def body(i: Any, out: Any) -> Any:
        group, column = i // n_parts, i % n_parts * columns
        groups = [_joined(lax.dynamic_slice_in_dim(one, group, 1, 2)) for one in here]
        old = lax.dynamic_slice_in_dim(_joined(out), column, columns, 3)
        new = part(group // n_groups, group % n_groups, column, old, *groups, positions)
        return lax.dynamic_update_slice_in_dim(_joined(out), new, column, 3).reshape(out.shape)

    starts, ends = bounds
    with jax.named_scope(NEVER):  # a loop keeps its carry in place, where a branch copies it
        return lax.fori_loop(0, jnp.where(jnp.any(starts < ends), n_all * n_parts, 0), body, out)


def _joined(array: Any) -> Any:
    """With one batch, and its first two dimensions as one."""
    return array.reshape(1, -1, *array.shape[2:])


def on_devices(primitive: Primitive, devices: OwnerDevices) -> Callable[..., list[Any]]:
    """The function of a device."""
    return functools.partial(_product if primitive is routed_product_p else _sum, devices)


for primitive, aval in zip(PRIMITIVES, (product_aval, sum_aval), strict=True):
    primitive.multiple_results = True
    primitive.def_abstract_eval(aval)
    primitive.def_impl(on_devices(primitive, OwnerDevices()))
    define_function(primitive, on_devices(primitive, OwnerDevices()))
