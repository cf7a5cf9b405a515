"""Functions of a program: the jax function of each task, and functions that combine values of micro-batches.

Arrays have their stored shapes (`Spec.stored_shape`): summands of a partial sum have extra leading dimensions, so
micro-batches accumulate them without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from minialpa.inter.microbatch.split_step import Concatenation
from minialpa.intra.shard_arrays import shard_program
from minialpa.intra.spmd import ShardedEquations
from minialpa.ir.equations import Atom, aval_of, type_of
from minialpa.programs.mesh_program import STAND_INS
from minialpa.programs.program import Function
from minialpa.rules.factors import Reduction, combine
from minialpa.sharding import Spec

#: Several stored arrays with their specs.
Arrays = Sequence[tuple[jax.ShapeDtypeStruct, Spec]]


def stored(atom: Atom, spec: Spec, mesh_shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, Spec]:
    """The array that holds `atom`, with its spec."""
    aval = aval_of(atom)
    shape = spec.stored_shape(aval.shape, mesh_shape)
    return type_of(aval, shape), spec


def _function(
    name: str, mesh: int, fun: Callable[..., Any], inputs: Arrays, outputs: Arrays, donated: tuple[int, ...] = ()
) -> Function:
    return Function(
        name=name,
        mesh=mesh,
        fun=fun,
        in_avals=tuple(aval for aval, _ in inputs),
        in_specs=tuple(spec.partition_spec() for _, spec in inputs),
        out_avals=tuple(aval for aval, _ in outputs),
        out_specs=tuple(spec.partition_spec() for _, spec in outputs),
        donated=donated,
    )


def task_function(name: str, mesh: int, program: ShardedEquations) -> Function:
    shape = program.mesh.shape
    inputs = [stored(v, program.specs[v], shape) for v in program.invars]
    outputs = [stored(v, spec, shape) for v, spec in zip(program.outvars, program.out_specs, strict=True)]
    return _function(name, mesh, shard_program(program), inputs, outputs)


def accumulate_function(mesh: int, accumulators: Arrays, values: Arrays, reductions: Sequence[Reduction]) -> Function:
    """(*accumulators, *values) -> accumulators, by each reduction. Accumulators are donated and may be wider."""
    n_accumulators = len(accumulators)

    def fun(*args: Any) -> tuple[Any, ...]:
        pairs = zip(reductions, args[:n_accumulators], args[n_accumulators:], strict=True)
        return tuple(combine(r, accumulator, value.astype(accumulator.dtype)) for r, accumulator, value in pairs)

    return _function(
        f"accumulate{mesh}", mesh, fun, [*accumulators, *values], accumulators, tuple(range(n_accumulators))
    )


def zeros_function(mesh: int, accumulators: Arrays) -> Function:
    def fun() -> tuple[Any, ...]:
        return tuple(jnp.zeros(aval.shape, aval.dtype) for aval, _ in accumulators)

    return _function(f"zeros{mesh}", mesh, fun, (), accumulators)


def widen_function(mesh: int, values: Arrays, accumulators: Arrays) -> Function:
    """The values of the first micro-batch in the dtypes of their accumulators."""

    def fun(*args: Any) -> tuple[Any, ...]:
        return tuple(x.astype(aval.dtype) for x, (aval, _) in zip(args, accumulators, strict=True))

    return _function(f"widen{mesh}", mesh, fun, values, accumulators)


def concatenate_function(mesh: int, joined: Concatenation, n_micro_batches: int, spec: Spec) -> Function:
    """The examples of all micro-batches in one array."""
    dtype = aval_of(joined.complete).dtype
    wide = STAND_INS.get(str(dtype))

    def fun(*parts: Any) -> tuple[Any, ...]:
        if wide is None:
            return (jnp.concatenate(parts, axis=joined.dim),)
        # XLA crashes where it concatenates integers of two bits.
        return (jnp.concatenate([x.astype(wide) for x in parts], axis=joined.dim).astype(dtype),)

    parts = [stored(joined.loop, spec, ())] * n_micro_batches
    return _function(f"concatenate{mesh}", mesh, fun, parts, [stored(joined.complete, spec, ())])


def copy_function(mesh: int, values: Arrays) -> Function:
    return _function(f"copy{mesh}", mesh, lambda *xs: tuple(map(jnp.copy, xs)), values, values)
