"""Solves a stage in the memory that it has: the cheapest shardings that fit, at given prices.

The cost graph counts tensors as they are stored; what a solution communicates needs room as well. So the solution is
measured, and where it is too large the problem is solved again with that much less room, or half as much less where
that is too little for any. A stage that was solved with other micro-batches in flight says how much less it will be.
The graph may also count more than a program needs, and then what a solution leaves is tried.

If no such solution fits, there are others. The graph also counts weights as they are gathered, which it does not do at
first, because that is too much for weights that are stored whole. Examples are split over a mesh axis, so that little
but weights is gathered. If nothing else fits, the plans that everybody knows are measured.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from jax.extend.core import Var

from minialpa.errors import InfeasibleError
from minialpa.inter.search.stage_memory import MeshMemory, Moments, mesh_memory, mesh_usages, needed_bytes
from minialpa.inter.search.stage_times import stage_times
from minialpa.inter.search.standard_plans import splits_of_examples, standard_plans
from minialpa.inter.staging.mesh_problem import ShardedView, TaskCollectives, mesh_collectives, mesh_programs
from minialpa.inter.staging.tasks import StagedStep
from minialpa.intra.graph.memory_constraints import MemoryLimit
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.graph.solve import MeshSolver
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.solver.clock import Deadline
from minialpa.ir.equations import bytes_of, source_line
from minialpa.options import AutoShardingOption

#: How often a stage is solved with more room.
_MAX_WITH_MORE_ROOM = 2
#: How often a stage is solved with less room.
_MAX_SOLVES = 5
#: Part of a step that more room has to promise to be tried.
_LITTLE_GAIN = 0.005
#: Part of the limit that a solution may leave when its room was a guess.
_LITTLE_LEFT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSolution:
    """The cheapest shardings of a stage with no regard to memory.

    Attributes:
        seconds: of one step, without waiting for other stages.
        n_bytes: that they need per device.
        limit_bytes: that each device has; inf without a limit.
        bound_s: seconds of one step that any shardings take at least; 0 where that is not known.
    """

    seconds: float
    n_bytes: float
    limit_bytes: float
    bound_s: float = 0.0

    @property
    def fits(self) -> bool:
        return self.n_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedStage:
    """Shardings of a stage, and what its tasks communicate and need in memory under them.

    Attributes:
        sharding: the shardings.
        moved: what the tasks communicate.
        measured: returns the memory that the tasks need, which is not computed for solutions that are too slow.
        free: the cheapest shardings with no regard to memory, which these are if they fit; None if that is not known.
    """

    sharding: MeshSharding
    moved: tuple[TaskCollectives, ...]
    measured: Callable[[], MeshMemory]
    free: FreeSolution | None = None

    @property
    def memory(self) -> MeshMemory:
        return self.measured()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Stage:
    """A stage to solve.

    Attributes:
        staged: the step.
        mesh: number of the mesh of the stage.
        problem: the equations of the mesh.
        view: its logical mesh, and the collectives that its options forbid.
        compiler: of its programs.
        solver: of the problem.
    """

    staged: StagedStep
    mesh: int
    problem: MeshEquations
    view: ShardedView
    compiler: Compiler
    solver: MeshSolver


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Wanted:
    """What a solution has to keep, and what others say about it.

    Attributes:
        option: the options, with the memory limit.
        moments: see `live_counts`.
        n_bytes: bytes of memory that each device has, also where `option` has no limit.
        uncounted_bytes: what a solution of such a stage needs, at a guess, beyond what the limit counts.
        free: if there is a limit, seconds of a step and bytes per device of the solution without it.
        in_other_ways: whether there may be solutions that the limit does not find by what it counts. They have prices
            of their own.
    """

    option: AutoShardingOption
    moments: Moments
    n_bytes: float
    uncounted_bytes: float
    free: tuple[float, float] | None
    in_other_ways: bool = True


def solve_in_memory(stage: Stage, wanted: Wanted) -> SolvedStage:
    """The cheapest solution that keeps the limit, at the prices of the solver of `stage`."""
    limit = _limit(stage, wanted.option, wanted.moments)
    try:
        solved = _within_limit(stage, wanted.option, wanted.moments, limit, wanted.uncounted_bytes)
    except InfeasibleError:
        if limit is None or not limit.usages or not wanted.in_other_ways:
            raise
        found = list(_in_other_ways(stage, wanted, limit)) or list(_as_everybody_does(stage, wanted, limit))
        if not found:
            raise
        # The fastest, if possible of those that leave the reserve.
        with_reserve = [one for one in found if needed(one[1].memory, wanted.moments) <= limit.limit_bytes]
        limit, solved = min(with_reserve or found, key=lambda one: seconds_of(stage, one[1]))
    if limit is None or wanted.free is None:
        return solved
    return _with_more_room(stage, wanted, limit, solved, wanted.free)


def needed(memory: MeshMemory, moments: Moments) -> float:
    """Bytes per device at the fullest of `moments`, with the reserve for what predictions miss."""
    return needed_bytes(memory.peak_bytes(moments) - memory.temp_bytes, memory.temp_bytes)


def seconds_of(stage: Stage, solved: SolvedStage) -> float:
    """Seconds of one step, without waiting for other stages, from what the programs communicate."""
    split = stage.staged.split
    times = stage_times(stage.problem, solved.sharding, solved.moved, stage.view.mesh, split.n_loops)
    return split.n_micro_batches * times.pass_s + times.once_s


def uncounted(solved: SolvedStage, moments: Moments) -> float:
    """Bytes that a solution needs beyond what the limit counts; negative if the limit counts more."""
    counted = solved.sharding.counted_bytes
    return needed(solved.memory, moments) - counted if counted else 0.0


def _in_other_ways(stage: Stage, wanted: Wanted, limit: MemoryLimit) -> Iterator[tuple[MemoryLimit, SolvedStage]]:
    """Solutions that keep `limit`, each with the limit that counts it, where those at first sight do not."""
    option, moments = wanted.option, wanted.moments
    usages = mesh_usages(stage.staged, stage.mesh, moments, stage.view, compiler=stage.compiler, gathered=True)
    counted = replace(limit, usages=usages)
    with contextlib.suppress(InfeasibleError):
        yield counted, _with_less_room(stage, option, moments, counted)

    # Without exchanges of activations, which the graph does not count either, it counts what programs need.
    for split in splits_of_examples(option, stage.view.mesh):
        with contextlib.suppress(InfeasibleError):
            yield limit, _with_less_room(_under(stage, split), option, moments, limit)


def _as_everybody_does(stage: Stage, wanted: Wanted, limit: MemoryLimit) -> Iterator[tuple[MemoryLimit, SolvedStage]]:
    """Standard plans that keep `limit`."""
    option = wanted.option
    for standard in standard_plans(option, stage.view.mesh):
        with contextlib.suppress(InfeasibleError):
            solved = _solved(_under(stage, standard), None, _deadline(option))
            if solved.memory.peak_bytes(wanted.moments) <= limit.limit_bytes:
                yield limit, solved


def _under(stage: Stage, option: AutoShardingOption) -> Stage:
    """The stage with a solver that keeps `option`."""
    return replace(stage, solver=MeshSolver(stage.problem, stage.view.mesh, option, stage.solver.cache))


def _with_more_room(
    stage: Stage, wanted: Wanted, limit: MemoryLimit, best: SolvedStage, free: tuple[float, float]
) -> SolvedStage:
    """`best`, or a faster solution with the room that it leaves: what the limit counts may be more than it needs.

    free: seconds and bytes of the solution in memory without end, which say about how much room may gain.
    """
    best_s, part = seconds_of(stage, best), 1.0
    free_s, free_bytes = free
    for _ in range(_MAX_WITH_MORE_ROOM):
        n_needed = needed(best.memory, wanted.moments)
        left_bytes = part * (limit.limit_bytes - n_needed)
        gain_s = (best_s - free_s) * left_bytes / max(1.0, free_bytes - n_needed)
        is_little = left_bytes <= _LITTLE_LEFT * limit.limit_bytes or gain_s <= _LITTLE_GAIN * best_s
        if is_little or not best.sharding.counted_bytes:
            break

        room = replace(limit, limit_bytes=best.sharding.counted_bytes + left_bytes)
        try:
            other = _solved(stage, room, _deadline(wanted.option))
        except InfeasibleError:  # in time
            break
        if needed(other.memory, wanted.moments) > limit.limit_bytes:
            part /= 2
            continue
        other_s = seconds_of(stage, other)
        if other_s >= best_s:
            break
        best, best_s, part = other, other_s, 1.0
    return best


def _within_limit(
    stage: Stage, option: AutoShardingOption, moments: Moments, limit: MemoryLimit | None, uncounted_bytes: float
) -> SolvedStage:
    """A solution that keeps the limit, the first one with as much room as a guess of what is not counted leaves."""
    if limit is None or not limit.usages or not uncounted_bytes or uncounted_bytes >= limit.limit_bytes:
        return _with_less_room(stage, option, moments, limit)

    # With the right guess, one solution is enough. It is not taken if it leaves much of the memory.
    guess: SolvedStage | None = None
    try:
        guess = _solved(stage, replace(limit, limit_bytes=limit.limit_bytes - uncounted_bytes), _deadline(option))
    except InfeasibleError:
        return _with_less_room(stage, option, moments, limit)
    left_bytes = limit.limit_bytes - needed(guess.memory, moments)
    if 0 <= left_bytes <= _LITTLE_LEFT * limit.limit_bytes:
        return guess
    try:
        return _with_less_room(stage, option, moments, limit)
    except InfeasibleError:
        if left_bytes < 0:
            raise
        return guess


def _with_less_room(
    stage: Stage, option: AutoShardingOption, moments: Moments, limit: MemoryLimit | None
) -> SolvedStage:
    """Solutions with ever less room until one keeps `limit`."""
    room, found = limit, list[SolvedStage]()
    deadline = _deadline(option)
    solved_bytes = hopeless_bytes = 0.0  # what the limit counted of the last solution; room that was too little
    for _ in range(_MAX_SOLVES):
        try:
            solved = _solved(stage, room, deadline.within(max(1.0, deadline.left_s)))
        except InfeasibleError as error:
            if room is None or not found:
                raise _explained(error, stage, option, limit, is_late=deadline.is_over) from error
            hopeless_bytes = room.limit_bytes
            room = replace(room, limit_bytes=(solved_bytes + hopeless_bytes) / 2)
            continue

        if limit is None or room is None:
            return solved
        n_needed = needed(solved.memory, moments)
        if n_needed <= limit.limit_bytes:
            return solved

        # Less room by what is missing, or half as much less where that much was too little. Room that the solution
        # leaves does not help: with a little less of it, the same solution would come again.
        found.append(solved)
        solved_bytes = min(room.limit_bytes, solved.sharding.counted_bytes or room.limit_bytes)
        less = max(solved_bytes - (n_needed - limit.limit_bytes), (solved_bytes + hopeless_bytes) / 2)
        room = replace(room, limit_bytes=less)

    # What only lacks the reserve for small buffers is taken.
    assert limit is not None
    smallest = min(found, key=lambda solved: solved.memory.peak_bytes(moments))
    if smallest.memory.peak_bytes(moments) > limit.limit_bytes:
        raise _too_large(smallest.memory, limit, moments)
    return smallest


def _deadline(option: AutoShardingOption) -> Deadline:
    """The end of a stage's solver, in counted work."""
    return Deadline(option.solver_time_limit_s)


