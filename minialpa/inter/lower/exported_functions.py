"""Export: functions of a program in, bytes for workers in other processes and types of arrays out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from minialpa.errors import TraceError
from minialpa.ir.equations import host_type, is_extended, is_in_host, is_weak
from minialpa.programs.mesh_program import KEY_NAMES, KEY_SHAPES, STAND_INS, ArrayType, MeshFunction
from minialpa.programs.program import Function
from minialpa.sharding import abstract_mesh, placed


def array_type(aval: Any) -> ArrayType:
    """The type of an array for workers. Raises TraceError for keys that workers cannot receive."""
    if not is_extended(aval.dtype):
        dtype = str(np.dtype(aval.dtype))
        return ArrayType(tuple(aval.shape), dtype, weak_type=is_weak(aval), in_host=is_in_host(aval))
    name = str(aval.dtype).removeprefix("key<").removesuffix(">")
    if name not in KEY_SHAPES:
        raise TraceError(
            f"Random keys of {aval.dtype} cannot be sent to the workers of a cluster. Make the keys with "
            f"`jax.random.key(seed, impl=...)` and one of {', '.join(map(repr, KEY_NAMES.values()))}."
        )
    return ArrayType(tuple(aval.shape), "uint32", name, in_host=is_in_host(aval))


def export_function(function: Function, mesh_shape: tuple[int, ...], platform: str) -> MeshFunction:
    """`function` as bytes that any process with devices of `platform` can compile. Starts no device.

    Raises TraceError for dtypes and callbacks that cannot leave this process.
    """
    mesh = abstract_mesh(mesh_shape)

    def step(*args: Any) -> Any:  # one name for all: equal stages have equal bytes
        given = [_as_dtype(x, aval.dtype) for x, aval in zip(args, function.in_avals, strict=True)]
        return tuple(_as_dtype(x, _named_dtype(x.dtype)) for x in function.fun(*given))

    in_avals = [_struct(x) for x in function.in_avals]
    jitted = jax.jit(
        step,
        in_shardings=_shardings(mesh, function.in_specs, function.in_avals),
        out_shardings=_shardings(mesh, function.out_specs, function.out_avals),
        keep_unused=True,
    )
    try:
        with _without_locations():
            exported = jax.export.export(jitted, platforms=(platform,))(*in_avals)
        code = bytes(exported.serialize())
    except KeyError as error:
        raise TraceError(
            f"The function `{function.name}` of the step has arrays of {error}, which `jax.export` cannot send to the "
            "workers of a cluster. Convert them to another dtype in the step."
        ) from error
    except (NotImplementedError, ValueError) as error:
        raise TraceError(
            f"The function `{function.name}` of the step cannot be sent to the workers of a cluster ({error}). Remove "
            "callbacks into Python, such as `jax.debug.print`, from the step."
        ) from error

    return MeshFunction(
        name=function.name,
        code=code,
        in_types=tuple(map(array_type, function.in_avals)),
        in_specs=function.in_specs,
        out_types=tuple(map(array_type, function.out_avals)),
        out_specs=function.out_specs,
        donated=function.donated,
        compiler_options=function.compiler_options,
    )


def _shardings(mesh: Any, specs: Sequence[PartitionSpec], types: Sequence[Any]) -> tuple[NamedSharding, ...]:
    return tuple(placed(mesh, spec, in_host=is_in_host(aval)) for spec, aval in zip(specs, types, strict=True))


def _struct(aval: Any) -> Any:
    make = host_type if is_in_host(aval) else jax.ShapeDtypeStruct
    return make(aval.shape, _named_dtype(aval.dtype), weak_type=aval.weak_type)


def _named_dtype(dtype: Any) -> Any:
    return np.dtype(STAND_INS[str(dtype)]) if str(dtype) in STAND_INS else dtype


def _as_dtype(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else jax.lax.convert_element_type(x, dtype)


@contextmanager
def _without_locations() -> Iterator[None]:
    """Lower programs without source lines: equal stages, and steps with several callers, get equal bytes."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)
