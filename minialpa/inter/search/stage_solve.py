"""Whole stages in, shardings that fit in memory out; each distinct stage is solved once.

`stage_in_memory.py` solves a stage at given prices of collectives. The first prices are optimistic, which makes a lower
bound: work hides collectives, and many sums start as one. If the programs of the solution do otherwise, this module
solves the stage at other prices and keeps the fastest solution.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Hashable
from dataclasses import dataclass, replace

from jax.extend.core import Var

from minialpa.cluster import LogicalMesh
from minialpa.cost import is_gpu
from minialpa.errors import InfeasibleError
from minialpa.inter.search.stage_cost import problem_key
from minialpa.inter.search.stage_in_memory import (
    FreeSolution,
    SolvedStage,
    SolveLimits,
    Stage,
    needed,
    seconds_of,
    solve_in_memory,
    uncounted,
)
from minialpa.inter.search.stage_memory import MeshMemory, Moments
from minialpa.inter.search.stage_times import gradient_starts, starts_s
from minialpa.inter.staging.mesh_problem import ShardedView, mesh_collectives, mesh_programs
from minialpa.inter.staging.tasks import StagedStep
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.graph.solve import MeshSolver
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.strategies.combining import StartCounts
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.options import AutoShardingOption
from minialpa.support.recent import Recent
from minialpa.support.sizes import bytes_text

#: Bytes of cached solvers.
_MOST_SOLVER_BYTES = 2**29
#: Most solves of a stage with other prices of starts; fewer in short memory, where a solve takes longer.
_MAX_REPRICED, _MAX_REPRICED_IN_SHORT_MEMORY = 3, 1
#: Prices of collectives that work can hide, as fractions of their seconds: if work hides all, at least this (not 0, to
#: prefer solutions with less to hide), and if it hides a part.
_HIDDEN_PRICE, _PARTLY_HIDDEN_PRICES = 0.02, (0.3, 0.1, 0.02)
#: A solve has to gain more than this fraction of a step.
_LITTLE = 1e-3
#: Collectives are hidden if they add at most this fraction of a step to their price.
_LITTLE_EXPOSED = 0.01


class NotFasterError(InfeasibleError):
    """The caller's plan is as fast as any shardings of this stage that fit and treat repeated layers alike.

    by_compute: whether the compute alone takes too long, under any options.
    """

    def __init__(self, seconds: float, below_s: float, *, by_compute: bool = False) -> None:
        super().__init__(f"A step takes at least {seconds:.3g} s, and another plan takes {below_s:.3g} s.")
        self.seconds, self.by_compute = seconds, by_compute


class StageMemoryError(InfeasibleError):
    """No shardings fit in memory.

    free: the cheapest shardings in unlimited memory. n_bytes: of the smallest shardings found, with the reserve.
    """

    def __init__(self, message: str, free: FreeSolution, n_bytes: float) -> None:
        super().__init__(message)
        self.free, self.n_bytes = free, min(n_bytes, free.n_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _SolvedStage:
    """A cached solution, without equations. Seconds are of one step.

    bound_s: lower bound for any shardings, even in unlimited memory.
    """

    variables: tuple[Var, ...]
    sharding: MeshSharding
    memory: MeshMemory
    seconds: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class SlowestStage:
    """The slowest stage so far, in seconds of one step.

    spare_s: seconds that another stage may lose to its fastest shardings.
    """

    seconds: float
    spare_s: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Request:
    """The arguments of `StageSolver.solve`.

    kind: equal for stages with equal equations, meshes and options, under any memory limit.
    """

    kind: Hashable
    staged: StagedStep
    mesh: int
    problem: MeshEquations
    view: ShardedView
    option: AutoShardingOption
    moments: Moments
    below_s: float

    @property
    def n_bytes(self) -> float:
        return self.option.limit_bytes(self.view.mesh.device) or math.inf


class StageSolver:
    """Solves stages and caches solutions.

    Stages are alike if their equations are equal up to the names of variables, and their tasks as long. A cached
    solution in unlimited memory serves for any number of micro-batches in flight with which it fits.
    """

    def __init__(self, compiler: Compiler) -> None:
        self.compiler, self.strategy_cache = compiler, StrategyCache()
        self._stages: Recent[Stage] = Recent(_MOST_SOLVER_BYTES, lambda stage: stage.solver.n_bytes)
        self._solutions: dict[object, _SolvedStage] = {}
        self._in_memory: dict[object, list[_SolvedStage]] = {}  # under a limit, by kind of stage
        self._uncounted_bytes: dict[object, float] = {}  # by kind of stage, see `SolveLimits`
        self._bounds: dict[object, float] = {}  # see `_bound_s`, by kind of stages that were too slow
        self._work = Deadline(math.inf)  # of all solves since `begin`
        # The last solution, also in the variables of the step in which it was solved.
        self._last: tuple[_SolvedStage, SolvedStage, StagedStep] | None = None

    def begin(self) -> None:
        """Reset the counted work and drop unproven solutions, as in a new planner."""
        self._work = Deadline(math.inf)
        self._solutions = {key: one for key, one in self._solutions.items() if one.sharding.gap <= _LITTLE}

    def solve(
        self, staged: StagedStep, mesh: int, problem: MeshEquations, view: ShardedView, option: AutoShardingOption,
        moments: Moments, *, below_s: float = math.inf, saves_memory: bool = True,
        slowest: SlowestStage | None = None,
    ) -> SolvedStage:  # fmt: skip
        """The cheapest shardings of mesh number `mesh` of a staged step that fit in memory.

        Raises StageMemoryError if no shardings fit, NotFasterError if all that fit take `below_s` or more, and
        InfeasibleError if the options forbid all shardings.

        moments: live micro-batches at the fullest moments, see `live_counts`.
        below_s: seconds of a step from which the stage is useless to the caller.
        saves_memory: whether to look for more expensive shardings if the cheapest do not fit.
        slowest: cached shardings that are no slower than this stage suffice.
        """
        names = str(problem.paths) if option.fixed_specs else ""
        text = hashlib.sha256(f"{problem_key(problem)}\n{names}".encode()).hexdigest()
        tasks = tuple((task.kind, len(task.eqns)) for task in staged.tasks_of(mesh))
        kind = (text, tasks, staged.splits_backward, view, replace(option, memory_limit_bytes=None))
        request = _Request(
            kind=kind, staged=staged, mesh=mesh, problem=problem, view=view, option=option, moments=moments,
            below_s=below_s,
        )  # fmt: skip
        self._check_bounds(request)

        found = self._solution(request, kind, replace(option, memory_limit_bytes=math.inf), None)
        free = FreeSolution(
            seconds=found.seconds,
            n_bytes=needed(found.memory, moments),
            limit_bytes=request.n_bytes,
            bound_s=found.bound_s,
        )
        least_s = free.seconds if free.fits else free.bound_s
        if least_s >= below_s:
            raise NotFasterError(least_s, below_s)
        if not free.fits:
            if not saves_memory:
                raise StageMemoryError(
                    f"The fastest shardings need {bytes_text(free.n_bytes)} per device, and the limit is "
                    f"{bytes_text(free.limit_bytes)}.",
                    free,
                    free.n_bytes,
                )
            found = self._solution_in_memory(request, free, found.sharding.bound_s, slowest)
        return replace(self._in_variables_of(found, staged, mesh, problem, view), free=free)

    def _check_bounds(self, request: _Request) -> None:
        """Raise NotFasterError if a cached bound or the compute alone is too slow."""
        if math.isinf(request.below_s) or request.kind in self._solutions:
            return
        bound_s = self._bounds.get(request.kind)
        if bound_s is not None and bound_s >= request.below_s:
            raise NotFasterError(bound_s, request.below_s)
        least_s = self._stage_of(request).solver.builder.least_compute_s
        if least_s >= request.below_s:
            raise NotFasterError(least_s, request.below_s, by_compute=True)

    def _solution(
        self, request: _Request, key: object, option: AutoShardingOption, free: tuple[float, float] | None
    ) -> _SolvedStage:
        """Cached or new. free: see `SolveLimits`; `None` in unlimited memory."""
        if key in self._solutions:
            return self._solutions[key]
        stage = self._stage_of(request)
        limits = SolveLimits(
            option=option,
            moments=request.moments,
            n_bytes=request.n_bytes,
            uncounted_bytes=self._uncounted_bytes.get(request.kind, 0.0),
            free=free,
            below_s=request.below_s if free is None else math.inf,
            work=self._work,
        )
        try:
            solved, bound_s = _cheapest_solution(stage, limits)
        except NotFasterError as error:
            self._bounds[request.kind] = error.seconds
            raise

        if solved.sharding.counted_bytes:
            self._uncounted_bytes[request.kind] = uncounted(solved, request.moments)
        cached = _SolvedStage(
            variables=_variables(stage.problem),
            sharding=solved.sharding,
            memory=solved.memory,
            seconds=seconds_of(stage, solved),
            bound_s=bound_s,
        )
        self._solutions[key] = cached
        self._last = (cached, solved, stage.staged)
        return cached

    def _solution_in_memory(
        self, request: _Request, free: FreeSolution, bound_s: float, slowest: SlowestStage | None
    ) -> _SolvedStage:
        """Cached or new. bound_s: the solver's bound in unlimited memory. Raises StageMemoryError."""
        if slowest is not None:
            cached = self._cached_in_memory(request.kind, free, request.moments, slowest)
            if cached is not None:
                return cached
        key = (request.kind, request.n_bytes, tuple(map(tuple, request.moments)))
        try:
            found = self._solution(request, key, request.option, (bound_s, free.n_bytes))
        except InfeasibleError as error:
            raise StageMemoryError(str(error), free, getattr(error, "n_bytes", math.inf)) from error
        self._in_memory.setdefault(request.kind, []).append(found)
        return found

    def _cached_in_memory(
        self, kind: object, free: FreeSolution, moments: Moments, slowest: SlowestStage
    ) -> _SolvedStage | None:
        most_s = min(slowest.seconds, free.seconds + slowest.spare_s)
        known = [
            one
            for one in self._in_memory.get(kind, ())
            if one.seconds <= most_s and needed(one.memory, moments) <= free.limit_bytes
        ]
        return min(known, key=lambda one: one.seconds, default=None)

    def _stage_of(self, request: _Request) -> Stage:
        def make() -> Stage:
            view = request.view
            # On GPUs, work can hide collectives.
            price = _least_price(view.mesh) if is_gpu(view.mesh.device) else 1.0
            return Stage(
                staged=request.staged,
                mesh=request.mesh,
                problem=request.problem,
                view=view,
                compiler=self.compiler,
                solver=MeshSolver(request.problem, view.mesh, request.option, self.strategy_cache, hidden_price=price),
            )

        return self._stages.get_or_make(request.kind, make)

    def _in_variables_of(
        self, solution: _SolvedStage, staged: StagedStep, mesh: int, problem: MeshEquations, view: ShardedView
    ) -> SolvedStage:
        """A cached solution in the variables of `problem`, with the collectives of its programs."""
        if self._last is not None and self._last[0] is solution and self._last[2] is staged:
            variables = _variables(problem)
            if variables == solution.variables:
                return self._last[1]

        names = dict(zip(solution.variables, _variables(problem), strict=True))
        sharding = replace(
            solution.sharding,
            # The specs of variables inside loops are in `sharding.equations`.
            specs={names[v]: spec for v, spec in solution.sharding.specs.items() if v in names},
            results={names[v]: spec for v, spec in solution.sharding.results.items()},
        )
        programs = mesh_programs(staged, mesh, problem, sharding, view)
        return SolvedStage(sharding=sharding, moved=tuple(mesh_collectives(programs)), measured=lambda: solution.memory)