def _solved(stage: Stage, room: MemoryLimit | None, deadline: Deadline) -> SolvedStage:
    """The solution with so much room, measured with its collectives and the places of its buffers."""
    solution = stage.solver.solve(room, deadline)
    programs = tuple(mesh_programs(stage.staged, stage.mesh, stage.problem, solution, stage.view))

    @functools.cache
    def measured() -> MeshMemory:
        return mesh_memory(stage.staged, stage.mesh, programs, solution, stage.view, compiler=stage.compiler)

    return SolvedStage(sharding=solution, moved=tuple(mesh_collectives(programs)), measured=measured)


def _explained(
    error: InfeasibleError, stage: Stage, option: AutoShardingOption, limit: MemoryLimit | None, *, is_late: bool
) -> InfeasibleError:
    """`error` in the words of the options."""
    if is_late:
        within = f" within {limit.limit_bytes:,.0f} bytes per device" if limit else ""
        return InfeasibleError(
            f"No sharding{within} was found in {option.solver_time_limit_s:g} s. Raise `solver_time_limit_s`."
        )

    # Without a limit, only options can forbid all shardings.
    if limit is None:
        return InfeasibleError(stage.solver.why_infeasible(option.solver_time_limit_s) or str(error))

    if "memory_limit_bytes" in str(error):
        return error
    return InfeasibleError(
        f"No sharding keeps within {limit.limit_bytes:,.0f} bytes per device at all times. Allow more devices or "
        "micro-batches, or raise `memory_limit_bytes`."
    )


