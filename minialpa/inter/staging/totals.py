"""Totals of micro-batches: the program of a pass in, the same program that adds what it makes to totals out.

A pass of one micro-batch leaves gradients, which are added to those of the others. On GPUs the pass adds them itself:

    (*inputs, *totals) -> (*results, *totals)        each total is donated, so that it is written in place

so that no gradient of a micro-batch stays beside its total, and no program reads and writes all of them once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.extend.core import Var

from minialpa.inter.microbatch.split_step import Accumulator
from minialpa.inter.staging.split_values import step_results
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.intra.spmd import ShardedEquations
from minialpa.sharding import EquationSpecs
from minialpa.tracing.jaxprs import Atom, bytes_of, dtype_name
from minialpa.tracing.new_equations import EquationMaker


def added_inside(staged: StagedStep, task: Task) -> tuple[Accumulator, ...]:
    """The totals that a task can add to itself: the sums over micro-batches of what it makes."""
    split = staged.split
    if not task.per_micro_batch or split.n_micro_batches == 1:
        return ()
    made = set(task.outvars)
    return tuple(a for a in split.accumulators if a.reduction == "sum" and a.loop in made)


def only_added(staged: StagedStep, added: Sequence[Accumulator]) -> set[Var]:
    """The values of a micro-batch that nobody reads but those who add them up."""
    read = {v for task in staged.tasks for v in task.invars} | set(step_results(staged.split))
    read.update(a.loop for a in staged.split.accumulators if a not in added)
    read.update(stack.loop for stack in staged.split.stacks)
    return {a.loop for a in added if a.loop not in read}


def with_totals(program: ShardedEquations, staged: StagedStep, task: Task) -> ShardedEquations:
    """The program of `task`, which adds to its totals if it is one that does.

    Its arguments end with the totals so far, and its results with the new ones.
    """
    added = added_inside(staged, task)
    if not added:
        return program
    eqns, totals = list(program.eqns), list[Atom]()
    specs, equations, maker = dict(program.specs), dict(program.equations), EquationMaker()

    for one in added:
        spec, dtype = specs[one.loop], dtype_name(one.total)
        new, (total,) = maker.compute(("add", dtype), _adding, one.total, one.loop)
        specs[one.total] = spec
        for eqn in new:
            operands = (spec,) * len(eqn.invars)
            equations[id(eqn)] = EquationSpecs(operands, (spec,), (spec,))
            specs.update((v, spec) for v in eqn.outvars)
        eqns += new
        totals.append(total)

    dropped = only_added(staged, added)
    results = [(v, s) for v, s in zip(program.outvars, program.out_specs, strict=True) if v not in dropped]
    return dataclasses.replace(
        program,
        eqns=tuple(eqns),
        invars=(*program.invars, *(one.total for one in added)),
        outvars=(*(v for v, _ in results), *totals),
        specs=specs,
        equations=equations,
        out_specs=(*(s for _, s in results), *(specs[one.loop] for one in added)),
    )


def _adding(total: jax.Array, value: jax.Array) -> jax.Array:
    return total + value.astype(total.dtype)


def bytes_of_totals(program: ShardedEquations, n_totals: int) -> float:
    """Bytes per device of the totals that a program ends with."""
    last = zip(program.outvars[-n_totals:], program.out_specs[-n_totals:], strict=True) if n_totals else ()
    return sum(bytes_of(v) / spec.n_shards(program.mesh.shape) for v, spec in last)