def _variables(problem: MeshEquations) -> tuple[Var, ...]:
    """In the same order for all problems that are alike."""
    made = (v for eqn in problem.eqns for v in eqn.outvars)
    return (*(v for v, _ in problem.inputs), *made, *problem.equal.values())


def _bound_s(stage: Stage, priced_s: float) -> float:
    """Lower bound on the seconds t of one step with any shardings. priced_s: of their cost at the prices of the solver.

    Let a be the seconds of work and exposed collectives, and h of collectives that work can hide, whose price is p =
    `hidden_price`, at least the `contention` c. Work hides at most the fraction `overlap` of its seconds:
    t >= a + c * h and (1 + overlap) * t >= a + h. With q = (p - c) / (1 - c), the cost a + p * h =
    (1 - q) * (a + c * h) + q * (a + h) is at most (1 + q * overlap) * t.
    """
    mesh, price = stage.view.mesh, stage.solver.hidden_price
    if price < 1:
        overlap, c = (1.0, 0.0) if mesh.device is None else (mesh.device.overlap, mesh.device.contention)
        priced_s /= 1 + (price - c) / (1 - c) * overlap
    return max(priced_s, stage.solver.builder.least_compute_s)


def _least_price(mesh: LogicalMesh) -> float:
    """Of collectives that work can hide, as a part of their seconds."""
    return max(_HIDDEN_PRICE, 0.0 if mesh.device is None else mesh.device.contention)


