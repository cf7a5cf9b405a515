"""Last passes: the programs of a mesh in, the same programs with the sums of gradients in the last pass of a loop out.

On GPUs, the pass of the last micro-batch sums accumulators over devices while it computes (README of the package):

    pass            (*inputs, *accumulators) -> (*results, *accumulators)             all micro-batches but the last
    last pass       (*inputs, *accumulators) -> (*results, *accumulators, *sums)      without summed accumulators
    update          (*inputs, *sums)         -> results                               without the equations that sum
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.staging.accumulators import (
    added_inside,
    added_up,
    bytes_of_accumulators,
    only_added,
    with_accumulators,
    with_results,
)
from minialpa.inter.staging.sums_in_scans import sum_accumulators_in_scans, sum_gradients_in_scans
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.intra.spmd import Communication, ShardedEquations, collectives_of
from minialpa.ir.equations import is_gradient_marker, operand_vars


@dataclass(frozen=True, slots=True)
class LastPass:
    """The last run of a task in its loop, with the arguments of the other runs.

    Attributes:
        program: its results end with `accumulators`, then `sums`.
        accumulators: the accumulators that the update sums.
        sums: the accumulators that this pass has summed over devices.
        loops: for each scan that sums accumulators, the scan of the other passes.
    """

    program: ShardedEquations
    accumulators: tuple[Var, ...]
    sums: tuple[Var, ...]
    loops: dict[JaxprEqn, JaxprEqn]

    def collectives(self) -> tuple[Communication, ...]:
        return _in_loops(collectives_of(self.program), self.loops)


@dataclass(frozen=True, slots=True)
class TaskProgram:
    """A task and its program, whose further arguments are the accumulators.

    Attributes:
        last: the last run in the loop; None if it is like the others.
        loops: for each scan of `program` that sums gradients, the scan of the task.
    """

    task: Task
    program: ShardedEquations
    last: LastPass | None = None
    loops: Mapping[JaxprEqn, JaxprEqn] = field(default_factory=dict)

    def collectives(self) -> tuple[Communication, ...]:
        """The collectives of each run, in the loops of the task."""
        return _in_loops(collectives_of(self.program), self.loops)

    @property
    def accumulators(self) -> tuple[Var, ...]:
        return self.program.invars[len(self.task.invars) :]

    @property
    def accumulator_bytes(self) -> float:
        """Per device."""
        return bytes_of_accumulators(self.program, self.accumulators)

    @property
    def summed_before(self) -> tuple[Var, ...]:
        """Accumulators that the task reads and its program does not: the program reads the sums of a last pass."""
        read = set(self.program.invars)
        return tuple(v for v in self.task.invars if v not in read)


def _in_loops(found: Sequence[Communication], loops: Mapping[JaxprEqn, JaxprEqn]) -> tuple[Communication, ...]:
    """The collectives `found`, in the scans of `loops`. A collective that stands for n is listed n times."""
    if loops:
        found = [one if one.loop is None else one._replace(loop=loops.get(one.loop, one.loop)) for one in found]
    if all(one.n == 1 for one in found):
        return tuple(found)

    # A collective waits for all collectives for which its predecessor stands.
    starts = list(itertools.accumulate((one.n for one in found), initial=0))
    bits = [((1 << one.n) - 1) << start for one, start in zip(found, starts, strict=False)]
    repeated: list[Communication] = []
    for one in found:
        after = sum(bits[i] for i in range(one.after.bit_length()) if one.after >> i & 1)
        repeated += [one._replace(after=after, n=1)] * one.n
    return tuple(repeated)


def with_hidden_sums(staged: StagedStep, plain: Sequence[tuple[Task, ShardedEquations]]) -> list[TaskProgram]:
    """Programs of the tasks of one mesh, which sum gradients over devices while they compute.

    plain: the tasks in order, with programs without accumulators.
    """
    if staged.split.n_micro_batches > 1:
        return _with_last_passes(staged, plain)
    made = [(task, sum_gradients_in_scans(program)) for task, program in plain]
    return [TaskProgram(task, one.program, loops=one.loops) for task, one in made]


def _with_last_passes(staged: StagedStep, plain: Sequence[tuple[Task, ShardedEquations]]) -> list[TaskProgram]:
    """Programs whose updates leave sums to last passes."""
    updates = [task for task, _ in plain if task.kind == "update"]
    last: dict[Task, LastPass] = {}
    moved: dict[Var, JaxprEqn] = {}

    for task, program in plain:
        sums = _sums_of(staged, task, updates)
        made = _last_pass(staged, task, program, sums)
        if made is not None:
            last[task] = made
            moved.update(sums)
    return [
        TaskProgram(task, _without_moved_sums(with_accumulators(program, staged, task), moved), last.get(task))
        for task, program in plain
    ]


def _sums_of(staged: StagedStep, task: Task, updates: Sequence[Task]) -> dict[Var, JaxprEqn]:
    """For accumulators of `task`, the equation of an update on the same mesh that sums each of them over devices.

    Leaves out accumulators with any other reader, and sums that other meshes read or the step returns.
    """
    accumulators = {one.complete for one in added_inside(staged, task)}
    n_tasks = Counter(v for other in staged.tasks for v in other.invars)
    elsewhere = {v for other in staged.tasks if other.mesh != task.mesh for v in other.invars}
    leaving = {*staged.split.results, *elsewhere}

    found: dict[Var, JaxprEqn] = {}
    for update in updates:
        n_reads = Counter(v for eqn in update.eqns for v in operand_vars(eqn))
        only_here = {v for v in accumulators - leaving if n_reads[v] == n_tasks[v] == 1}
        found.update((v, eqn) for v, eqn in _markers(update) if v in only_here and eqn.outvars[0] not in leaving)
    return found


def _markers(update: Task) -> Iterator[tuple[Var, JaxprEqn]]:
    """Each equation of an update that marks where one value is summed over devices, with this value."""
    for eqn in update.eqns:
        if is_gradient_marker(eqn) and len(eqn.invars) == len(operand_vars(eqn)) == 1:
            yield operand_vars(eqn)[0], eqn


def _last_pass(
    staged: StagedStep, task: Task, program: ShardedEquations, sums: Mapping[Var, JaxprEqn]
) -> LastPass | None:
    """The last pass of `task` that computes `sums`; None if it has no work to hide them."""
    if not sums:
        return None
    added = added_inside(staged, task)
    scanned = sum_accumulators_in_scans(program, added, sums)
    in_scans = {one.complete for one in added if one.loop in scanned.summed}
    made = added_up(scanned.program, [one for one in added if one.complete not in in_scans])

    # Accumulators that scans have not summed are summed after the pass, beside other work.
    eqns, equations, specs = list(made.program.eqns), dict(made.program.equations), dict(made.program.specs)
    for accumulator, eqn in sums.items():
        if accumulator not in in_scans:
            new = eqn.replace(invars=[made.accumulators[accumulator]])
            eqns.append(new)
            equations[new] = equations[eqn]
            specs[accumulator] = program.specs[accumulator]

    accumulators = [one.complete for one in added if one.complete not in sums]
    results = [eqn.outvars[0] for eqn in sums.values()]
    new_results = [(made.accumulators[v], specs[v]) for v in accumulators] + [(v, specs[v]) for v in results]
    with_sums = dataclasses.replace(
        made.program,
        eqns=tuple(eqns),
        # In the order of the other passes.
        invars=(*program.invars, *(one.complete for one in added)),
        equations=equations,
        specs=specs,
    )
    last = with_results(with_sums, new_results, only_added(staged, added))
    n_hidden = sum(one.can_hide for one in collectives_of(last))
    if n_hidden <= sum(one.can_hide for one in collectives_of(program)):
        return None
    return LastPass(last, tuple(accumulators), tuple(results), scanned.loops)


def _without_moved_sums(program: ShardedEquations, moved: Mapping[Var, JaxprEqn]) -> ShardedEquations:
    moved_eqns = set(moved.values())
    eqns = tuple(eqn for eqn in program.eqns if eqn not in moved_eqns)
    if len(eqns) == len(program.eqns):
        return program
    invars = tuple(moved[v].outvars[0] if v in moved else v for v in program.invars)
    sums = {eqn.outvars[0] for eqn in moved.values()}
    return with_results(dataclasses.replace(program, eqns=eqns, invars=invars), (), sums)
