"""Grouped products (`minialpa.grouped`) of rows in slots (`minialpa.routing`): `routed_product_p`, `routed_sum_p`.

Owner y has e matrices, and c slots for the rows of each block x. Slots from `starts` to `ends` have rows of its own
groups, slots from `foreign_starts` to `foreign_ends` rows of any of the y e groups. Other slots give zeros.

    product: out[y x c n] = sum_k lhs[y x c k] rhs[g k n], for slot c of group g
    sum:     out[g k n] = sum_(y x c) lhs[y x c k] rhs[y x c n], over the slots of group g

Devices may share the owners. If a foreign slot is in use, they receive the matrices of each device, or sum its results,
in turn. Otherwise, they send nothing.
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

from minialpa.grouped import NEVER, product, sum_of_products
from minialpa.support.private_jax import define_function, new_aval

#: Operands: lhs [y x c k], rhs [y e k n], or [y e n k] if `summed` is 3, starts and ends [y x e], positions [c], and
#: foreign_starts and foreign_ends [y x y*e]. Result: [y x c n] of `dtype`. n_rows: expected rows of c slots.
routed_product_p = Primitive("minialpa_routed_product")

#: Operands: lhs [y x c k], rhs [y x c n], then as above. Result: [y e k n] of `dtype`.
routed_sum_p = Primitive("minialpa_routed_sum")

PRIMITIVES = (routed_product_p, routed_sum_p)


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
        return jnp.where(self.number == device, lax.psum(array, self.names), 0) if self.names else array


def _product(devices: OwnerDevices, lhs: Any, rhs: Any, *bounds: Any, **params: Any) -> list[Any]:
    def add_part(device: Any, out: Any, lhs: Any, rhs: Any, *bounds: Any) -> Any:
        (made,) = product(_joined(lhs), _joined(devices.received(rhs, device)), *bounds, **params)
        return out + made.reshape(out.shape)

    (out,) = product(lhs, rhs, *bounds[:3], **params)
    return _with_foreign_slots(devices, add_part, bounds[0].shape[-1], out, lhs, rhs, *bounds[2:])


def _sum(devices: OwnerDevices, lhs: Any, rhs: Any, *bounds: Any, dtype: str, **params: Any) -> list[Any]:
    wide = np.promote_types(dtype, np.float32).name if jnp.issubdtype(dtype, jnp.inexact) else dtype

    def add_part(device: Any, out: Any, lhs: Any, rhs: Any, *bounds: Any) -> Any:
        (made,) = sum_of_products(_joined(lhs), _joined(rhs), *bounds, dtype=wide, **params)
        return (out + devices.summed(made.reshape(out.shape), device)).astype(dtype)

    (out,) = sum_of_products(lhs, rhs, *bounds[:3], dtype=dtype, **params)
    return _with_foreign_slots(devices, add_part, bounds[0].shape[-1], out, lhs, rhs, *bounds[2:])


def _with_foreign_slots(
    devices: OwnerDevices,
    add_part: Callable[..., Any],
    n_each: int,
    out: Any,
    lhs: Any,
    rhs: Any,
    positions: Any,
    *bounds: Any,
) -> list[Any]:
    """`out` after `add_part` for the matrices of each device, `n_each` of an owner. bounds: of all foreign slots."""

    def add_all(out: Any, lhs: Any, rhs: Any) -> Any:
        n_owners = lhs.shape[0]
        here = [lax.dynamic_slice_in_dim(one, devices.number * n_owners, n_owners, 0) for one in bounds]
        n_groups = n_owners * n_each

        def body(device: Any, out: Any) -> Any:
            part = [_joined(lax.dynamic_slice_in_dim(one, device * n_groups, n_groups, 2)) for one in here]
            return add_part(device, out, lhs, rhs, *part, positions)

        return lax.fori_loop(0, devices.n, body, out) if devices.n > 1 else body(0, out)

    starts, ends = bounds
    with jax.named_scope(NEVER):
        return [lax.cond(jnp.any(starts < ends), add_all, lambda out, *_: out, out, lhs, rhs)]


def _joined(array: Any) -> Any:
    """With one batch, and its first two dimensions as one."""
    return array.reshape(1, -1, *array.shape[2:])


def on_devices(primitive: Primitive, devices: OwnerDevices) -> Callable[..., list[Any]]:
    """The function of a device."""
    return functools.partial(_product if primitive is routed_product_p else _sum, devices)


def _product_aval(lhs: Any, rhs: Any, *others: Any, summed: int, dtype: str, **_: Any) -> list[Any]:
    return [new_aval((*lhs.shape[:3], rhs.shape[5 - summed]), np.dtype(dtype), (lhs, rhs, *others))]


def _sum_aval(lhs: Any, rhs: Any, starts: Any, *others: Any, dtype: str, **_: Any) -> list[Any]:
    shape = (lhs.shape[0], starts.shape[-1], lhs.shape[-1], rhs.shape[-1])
    return [new_aval(shape, np.dtype(dtype), (lhs, rhs, starts, *others))]


for primitive, aval in zip(PRIMITIVES, (_product_aval, _sum_aval), strict=True):
    primitive.multiple_results = True
    primitive.def_abstract_eval(aval)
    primitive.def_impl(on_devices(primitive, OwnerDevices()))
    define_function(primitive, on_devices(primitive, OwnerDevices()))