def _cheapest_solution(stage: Stage, limits: SolveLimits) -> tuple[SolvedStage, float]:
    """The fastest shardings found, and `_bound_s`, 0 if unknown. Raises NotFasterError if that is `below_s` or more.

    At the first prices, collectives that work can hide are nearly free. If that solution does not hide them, or does
    not exist, the stage is solved at full and partial prices.
    """

    def at_full_prices() -> Stage:
        return replace(stage, solver=_solver(stage, limits, None, 1.0))

    try:
        best = solve_in_memory(stage, limits)
    except InfeasibleError:
        if stage.solver.hidden_price == 1:
            raise
        return solve_in_memory(at_full_prices(), limits), 0.0

    least_s = _bound_s(stage, best.sharding.bound_s)
    if least_s >= limits.below_s:
        raise NotFasterError(least_s, limits.below_s)
    is_hidden = seconds_of(stage, best) <= (1 + _LITTLE_EXPOSED) * best.sharding.bound_s
    if is_hidden or stage.solver.hidden_price == 1:
        fits = math.isinf(limits.n_bytes) or needed(best.memory, limits.moments) <= limits.n_bytes
        return _or_repriced(stage, limits, best, least_s) if fits else best, least_s

    found = [best]
    retry = replace(limits, uncounted_bytes=uncounted(best, limits.moments), in_other_ways=False)
    with contextlib.suppress(InfeasibleError):  # in time
        full = at_full_prices()
        found.append(_or_repriced(full, limits, solve_in_memory(full, retry), least_s))
        counts = _start_counts(stage, found[-1])
        least = _least_price(stage.view.mesh)
        for price in dict.fromkeys(max(price, least) for price in _PARTLY_HIDDEN_PRICES):
            priced = replace(stage, solver=_solver(stage, limits, counts, price))
            found.append(solve_in_memory(priced, retry))
    return min(found, key=lambda solved: seconds_of(stage, solved)), least_s


