"""A stage and a memory limit in, the cheapest shardings that fit out, at the prices of a given solver.

The cost graph counts stored tensors, without the buffers of collectives. So each solution is measured, and solved with
another *room* (the limit that the graph keeps) until the measured bytes nearly fill the memory. With a limit of 1000:

    room 1000   counted 1000, measured 1050: too large, so the next room is smaller by the missing bytes
    room  950   counted  950, measured 1000: fits

Between a solution that fits and one that is too large, the room is interpolated, while the solution in unlimited memory
predicts a gain. If no solution fits, three other ways follow:

- The graph also counts gathered weights, or only tensors that outlive the tasks.
- Examples are split over one mesh axis, so that only weights are gathered.
- Standard plans such as ZeRO-3 are measured.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jax.extend.core import Var

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.inter.search.stage_memory import MeshMemory, Moments, mesh_memory, mesh_usages, needed_bytes
from minialpa.inter.search.stage_times import stage_times
from minialpa.inter.staging.last_pass import TaskProgram
from minialpa.inter.staging.mesh_problem import ShardedView, TaskCollectives, mesh_collectives, mesh_programs
from minialpa.inter.staging.tasks import StagedStep
from minialpa.intra.graph.memory_constraints import MemoryLimit
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.graph.solve import MeshSolver
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.solver.clock import Deadline
from minialpa.ir.equations import bytes_of, source_line
from minialpa.options import PLANNED_STEPS, AutoShardingOption
from minialpa.support.sizes import bytes_text

#: Most solves of a stage with other room: in all, and after the first solution that fits.
_MAX_SOLVES, _MAX_AFTER_FIT = 6, 2
#: Least time limit of a solve, in counted seconds (see `Deadline`).
_LEAST_LIMIT_S = 1.0
#: Largest fraction of the training run for all solves in short memory, beyond the least seconds of each.
_PART_OF_RUN = 0.25
#: More room is tried if its predicted gain is more than this fraction of a step.
_LITTLE_GAIN = 0.005
#: A solution may leave this fraction of the limit unused.
_LITTLE_LEFT = 0.01
#: Other ways are tried in problems of few equations, or if the smallest solution needs at most this multiple of the
#: limit. In larger problems these take long, and did not help in 12 stages.
_NEARLY_FITS, _FEW_EQUATIONS = 1.1, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSolution:
    """The cheapest shardings of a stage in unlimited memory: seconds of one step, bytes of one device.

    bound_s: lower bound with any shardings; 0 if unknown.
    """

    seconds: float
    n_bytes: float
    limit_bytes: float
    bound_s: float = 0.0

    @property
    def fits(self) -> bool:
        return self.n_bytes <= self.limit_bytes


class NothingFitsError(InfeasibleError):
    """No solution fits in memory. n_bytes: per device, of the smallest solution with the reserve."""

    def __init__(self, message: str, n_bytes: float) -> None:
        super().__init__(message)
        self.n_bytes = n_bytes


class _Measurement:
    """The memory is computed at the first use."""

    def __init__(self, programs: Sequence[TaskProgram], memory: Callable[[Sequence[TaskProgram]], MeshMemory]) -> None:
        self.moved = tuple(mesh_collectives(programs))
        self._memory: MeshMemory | None = None
        self._programs, self._compute = programs, memory

    def memory(self) -> MeshMemory:
        if self._memory is None:
            self._memory = self._compute(self._programs)
            self._programs = ()
        return self._memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedStage:
    """Shardings of a stage.

    measured: computes the memory of its tasks, which solutions that are too slow never need.
    free: the cheapest shardings in unlimited memory, possibly the same; `None` if unknown.
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
    """Mesh number `mesh` of a staged step. measured: all solutions so far; solves with different room often agree."""

    staged: StagedStep
    mesh: int
    problem: MeshEquations
    view: ShardedView
    compiler: Compiler
    solver: MeshSolver
    measured: dict[Hashable, _Measurement] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SolveLimits:
    """The limits of a solution, and hints from other solutions.

    Attributes:
        moments: see `live_counts`.
        n_bytes: memory of a device, even if `option` sets no limit.
        uncounted_bytes: a guess of (measured bytes) - (counted bytes).
        free: (seconds of a step, bytes per device) of the solution in unlimited memory; `None` to solve in such memory.
        below_s: solutions in unlimited memory of so many seconds per step or more are useless.
        in_other_ways: whether to try the other ways of the module docstring, which have other prices.
    """

    option: AutoShardingOption
    moments: Moments
    n_bytes: float
    uncounted_bytes: float
    free: tuple[float, float] | None
    below_s: float = math.inf
    in_other_ways: bool = True
    work: Deadline = field(default_factory=lambda: Deadline(math.inf))

    def deadline(self) -> Deadline:
        """In short memory in proportion to the training run."""
        limit_s = self.option.solver_limit_s
        if self.free is None:
            return self.work.within(limit_s)
        left_s = _PART_OF_RUN * PLANNED_STEPS[self.option.planning_effort] * self.free[0] - self.work.spent_s
        return self.work.within(min(limit_s, max(_LEAST_LIMIT_S, left_s)))


