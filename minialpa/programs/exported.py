"""What an exported function computes: a `MeshFunction` in, what `jax.jit` takes and the types of its arguments out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from minialpa.programs.mesh_program import STAND_INS, MeshFunction


def callable_of(function: MeshFunction) -> tuple[Callable[..., Any], list[Any]]:
    """The function, and shape and dtype of each argument.

    Elements that `jax.export` has no name for have their own types again.
    """
    exported = jax.export.deserialize(bytearray(function.code))
    narrow = any(kind.dtype in STAND_INS for kind in (*function.in_types, *function.out_types))
    avals = [
        jax.ShapeDtypeStruct(aval.shape, kind.jax_dtype) if kind.dtype in STAND_INS else aval
        for aval, kind in zip(exported.in_avals, function.in_types, strict=True)
    ]
    return (_with_narrow(exported, function) if narrow else exported.call), avals


def _with_narrow(exported: Any, function: MeshFunction) -> Callable[..., tuple[Any, ...]]:
    """An exported function with the types that others stand for in it."""

    def call(*args: Any) -> tuple[Any, ...]:
        given = [
            x.astype(aval.dtype) if kind.dtype in STAND_INS else x
            for x, aval, kind in zip(args, exported.in_avals, function.in_types, strict=True)
        ]
        results = zip(exported.call(*given), function.out_types, strict=True)
        return tuple(x.astype(kind.jax_dtype) if kind.dtype in STAND_INS else x for x, kind in results)

    return call
