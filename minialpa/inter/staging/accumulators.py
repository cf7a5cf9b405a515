"""Accumulators: the program of a pass in, the same program with additions to accumulators out.

The gradients of a micro-batch are added to the gradients of the others. On GPUs the pass itself adds them:

    (*inputs, *accumulators) -> (*results, *accumulators)        accumulators are donated and written in place

So a micro-batch's gradient needs no memory beside its accumulator, and no other program reads and writes all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import jax
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.split_step import Accumulator
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.intra.spmd import ShardedEquations
from minialpa.ir.equations import Atom, bytes_of, dtype_name
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.new_equations import EquationMaker


def added_inside(staged: StagedStep, task: Task) -> tuple[Accumulator, ...]:
    """The accumulators to which a task can add: the sums over micro-batches of its results."""
    split = staged.split
    if not task.per_micro_batch or split.n_micro_batches == 1:
        return ()
    made = set(task.outvars)
    return tuple(a for a in split.accumulators if a.reduction == "sum" and a.loop in made)


def only_added(staged: StagedStep, added: Sequence[Accumulator]) -> set[Var]:
    """The values of a micro-batch that only their sums read."""
    read = {v for task in staged.tasks for v in task.invars} | set(staged.split.results)
    read.update(a.loop for a in staged.split.accumulators if a not in added)
    read.update(joined.loop for joined in staged.split.concatenations)
    return {a.loop for a in added if a.loop not in read}


def with_accumulators(program: ShardedEquations, staged: StagedStep, task: Task) -> ShardedEquations:
    """The program of `task`, with additions to its accumulators.

    Arguments end with the accumulators, and results with their new values.
    """
    added = added_inside(staged, task)
    if not added:
        return program
    made = added_up(program, added)
    new_values = [(accumulator, made.program.specs[old]) for old, accumulator in made.accumulators.items()]
    return with_results(made.program, new_values, only_added(staged, added))


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    """A program that adds to accumulators and returns the results of the pass. Its arguments end with the accumulators.

    accumulators: for each accumulator, the variable of its new value.
    """

    program: ShardedEquations
    accumulators: dict[Var, Atom]


def added_up(program: ShardedEquations, added: Sequence[Accumulator]) -> Added:
    """`program` with additions to the accumulators `added`."""
    eqns, accumulators = list(program.eqns), dict[Var, Atom]()
    specs, equations, maker = dict(program.specs), dict(program.equations), EquationMaker()
    adds: dict[Var, JaxprEqn] = {}

    for one in added:
        spec, dtype = specs[one.loop], dtype_name(one.complete)
        new, (accumulators[one.complete],) = maker.compute(("add", dtype), adding, one.complete, one.loop)
        specs[one.complete] = spec
        for eqn in new:
            operands = (spec,) * len(eqn.invars)
            equations[eqn] = EquationSpecs(operands, (spec,), (spec,))
            specs.update((v, spec) for v in eqn.outvars)
        eqns += new
        adds.update((one.loop, eqn) for eqn in new[-1:])

    invars = (*program.invars, *(one.complete for one in added))
    repeats = program.repeats.with_readers(adds) if program.repeats.equations else program.repeats
    made = dataclasses.replace(
        program, eqns=tuple(eqns), invars=invars, specs=specs, equations=equations, repeats=repeats
    )
    return Added(made, accumulators)


def with_results(
    program: ShardedEquations, added_results: Sequence[tuple[Atom, Spec]], dropped: Collection[Var]
) -> ShardedEquations:
    """`program` without the results `dropped`, and with the further results `added_results`, each with its spec."""
    results = [(v, s) for v, s in zip(program.outvars, program.out_specs, strict=True) if v not in dropped]
    outvars, out_specs = zip(*results, *added_results, strict=True) if results or added_results else ((), ())
    return dataclasses.replace(program, outvars=outvars, out_specs=out_specs)


def adding(accumulator: jax.Array, value: jax.Array) -> jax.Array:
    return accumulator + value.astype(accumulator.dtype)


def bytes_of_accumulators(program: ShardedEquations, accumulators: Sequence[Var]) -> float:
    """Bytes per device."""
    n_of, shape = program.repeats.n_variables, program.mesh.shape
    return sum(n_of(v) * bytes_of(v) / program.specs[v].n_shards(shape) for v in accumulators)
