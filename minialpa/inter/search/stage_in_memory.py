"""Solves a stage within its memory: the cheapest shardings that fit, at given prices.

The cost graph counts stored tensors, without the buffers of collectives. So the solution is measured. If it is too
large, the problem is solved with less room: less by the missing bytes, or by half of that if no solution fits. A stage
that was solved with other micro-batches in flight predicts the difference. The graph may also count too much; then a
solve with more room follows.

If no such solution fits, there are others. The graph also counts gathered weights, which is too much for weights that
are stored whole. Examples are split over a mesh axis, so only weights are gathered. Last, the standard plans are
measured.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from jax.extend.core import Var

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.inter.search.stage_memory import MeshMemory, Moments, mesh_memory, mesh_usages, needed_bytes
from minialpa.inter.search.stage_times import stage_times
from minialpa.inter.staging.mesh_problem import ShardedView, TaskCollectives, mesh_collectives, mesh_programs
from minialpa.inter.staging.tasks import StagedStep
from minialpa.intra.graph.memory_constraints import MemoryLimit
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.graph.solve import MeshSolver
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.solver.clock import Deadline
from minialpa.ir.equations import bytes_of, source_line
from minialpa.options import AutoShardingOption

#: Solves of a stage with more room, at most.
_MAX_WITH_MORE_ROOM = 2
#: Solves of a stage with less room, at most.
_MAX_SOLVES = 5
#: More room is tried if it promises more than this part of a step.
_LITTLE_GAIN = 0.005
#: A solution with guessed room may leave this part of the limit.
_LITTLE_LEFT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSolution:
    """The cheapest shardings of a stage in unlimited memory: seconds of one step, and bytes per device.

    limit_bytes: of each device; inf without a limit.
    bound_s: lower bound on the seconds of one step with any shardings; 0 if it is not known.
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
    """Shardings of a stage, with the collectives and the memory of its tasks.

    measured: returns the memory of the tasks; too slow solutions never compute it.
    free: the cheapest shardings in unlimited memory; these ones, if they fit. None if unknown.
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
    """A stage to solve: its equations and mesh in a staged step, its view, and its solver."""

    staged: StagedStep
    mesh: int
    problem: MeshEquations
    view: ShardedView
    compiler: Compiler
    solver: MeshSolver


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Wanted:
    """The limits of a solution, and hints from other solutions.

    Attributes:
        option: the options, with the memory limit.
        moments: see `live_counts`.
        n_bytes: memory of each device, also if `option` has no limit.
        uncounted_bytes: a guess of the bytes beyond the counted ones.
        free: if there is a limit, seconds of a step and bytes per device of the solution without it.
        in_other_ways: whether to look for solutions that the counted bytes miss. They have prices of their own.
    """

    option: AutoShardingOption
    moments: Moments
    n_bytes: float
    uncounted_bytes: float
    free: tuple[float, float] | None
    in_other_ways: bool = True


def solve_in_memory(stage: Stage, wanted: Wanted) -> SolvedStage:
    """The cheapest solution within the limit, at the prices of the solver of `stage`."""
    limit = _limit(stage, wanted.option, wanted.moments)
    try:
        solved = _within_limit(stage, wanted.option, wanted.moments, limit, wanted.uncounted_bytes)
    except InfeasibleError:
        if limit is None or not limit.usages or not wanted.in_other_ways:
            raise
        found = list(_in_other_ways(stage, wanted, limit)) or list(_as_everybody_does(stage, wanted, limit))
        if not found:
            raise
        # The fastest, if possible with the reserve.
        with_reserve = [one for one in found if needed(one[1].memory, wanted.moments) <= limit.limit_bytes]
        limit, solved = min(with_reserve or found, key=lambda one: seconds_of(stage, one[1]))
    if limit is None or wanted.free is None:
        return solved
    return _with_more_room(stage, wanted, limit, solved, wanted.free)


def needed(memory: MeshMemory, moments: Moments) -> float:
    """Bytes per device at the fullest of `moments`, with the reserve for errors of the prediction."""
    return needed_bytes(memory.peak_bytes(moments) - memory.temp_bytes, memory.temp_bytes)


def seconds_of(stage: Stage, solved: SolvedStage) -> float:
    """Seconds of one step, without waiting for other stages, by the collectives of the programs."""
    split = stage.staged.split
    times = stage_times(stage.problem, solved.sharding, solved.moved, stage.view.mesh, split.n_loops)
    return split.n_micro_batches * times.pass_s + times.once_s


def uncounted(solved: SolvedStage, moments: Moments) -> float:
    """Bytes of a solution beyond the counted ones; negative if the limit counts too much."""
    counted = solved.sharding.counted_bytes
    return needed(solved.memory, moments) - counted if counted else 0.0


def _in_other_ways(stage: Stage, wanted: Wanted, limit: MemoryLimit) -> Iterator[tuple[MemoryLimit, SolvedStage]]:
    """Solutions within `limit` that the counted bytes of the first solves miss, each with the limit that counts it."""
    option, moments = wanted.option, wanted.moments
    usages = mesh_usages(stage.staged, stage.mesh, moments, stage.view, compiler=stage.compiler, gathered=True)
    counted = replace(limit, usages=usages)
    with contextlib.suppress(InfeasibleError):
        yield counted, _with_less_room(stage, option, moments, counted)

    # Without exchanges of activations, which the graph does not count, its count is complete.
    for split in splits_of_examples(option, stage.view.mesh):
        with contextlib.suppress(InfeasibleError):
            yield limit, _with_less_room(_under(stage, split), option, moments, limit)


def _as_everybody_does(stage: Stage, wanted: Wanted, limit: MemoryLimit) -> Iterator[tuple[MemoryLimit, SolvedStage]]:
    """Standard plans within `limit`."""
    option = wanted.option
    for standard in standard_plans(option, stage.view.mesh):
        with contextlib.suppress(InfeasibleError):
            solved = _solved(_under(stage, standard), None, Deadline(option.solver_time_limit_s))
            if solved.memory.peak_bytes(wanted.moments) <= limit.limit_bytes:
                yield limit, solved


def _under(stage: Stage, option: AutoShardingOption) -> Stage:
    """The stage under other options."""
    return replace(stage, solver=MeshSolver(stage.problem, stage.view.mesh, option, stage.solver.cache))


def _with_more_room(
    stage: Stage, wanted: Wanted, limit: MemoryLimit, best: SolvedStage, free: tuple[float, float]
) -> SolvedStage:
    """`best`, or a faster solution that uses the memory that `best` leaves, if the limit counts too much.

    free: seconds and bytes of the solution in unlimited memory. They predict the gain from more room.
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
            other = _solved(stage, room, Deadline(wanted.option.solver_time_limit_s))
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
    """A solution within the limit; the first solve leaves room for the guessed uncounted bytes."""
    if limit is None or not limit.usages or not uncounted_bytes or uncounted_bytes >= limit.limit_bytes:
        return _with_less_room(stage, option, moments, limit)

    # With the right guess, one solution is enough, unless it leaves much of the memory.
    room = replace(limit, limit_bytes=limit.limit_bytes - uncounted_bytes)
    try:
        guess = _solved(stage, room, Deadline(option.solver_time_limit_s))
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
    """Solutions with ever less room until one is within `limit`."""
    room, found = limit, list[SolvedStage]()
    deadline = Deadline(option.solver_time_limit_s)
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

        # Less room by the missing bytes, or by half of that if it was too little. Room that the solution leaves does
        # not help: with a little less of it, the solver would return the same solution.
        found.append(solved)
        solved_bytes = min(room.limit_bytes, solved.sharding.counted_bytes or room.limit_bytes)
        less = max(solved_bytes - (n_needed - limit.limit_bytes), (solved_bytes + hopeless_bytes) / 2)
        room = replace(room, limit_bytes=less)

    # A solution that only lacks the reserve for small buffers is good enough.
    assert limit is not None
    smallest = min(found, key=lambda solved: solved.memory.peak_bytes(moments))
    if smallest.memory.peak_bytes(moments) > limit.limit_bytes:
        raise _too_large(smallest.memory, limit, moments)
    return smallest


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
    """The limit of the options, with the usages that count towards it if they may reach it; None without a limit."""
    problem, view = stage.problem, stage.view
    n_bytes = option.limit_bytes(view.mesh.device)
    if n_bytes is None or math.isinf(n_bytes):
        return None
    unsharded = sum(bytes_of(v) for v, _ in problem.inputs) + sum(bytes_of(v) for e in problem.eqns for v in e.outvars)
    if (1 + max(map(max, moments))) * unsharded <= n_bytes:  # no count can reach the limit
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


