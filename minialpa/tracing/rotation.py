"""`rotate`, which devices with parts of an array compute by passing slices to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive

from minialpa.support.private_jax import define_batching, define_function, define_linear, new_aval

rotate_p = Primitive("minialpa_rotate")
rotate_p.multiple_results = True


def rotate(x: Any, shift: int, dim: int) -> Any:
    """Position i of dimension `dim` is position i + shift of `x`, modulo the length."""
    shift %= x.shape[dim]
    return rotate_p.bind(x, dim=dim, shift=shift)[0] if shift else x


def _rotated(x: Any, *, dim: int, shift: int) -> list[Any]:
    return [jnp.roll(x, -shift, dim)]


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
    return rotate_p.bind(jnp.moveaxis(operands[0], dims[0], -1), **params), [operands[0].ndim - 1]


def _transpose(cotangents: Sequence[Any], operand: Any, *, dim: int, shift: int) -> list[Any]:
    (cotangent,) = cotangents
    return [rotate(cotangent, -shift, dim)]


rotate_p.def_abstract_eval(lambda x, *, dim, shift: [new_aval(x.shape, x.dtype, (x,))])
rotate_p.def_impl(_rotated)
define_function(rotate_p, _rotated)
define_batching(rotate_p, _batch)
define_linear(rotate_p, _transpose)