def _limit(stage: Stage, option: AutoShardingOption, moments: Moments) -> MemoryLimit | None:
    """The limit of the options, with what counts towards it where that may reach it; None for no limit."""
    problem, view = stage.problem, stage.view
    n_bytes = option.limit_bytes(view.mesh.device)
    if n_bytes is None or math.isinf(n_bytes):
        return None
    unsharded = sum(bytes_of(v) for v, _ in problem.inputs) + sum(bytes_of(v) for e in problem.eqns for v in e.outvars)
    if (1 + max(map(max, moments))) * unsharded <= n_bytes:  # nothing needs counting
        return MemoryLimit(n_bytes)

    def name_of(var: Var) -> str:
        traced = stage.staged.split.traced
        paths = dict(zip(traced.flat.invars, traced.in_paths, strict=True))
        return paths.get(var) or next((source_line(eqn) for eqn in problem.eqns if var in eqn.outvars), "")

    usages = mesh_usages(stage.staged, stage.mesh, moments, stage.view, compiler=stage.compiler)
    return MemoryLimit(n_bytes, usages, name_of)


def _too_large(memory: MeshMemory, limit: MemoryLimit, moments: Moments) -> InfeasibleError:
    listed = "".join(f"\n  {tensor}" for tensor in memory.largest)
    return InfeasibleError(
        f"The smallest plan found needs {memory.peak_bytes(moments):,.0f} bytes per device and the limit is "
        f"{limit.limit_bytes:,.0f}. Allow more devices or micro-batches, or raise `memory_limit_bytes`. Its largest "
        f"tensors:{listed}"
    )