# ---- standard plans --------------------------------------------------------------------------------------------------


def standard_plans(option: AutoShardingOption, mesh: LogicalMesh) -> Iterator[AutoShardingOption]:
    """`option` with one well-known plan after the other: ZeRO-3, ZeRO-2, and 2-D plans, which split examples over one
    axis of the mesh and layers over the other, with and without whole parameters. Empty if `option` asks for such a
    plan itself.
    """
    splits = tuple(splits_of_examples(option, mesh))
    if not splits:
        return

    yield replace(option, force_zero_stage_3=True)
    if option.allow_replicated_parameters:
        yield replace(option, force_data_parallel=True, prefer_reduce_scatter=True)
    for split in splits:
        sharded = replace(split, prefer_reduce_scatter=True)
        yield replace(sharded, allow_replicated_parameters=False)
        if option.allow_replicated_parameters:
            yield sharded


def splits_of_examples(option: AutoShardingOption, mesh: LogicalMesh) -> Iterator[AutoShardingOption]:
    """`option` with the examples split over one mesh axis after the other; empty if it fixes their split."""
    if not option.enable_auto_sharding or option.data_parallel or option.force_batch_dim_to_mesh_dim is not None:
        return
    axes: tuple[Literal[0, 1], ...] = (0, 1)
    for axis, n_devices in zip(axes, mesh.shape, strict=False):
        if n_devices > 1:
            yield replace(option, force_batch_dim_to_mesh_dim=axis)
