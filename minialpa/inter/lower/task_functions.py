"""Functions of a program: tasks with their specs in, pure jax functions with shardings for their arrays out.

Arrays are as they are stored (`Spec.stored_shape`): summands of a partial sum lie along leading dimensions, so that
micro-batches accumulate them without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from minialpa.intra.spmd import ShardedEquations, shard_program
from minialpa.programs.mesh_program import STAND_INS
from minialpa.programs.program import Function
from minialpa.sharding import Spec
from minialpa.tracing.jaxprs import aval_of, is_weak


def stored(var: Var, spec: Spec, mesh_shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """The array that holds `var`."""
    aval = aval_of(var)
    return jax.ShapeDtypeStruct(spec.stored_shape(aval.shape, mesh_shape), aval.dtype, weak_type=is_weak(aval))


def task_function(name: str, mesh: int, program: ShardedEquations) -> Function:
    """The equations of a task as a function."""
    in_specs = [program.specs[v] for v in program.invars]
    return Function(
        name=name,
        mesh=mesh,
        fun=shard_program(program),
        in_avals=tuple(stored(v, s, program.mesh.shape) for v, s in zip(program.invars, in_specs, strict=True)),
        in_specs=tuple(spec.partition_spec() for spec in in_specs),
        out_avals=tuple(
            stored(v, s, program.mesh.shape) for v, s in zip(program.outvars, program.out_specs, strict=True)
        ),
        out_specs=tuple(spec.partition_spec() for spec in program.out_specs),
    )


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b.astype(a.dtype),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.logical_and,
    "or": jnp.logical_or,
    "prod": lambda a, b: a * b,
}


def accumulate_function(
    mesh: int,
    mesh_shape: tuple[int, ...],
    loops: Sequence[Var],
    totals: Sequence[Var],
    reductions: Sequence[str],
    specs: Mapping[Var, Spec],
) -> Function:
    """(*totals, *values) -> totals, elementwise by each one's reduction. Totals are donated."""
    n = len(totals)

    def fun(*args: Any) -> tuple[Any, ...]:
        return tuple(_COMBINE[r](a, b) for r, a, b in zip(reductions, args[:n], args[n:], strict=True))

    total_specs = tuple(specs[v].partition_spec() for v in loops)
    out = tuple(stored(v, specs[loop], mesh_shape) for v, loop in zip(totals, loops, strict=True))
    structs = (*out, *(stored(v, specs[v], mesh_shape) for v in loops))
    return Function(
        name=f"accumulate{mesh}",
        mesh=mesh,
        fun=fun,
        in_avals=structs,
        in_specs=total_specs * 2,
        out_avals=out,
        out_specs=total_specs,
        donated=tuple(range(n)),
    )


def widen_function(
    mesh: int, mesh_shape: tuple[int, ...], loops: Sequence[Var], totals: Sequence[Var], specs: Mapping[Var, Spec]
) -> Function:
    """The values of the first micro-batch in the dtype of their totals."""
    dtypes = [aval_of(v).dtype for v in totals]
    in_specs = tuple(specs[v].partition_spec() for v in loops)

    def fun(*args: Any) -> tuple[Any, ...]:
        return tuple(x.astype(dtype) for x, dtype in zip(args, dtypes, strict=True))

    structs = tuple(stored(v, specs[v], mesh_shape) for v in loops)
    out = tuple(stored(v, specs[loop], mesh_shape) for v, loop in zip(totals, loops, strict=True))
    return Function(
        name=f"widen{mesh}",
        mesh=mesh,
        fun=fun,
        in_avals=structs,
        in_specs=in_specs,
        out_avals=out,
        out_specs=in_specs,
    )


def concatenate_function(mesh: int, loop: Var, total: Var, dim: int, n: int, spec: Spec) -> Function:
    """The parts of `n` micro-batches, one behind the other."""
    named = spec.partition_spec()
    dtype = aval_of(total).dtype
    # XLA ends the process where it should put integers of two bits together.
    wide = jnp.dtype(STAND_INS[str(dtype)]) if str(dtype) in STAND_INS else dtype

    def fun(*parts: Any) -> tuple[Any, ...]:
        if wide == dtype:
            return (jnp.concatenate(parts, axis=dim),)
        return (jnp.concatenate([x.astype(wide) for x in parts], axis=dim).astype(dtype),)

    return Function(
        name=f"concatenate{mesh}",
        mesh=mesh,
        fun=fun,
        in_avals=(stored(loop, spec, ()),) * n,
        in_specs=(named,) * n,
        out_avals=(stored(total, spec, ()),),
        out_specs=(named,),
    )


def copy_function(mesh: int, values: Sequence[tuple[Any, Spec]]) -> Function:
    """New arrays with the values of the given ones; an aval and a spec for each."""
    structs = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak(aval)) for aval, _ in values)
    specs = tuple(spec.partition_spec() for _, spec in values)
    return Function(
        name=f"copy{mesh}",
        mesh=mesh,
        fun=lambda *xs: tuple(map(jnp.copy, xs)),
        in_avals=structs,
        in_specs=specs,
        out_avals=structs,
        out_specs=specs,
    )