def solve_in_memory(stage: Stage, limits: SolveLimits) -> SolvedStage:
    """The cheapest solution within the limit, at the prices of `stage.solver`. Raises InfeasibleError."""
    limit = _memory_limit(stage, limits.option, limits.moments)
    try:
        return _solve_within_limit(stage, limits, limit)
    except InfeasibleError as error:
        if limit is None or not limit.usages or not limits.in_other_ways:
            raise
        is_far = isinstance(error, NothingFitsError) and error.n_bytes > _NEARLY_FITS * limit.limit_bytes
        if is_far and len(stage.problem.eqns) > _FEW_EQUATIONS:
            raise
        found = list(_solutions_in_other_ways(stage, limits, limit)) or list(_standard_solutions(stage, limits, limit))
        if not found:
            raise
    # Solutions with the reserve come first, then the fastest.
    with_reserve = [one for one in found if needed(one.memory, limits.moments) <= limit.limit_bytes]
    return min(with_reserve or found, key=lambda one: seconds_of(stage, one))


def needed(memory: MeshMemory, moments: Moments) -> float:
    """Peak bytes per device over `moments`, with the reserve for errors of the prediction."""
    return needed_bytes(memory.peak_bytes(moments) - memory.temp_bytes, memory.temp_bytes)


def seconds_of(stage: Stage, solved: SolvedStage) -> float:
    """Of one step, without waits for other stages."""
    split = stage.staged.split
    times = stage_times(stage.problem, solved.sharding, solved.moved, stage.view.mesh, split.n_loops)
    return split.n_micro_batches * times.pass_s + times.per_step_s


def uncounted(solved: SolvedStage, moments: Moments) -> float:
    """(Measured bytes) - (counted bytes) of a solution; negative if the graph counts too much."""
    counted = solved.sharding.counted_bytes
    return needed(solved.memory, moments) - counted if counted else 0.0


def _solutions_in_other_ways(stage: Stage, limits: SolveLimits, limit: MemoryLimit) -> Iterator[SolvedStage]:
    option, moments = limits.option, limits.moments
    usages = mesh_usages(stage.staged, stage.mesh, moments, stage.view, compiler=stage.compiler, gathered=True)
    always = tuple(usage for usage in limit.usages if usage.end - usage.start == limit.n_times)
    for counted in (usages, always) if always else (usages,):
        with contextlib.suppress(InfeasibleError):
            yield _solve_within_limit(stage, limits, replace(limit, usages=counted))

    # Devices that split the examples exchange no activations, so the graph counts all buffers.
    for split in splits_of_examples(option, stage.view.mesh):
        with contextlib.suppress(InfeasibleError):
            yield _solve_within_limit(_stage_with_option(stage, split), limits, limit)


def _standard_solutions(stage: Stage, limits: SolveLimits, limit: MemoryLimit) -> Iterator[SolvedStage]:
    option = limits.option
    for standard in standard_plans(option, stage.view.mesh):
        with contextlib.suppress(InfeasibleError):
            solved = _solve_once(_stage_with_option(stage, standard), None, limits.deadline())
            if solved.memory.peak_bytes(limits.moments) <= limit.limit_bytes:
                yield solved


def _stage_with_option(stage: Stage, option: AutoShardingOption) -> Stage:
    solver = stage.solver
    other = MeshSolver(stage.problem, stage.view.mesh, option, solver.cache, hidden_price=solver.hidden_price)
    return replace(stage, solver=other)