def _or_repriced(stage: Stage, limits: SolveLimits, best: SolvedStage, least_s: float) -> SolvedStage:
    """`best`, or a faster solution at other prices of starts.

    Sums that start as one share the price of a start. The first prices assume as many sums as possible, which makes a
    bound, the next prices as many as in the last solution.
    """
    seconds, counts = seconds_of(stage, best), _start_counts(stage, best)
    seen = set[StartCounts]()
    most = _MAX_REPRICED_IN_SHORT_MEMORY if best.sharding.counted_bytes else _MAX_REPRICED
    while counts not in seen and len(seen) < most:
        # The gain is at most the underestimate.
        gain_s = min(seconds - least_s, starts_s(counts, stage.view.mesh))
        if gain_s <= _LITTLE * seconds:
            break
        seen.add(counts)
        solver = _solver(stage, limits, counts, stage.solver.hidden_price)
        retry = replace(limits, uncounted_bytes=uncounted(best, limits.moments), in_other_ways=False)
        try:
            other = solve_in_memory(replace(stage, solver=solver), retry)
        except InfeasibleError:  # in time
            break
        counts = _start_counts(stage, other)
        if (other_s := seconds_of(stage, other)) < seconds:
            best, seconds = other, other_s
    return best


def _solver(stage: Stage, limits: SolveLimits, counts: StartCounts | None, hidden_price: float) -> MeshSolver:
    """counts: sums that share each start. hidden_price: of collectives that work can hide."""
    mesh, cache = stage.view.mesh, stage.solver.cache
    return MeshSolver(stage.problem, mesh, limits.option, cache, counts, hidden_price=hidden_price)


def _start_counts(stage: Stage, solved: SolvedStage) -> StartCounts:
    return gradient_starts(solved.moved, stage.view.combined)
