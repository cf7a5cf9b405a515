"""Functions of a program: the pure jax function of each task, and those that combine what micro-batches leave.

Their arrays are as they are stored (`Spec.stored_shape`): summands of a partial sum lie along leading dimensions, so
that micro-batches accumulate them without communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import PartitionSpec

from minialpa.inter.microbatch.split_step import Stack
from minialpa.intra.spmd import ShardedEquations, shard_program
from minialpa.ir.equations import aval_of, is_weak
from minialpa.programs.mesh_program import STAND_INS
from minialpa.programs.program import Function
from minialpa.rules.factors import Reduction, combine
from minialpa.sharding import Spec


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTotals:
    """The values of a task that are combined over micro-batches.

    Attributes:
        mesh: number of the mesh.
        mesh_shape: its logical shape.
        values: the variables of one micro-batch.
        totals: for each of them, the variable of all micro-batches; its dtype may be wider.
        reductions: how each is combined.
        specs: specs of the variables of the mesh. A total has that of its value.
    """

    mesh: int
    mesh_shape: tuple[int, ...]
    values: Sequence[Var]
    totals: Sequence[Var]
    reductions: Sequence[Reduction]
    specs: Mapping[Var, Spec]

    @property
    def partition_specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(self.specs[v].partition_spec() for v in self.values)

    @property
    def value_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(stored(v, self.specs[v], self.mesh_shape) for v in self.values)

    @property
    def total_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        pairs = zip(self.totals, self.values, strict=True)
        return tuple(stored(total, self.specs[value], self.mesh_shape) for total, value in pairs)


def accumulate_function(combined: TaskTotals) -> Function:
    """(*totals, *values) -> totals, elementwise by each one's reduction. Totals are donated."""
    n_totals, reductions = len(combined.totals), combined.reductions

    def fun(*args: Any) -> tuple[Any, ...]:
        return tuple(
            combine(r, a, b.astype(a.dtype))
            for r, a, b in zip(reductions, args[:n_totals], args[n_totals:], strict=True)
        )

    return Function(
        name=f"accumulate{combined.mesh}",
        mesh=combined.mesh,
        fun=fun,
        in_avals=(*combined.total_avals, *combined.value_avals),
        in_specs=combined.partition_specs * 2,
        out_avals=combined.total_avals,
        out_specs=combined.partition_specs,
        donated=tuple(range(n_totals)),
    )


def zeros_function(mesh: int, values: Sequence[tuple[jax.ShapeDtypeStruct, Spec]]) -> Function:
    """Totals before the first micro-batch; the array that is stored and the spec of each."""
    avals = tuple(aval for aval, _ in values)
    return Function(
        name=f"zeros{mesh}",
        mesh=mesh,
        fun=lambda: tuple(jnp.zeros(aval.shape, aval.dtype) for aval in avals),
        in_avals=(),
        in_specs=(),
        out_avals=avals,
        out_specs=tuple(spec.partition_spec() for _, spec in values),
    )


def widen_function(combined: TaskTotals) -> Function:
    """The values of the first micro-batch in the dtype of their totals."""
    dtypes = [aval_of(v).dtype for v in combined.totals]

    def fun(*args: Any) -> tuple[Any, ...]:
        return tuple(x.astype(dtype) for x, dtype in zip(args, dtypes, strict=True))

    return Function(
        name=f"widen{combined.mesh}",
        mesh=combined.mesh,
        fun=fun,
        in_avals=combined.value_avals,
        in_specs=combined.partition_specs,
        out_avals=combined.total_avals,
        out_specs=combined.partition_specs,
    )


def concatenate_function(mesh: int, stack: Stack, n_micro_batches: int, spec: Spec) -> Function:
    """The rows of all micro-batches, one behind the other."""
    partition_spec, dtype = spec.partition_spec(), aval_of(stack.total).dtype
    # XLA ends the process where it should put integers of two bits together.
    wide = jnp.dtype(STAND_INS[str(dtype)]) if str(dtype) in STAND_INS else dtype

    def fun(*parts: Any) -> tuple[Any, ...]:
        if wide == dtype:
            return (jnp.concatenate(parts, axis=stack.dim),)
        return (jnp.concatenate([x.astype(wide) for x in parts], axis=stack.dim).astype(dtype),)

    return Function(
        name=f"concatenate{mesh}",
        mesh=mesh,
        fun=fun,
        in_avals=(stored(stack.loop, spec, ()),) * n_micro_batches,
        in_specs=(partition_spec,) * n_micro_batches,
        out_avals=(stored(stack.total, spec, ()),),
        out_specs=(partition_spec,),
    )


def copy_function(mesh: int, values: Sequence[tuple[Any, Spec]]) -> Function:
    """New arrays with the values of the given ones; an aval and a spec for each."""
    avals = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=is_weak(aval)) for aval, _ in values)
    specs = tuple(spec.partition_spec() for _, spec in values)
    return Function(
        name=f"copy{mesh}",
        mesh=mesh,
        fun=lambda *xs: tuple(map(jnp.copy, xs)),
        in_avals=avals,
        in_specs=specs,
        out_avals=avals,
        out_specs=specs,
    )