def _solve_within_limit(stage: Stage, limits: SolveLimits, limit: MemoryLimit | None) -> SolvedStage:
    deadline = limits.deadline()
    if limit is None or not limit.usages:
        return _solve_or_explain(stage, limits, limit, limit, deadline)

    limit_search = _LimitSearch(limit.limit_bytes)
    counted_limit: float | None = limit_search.first(limits.uncounted_bytes)
    found: list[SolvedStage] = []
    for _ in range(_MAX_SOLVES):
        assert counted_limit is not None
        lowered = replace(limit, limit_bytes=counted_limit)
        try:
            solved = _solve_or_explain(stage, limits, limit, lowered, deadline)
        except InfeasibleError:
            counted_limit = limit_search.after_none(counted_limit)
            if counted_limit is None and not found:
                raise
        else:
            found.append(solved)
            counted = min(counted_limit, solved.sharding.counted_bytes or counted_limit)
            counted_limit = limit_search.after(counted_limit, counted, needed(solved.memory, limits.moments))
        is_over = counted_limit is None or limit_search.n_after_fit >= _MAX_AFTER_FIT
        if is_over or not _gains_from_more_room(stage, limits, limit, found):
            break
    return _fastest_that_fits(stage, limits, limit, found)


def _fastest_that_fits(
    stage: Stage, limits: SolveLimits, limit: MemoryLimit, found: Sequence[SolvedStage]
) -> SolvedStage:
    """Raises NothingFitsError."""
    fitting = [one for one in found if needed(one.memory, limits.moments) <= limit.limit_bytes]
    if fitting:
        return min(fitting, key=lambda one: seconds_of(stage, one))

    # A solution that fits without the reserve is good enough.
    smallest = min(found, key=lambda one: one.memory.peak_bytes(limits.moments))
    if smallest.memory.peak_bytes(limits.moments) > limit.limit_bytes:
        raise _too_large_error(smallest.memory, limit, limits.moments)
    return smallest


def _gains_from_more_room(stage: Stage, limits: SolveLimits, limit: MemoryLimit, found: Sequence[SolvedStage]) -> bool:
    """Whether no solution fits yet, or the memory that the fastest one leaves may make the step faster.

    The gain is interpolated to the solution in unlimited memory.
    """
    fitting = [one for one in found if needed(one.memory, limits.moments) <= limit.limit_bytes]
    if not fitting or limits.free is None:
        return not fitting
    best = min(fitting, key=lambda one: seconds_of(stage, one))
    best_s, n_needed = seconds_of(stage, best), needed(best.memory, limits.moments)
    free_s, free_bytes = limits.free
    gain_s = (best_s - free_s) * (limit.limit_bytes - n_needed) / max(1.0, free_bytes - n_needed)
    return gain_s > _LITTLE_GAIN * best_s


class _LimitSearch:
    """Proposes the room of each solve, until a solution needs nearly `limit_bytes`. All numbers are bytes per device.

    Needed bytes differ from counted bytes, and both rise with the room. So the next room lies between the largest
    solution that fits and the smallest that does not.
    """

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        # (counted, needed) of the largest solution that fits, and of the solutions that do not fit.
        self._largest_fit: tuple[float, float] | None = None
        self._misfits: list[tuple[float, float]] = []
        self._infeasible_room = 0.0  # the largest one
        self._has_interpolated = False
        self.n_after_fit = 0  # solutions after the first one that fits

    def first(self, uncounted_bytes: float) -> float:
        return self.limit_bytes - uncounted_bytes if uncounted_bytes < self.limit_bytes else self.limit_bytes

    def after_none(self, counted_limit: float) -> float | None:
        """`None` to stop."""
        self._infeasible_room = max(self._infeasible_room, counted_limit)
        if self._misfits:
            return self._smaller_room()
        return self.limit_bytes if self._largest_fit is None and counted_limit < self.limit_bytes else None

    def after(self, counted_limit: float, counted: float, needed_bytes: float) -> float | None:
        missing = needed_bytes - self.limit_bytes
        self.n_after_fit += self._largest_fit is not None
        if missing > 0:
            self._misfits.append((counted, needed_bytes))
            return self._room_between() if self._largest_fit else self._smaller_room()

        if self._largest_fit is None or counted > self._largest_fit[0]:
            self._largest_fit = counted, needed_bytes
        if -missing <= _LITTLE_LEFT * self.limit_bytes:
            return None
        if self._misfits:
            return self._room_between()
        # A solution that leaves some room unused is the cheapest with any room.
        return counted_limit - missing if counted >= (1 - _LITTLE_LEFT) * counted_limit else None

    def _smaller_room(self) -> float | None:
        """Less room, by the missing bytes; `None` if even the infeasible room would not save enough.

        The last two solutions show the needed bytes per counted byte, at first 1.
        """
        counted, needed_bytes = self._misfits[-1]
        missing, per_byte = needed_bytes - self.limit_bytes, 1.0
        if len(self._misfits) > 1:
            before, needed_before = self._misfits[-2]
            if before > counted:
                per_byte = min(4.0, max(0.5, (needed_before - needed_bytes) / (before - counted)))
            if self._infeasible_room and per_byte * (counted - self._infeasible_room) < missing:
                return None
        return max(counted - missing / per_byte, (counted + self._infeasible_room) / 2)

    def _room_between(self) -> float | None:
        """Linear interpolation, then the middle."""
        assert self._largest_fit is not None
        low, low_bytes = self._largest_fit
        above = [one for one in self._misfits if one[0] > low]
        if not above:
            return None
        high, high_bytes = min(above)
        part = 0.5 if self._has_interpolated else (self.limit_bytes - low_bytes) / (high_bytes - low_bytes)
        self._has_interpolated = True
        return low + part * (high - low) if part * (high - low) > _LITTLE_LEFT * low else None


def _solve_once(stage: Stage, lowered: MemoryLimit | None, deadline: Deadline) -> SolvedStage:
    """lowered: the room."""
    solution = stage.solver.solve(lowered, deadline)
    key = (solution.equations, tuple(solution.specs.values()), tuple(solution.results.values()))
    if key not in stage.measured:
        programs = mesh_programs(stage.staged, stage.mesh, stage.problem, solution, stage.view)
        stage.measured[key] = _Measurement(
            programs,
            lambda programs: mesh_memory(
                stage.staged, stage.mesh, programs, solution, stage.view, compiler=stage.compiler
            ),
        )
    found = stage.measured[key]
    return SolvedStage(sharding=solution, moved=found.moved, measured=found.memory)


def _solve_or_explain(
    stage: Stage, limits: SolveLimits, limit: MemoryLimit | None, lowered: MemoryLimit | None, deadline: Deadline
) -> SolvedStage:
    """limit: of the device, for the error."""
    try:
        return _solve_once(stage, lowered, deadline.within(max(_LEAST_LIMIT_S, deadline.left_s)))
    except InfeasibleError as error:
        raise _explained_error(error, stage, limits.option, limit, is_late=deadline.is_over) from error


def _explained_error(
    error: InfeasibleError, stage: Stage, option: AutoShardingOption, limit: MemoryLimit | None, *, is_late: bool
) -> InfeasibleError:
    if is_late:
        within = f" within {bytes_text(limit.limit_bytes)} per device" if limit else ""
        return InfeasibleError(
            f"The solver found no sharding{within} in {option.solver_limit_s:g} s. Raise `solver_time_limit_s`, now "
            f"{option.solver_time_limit_s:g}."
        )

    if limit is None:
        return InfeasibleError(stage.solver.why_infeasible(option.solver_limit_s) or str(error))

    if "memory_limit_bytes" in str(error):
        return error
    return InfeasibleError(
        f"No sharding fits in {bytes_text(limit.limit_bytes)} per device. Use more devices or micro-batches, or raise "
        "`memory_limit_bytes`."
    )


def _memory_limit(stage: Stage, option: AutoShardingOption, moments: Moments) -> MemoryLimit | None:
    """The limit, with the values that count; `None` without a limit.

    No value counts if even all unsharded values cannot reach the limit.
    """
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


def _too_large_error(memory: MeshMemory, limit: MemoryLimit, moments: Moments) -> NothingFitsError:
    listed = "".join(f"\n  {tensor}" for tensor in memory.largest)
    return NothingFitsError(
        f"The smallest plan found needs {bytes_text(memory.peak_bytes(moments))} per device, "
        f"{bytes_text(memory.peak_bytes(moments) - limit.limit_bytes)} above the limit of "
        f"{bytes_text(limit.limit_bytes)}. Use more devices or micro-batches, or raise `memory_limit_bytes`. The "
        f"plan's largest arrays:{listed}",
        needed(memory, moments),
    )


# ---- standard plans --------------------------------------------------------------------------------------------------


def standard_plans(option: AutoShardingOption, mesh: LogicalMesh) -> Iterator[AutoShardingOption]:
    """`option` with ZeRO-3, ZeRO-2 and mixed plans; empty if it fixes the split of the examples.

    Mixed plans split examples over one axis and layers over others, with and without replicated parameters.
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
    """`option` with the examples split over each axis; empty if it fixes their split."""
    if not option.enable_auto_sharding or option.data_parallel or option.force_batch_dim_to_mesh_dim is not None:
        return
    axes: tuple[Literal[0, 1, 2], ...] = (0, 1, 2)
    for axis, n_devices in zip(axes, mesh.shape, strict=False):
        if n_devices > 1:
            yield replace(option, force_batch_dim_to_mesh_dim=axis)
