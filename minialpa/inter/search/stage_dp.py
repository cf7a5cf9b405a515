"""Stage DP: the fastest pipeline, by a table of what each stage would cost on each submesh.

    minimise T = sum_k t_k + sum_borders transfer + (B - 1) * max_k t_k + max_k step_k

over all ways to cut the layers into stages and to give each stage a candidate (a submesh and how it is used). t_k is
the time of one micro-batch on stage k, step_k what stage k does once per step, B the number of micro-batches. Stages
take the devices of the cluster in order, so it is known which links a border crosses.

For bounds tau on max t and sigma on max step, one dynamic program gives G(tau, sigma), the least sum under the bounds:
    f[s, i, p] = min over j, m of  t[i, j, m] + f[s - 1, j + 1, p + n_devices[m]] + transfer[i - 1, p]
is the least sum for layers i.. in s stages on the devices from p on. `_search` looks for the tau and sigma of the least
total. Counting the stages from the end makes the memory check exact: the
number of live micro-batches of a stage depends on s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minialpa.errors import InfeasibleError, ShardingError
from minialpa.inter.schedule.schedules import PipelineSize, max_live
from minialpa.inter.search.stage_kernels import IDLE, Bools, Floats, Ints, fill_tables, least_stages, most_live


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StageCostTable:
    """What layers i to j, both included, cost on candidate m. Entries with i > j are not looked at.

    Attributes:
        n_devices: [m], devices that the candidate takes.
        may_start: [m, p], whether it may start at device p of the cluster.
        skip_to: [p], where a pipeline may go on that leaves device p idle. From the first device of a host it is the
            next host, so that the start of a stage tells whether it is on the host of the stage before.
        seconds: [i, j, m], forward and backward of one micro-batch; inf where the candidate is not allowed.
        step_seconds: [i, j, m], gradient sync and update, once per step.
        fixed_bytes: [i, j, m], bytes per device whatever happens.
        in_flight_bytes: [i, j, m], bytes per device for each live micro-batch.
        transfer_seconds: [j, p], one micro-batch's activations and gradients over the border after layer
            j < n_layers - 1, where the next stage starts at device p.
    """

    n_devices: NDArray[np.int64]
    may_start: Bools
    skip_to: Ints
    seconds: Floats
    step_seconds: Floats
    fixed_bytes: Floats
    in_flight_bytes: Floats
    transfer_seconds: Floats

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_devices", np.array(self.n_devices, np.int64))
        object.__setattr__(self, "may_start", np.array(self.may_start, np.bool_))
        object.__setattr__(self, "skip_to", np.array(self.skip_to, np.int64))
        n_candidates = len(self.n_devices)
        if not n_candidates or self.n_devices.min() < 1:
            raise ShardingError(f"Every candidate needs a device and there must be one; got {self.n_devices}.")

        n_layers = len(self.seconds)
        if self.may_start.ndim != 2 or len(self.may_start) != n_candidates or not self.may_start.shape[1]:
            raise ShardingError(
                f"`may_start` needs a row for each of {n_candidates} candidates and a column for each device; got "
                f"{self.may_start.shape}."
            )
        n_places = self.may_start.shape[1]
        if self.skip_to.shape != (n_places,) or (self.skip_to <= np.arange(n_places)).any():
            raise ShardingError(f"`skip_to` needs a later place for each of {n_places} devices; got {self.skip_to}.")

        cube = (n_layers, n_layers, n_candidates)
        shapes = dict.fromkeys(("seconds", "step_seconds", "fixed_bytes", "in_flight_bytes"), cube)
        for name, shape in {**shapes, "transfer_seconds": (n_layers - 1, n_places)}.items():
            # A copy, which nobody can change.
            array = np.array(getattr(self, name), np.float64)
            if not n_layers or array.shape != shape:
                raise ShardingError(f"`{name}` needs shape {shape} with at least one layer; got {array.shape}.")
            seen = array[np.triu_indices(n_layers)] if array.ndim == 3 else array
            if np.isnan(seen).any() or (seen < 0).any():
                raise ShardingError(f"`{name}` holds NaN or negative values; forbid a stage with `np.inf`.")
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @property
    def n_layers(self) -> int:
        return len(self.seconds)

    @property
    def cluster_devices(self) -> int:
        return int(self.may_start.shape[1])


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Layers `first_layer` to `last_layer`, both included, on candidate `candidate` of the table, from a device on."""

    first_layer: int
    last_layer: int
    candidate: int
    first_device: int


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """Stages from first to last, and the time of one step by the formula above."""

    stages: tuple[StageChoice, ...]
    seconds: float


def step_seconds_of(table: StageCostTable, stages: tuple[StageChoice, ...], n_micro_batches: int) -> float:
    """The formula above, for given stages."""
    return _solution(table, stages).total(n_micro_batches)


def choose_stages(
    table: StageCostTable,
    *,
    n_micro_batches: int,
    memory_bytes: float | Floats,
    schedule: str = "1f1b",
    n_stages: int | None = None,
    use_all_devices: bool = True,
    tolerance: float = 0.0,
) -> StageAssignment:
    """The minimum of T, at most `tolerance` (a fraction of T) above it.

    With all devices in use unless `use_all_devices=False`, and `n_stages` stages if given.

    Each stage needs fixed + live * in_flight <= memory_bytes (of its candidate), with the live micro-batches that
    `schedule` allows at its distance from the end. Raises InfeasibleError, with the least memory that would do where
    memory is what fails.
    """
    if min(n_micro_batches, 1 if n_stages is None else n_stages) < 1:
        raise ShardingError(f"Counts start at 1; got {n_micro_batches=}, {n_stages=}.")
    memory = np.broadcast_to(np.asarray(memory_bytes, np.float64), table.n_devices.shape)
    stages = range(1, table.n_layers + 1) if n_stages is None else range(n_stages, n_stages + 1)
    problem = _problem(table, stages, schedule, n_micro_batches, memory, idle=not use_all_devices)
    best = _search(problem, n_micro_batches, tolerance)
    if best is None:
        raise InfeasibleError(_infeasible_message(problem, schedule, n_micro_batches))
    return StageAssignment(best.stages, best.total(n_micro_batches))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Problem:
    """The arrays of the DP.

    Attributes:
        table: costs of stages.
        stages: how many stages there may be.
        idle: whether devices may stay idle.
        live: different counts of live micro-batches, which rise.
        live_of: [s], which of them a stage has that is the s-th from the end.
        memory: [m], bytes per device.
        most: [i, j, m], see `most_live`.
        groups: [m], the group g of each candidate: those that take as many devices and may start at the same places.
        counts: [g], devices of each group.
        starts: [g, p], whether it may start at device p.
    """

    table: StageCostTable
    stages: range
    idle: bool
    live: Floats
    live_of: Ints
    memory: Floats
    most: Ints
    groups: Ints
    counts: Ints
    starts: Bools


@dataclass(frozen=True, slots=True)
class _Solution:
    """`sum_s` is the sum of stage times and transfers."""

    stages: tuple[StageChoice, ...]
    sum_s: float
    max_t: float
    max_step: float

    def total(self, n_micro_batches: int) -> float:
        return self.sum_s + (n_micro_batches - 1) * self.max_t + self.max_step


def _problem(
    table: StageCostTable, stages: range, schedule: str, n_micro_batches: int, memory: Floats, *, idle: bool
) -> _Problem:
    least_devices = int(table.n_devices[_usable(table, memory)].min(initial=table.cluster_devices))
    most_stages = min(table.n_layers, stages[-1], table.cluster_devices // least_devices)
    counts = [max_live(schedule, 0, PipelineSize(max(1, s), n_micro_batches)) for s in range(most_stages + 1)]
    live, live_of = np.unique(np.array(counts, np.float64), return_inverse=True)
    memory = np.array(memory, np.float64)
    most = most_live(table.fixed_bytes, table.in_flight_bytes, memory, live)

    # Candidates that only differ in what they cost are looked at together.
    rows = np.concatenate([table.n_devices[:, None], table.may_start], axis=1)
    kinds, groups = np.unique(rows, axis=0, return_inverse=True)
    return _Problem(
        table=table,
        stages=stages,
        idle=idle,
        live=live,
        live_of=live_of.ravel(),
        memory=memory,
        most=most,
        groups=groups.ravel(),
        counts=kinds[:, 0].copy(),
        starts=kinds[:, 1:].astype(np.bool_),
    )


def _usable(table: StageCostTable, memory: Floats) -> Bools:
    """Candidates on which some stage fits with one live micro-batch."""
    fits = np.isfinite(table.seconds) & (table.fixed_bytes + table.in_flight_bytes <= memory)
    return np.asarray(fits[np.triu_indices(table.n_layers)].any(axis=0), np.bool_)


def _solution(table: StageCostTable, stages: tuple[StageChoice, ...]) -> _Solution:
    t = [float(table.seconds[c.first_layer, c.last_layer, c.candidate]) for c in stages]
    step = [float(table.step_seconds[c.first_layer, c.last_layer, c.candidate]) for c in stages]
    transfer = [float(table.transfer_seconds[c.first_layer - 1, c.first_device]) for c in stages[1:]]
    return _Solution(stages, sum(t) + sum(transfer), max(t), max(step))


def _search(problem: _Problem, n_micro_batches: int, tolerance: float) -> _Solution | None:
    """A pipeline with a total at most `tolerance` of itself above the least, or None where none is allowed.

    Branch and bound over boxes of (max t, max step). The solution of least sum in a box matches, in sum, max t and max
    step, all pipelines in it whose max t and max step are no smaller. What is left are two boxes, one with a smaller
    max t and one with a smaller max step; of both, the part is cut off in which the sum, which only rises, leaves no
    room for a total that is better by the tolerance.
    """
    waits = n_micro_batches - 1
    cheapest = _solve(problem, np.inf, np.inf)
    if cheapest is None:
        return None
    table = problem.table
    seconds = np.where(np.isfinite(table.step_seconds), table.seconds, np.inf)
    step_seconds = np.where(np.isfinite(table.seconds), table.step_seconds, np.inf)
    least_t, least_step = _least_maximum(problem, seconds), _least_maximum(problem, step_seconds)
    best = cheapest
    boxes = [(np.inf, np.inf, least_t), (np.inf, least_step, least_t), (least_t, np.inf, least_t)]
    while boxes:
        tau, sigma, least = boxes.pop()
        found = cheapest if tau == sigma == np.inf else _solve(problem, tau, sigma)
        if found is None:
            continue

        # Two boxes are left, each without the part whose sums leave no room for a better total.
        best = min(best, found, key=lambda solution: solution.total(n_micro_batches))
        room_s = best.total(n_micro_batches) * (1 - tolerance) - found.sum_s
        slower = max(least, found.max_t) if waits else least
        smaller_step = min(np.nextafter(found.max_step, -np.inf), room_s - waits * slower)
        if smaller_step >= least_step:
            boxes.append((tau, smaller_step, slower))
        smaller_t = min(np.nextafter(found.max_t, -np.inf), (room_s - least_step) / waits) if waits else -np.inf
        if smaller_t >= least:
            boxes.append((smaller_t, sigma, least))
    return best


def _solve(problem: _Problem, tau: float, sigma: float) -> _Solution | None:
    """A pipeline of least sum with t <= tau and step <= sigma on every stage."""
    table = problem.table
    # The kernel takes no pipeline of infinite cost for one.
    tau, sigma = (min(bound, np.finfo(np.float64).max) for bound in (tau, sigma))
    best = _least_stages(problem, table.seconds, table.step_seconds, tau, sigma)
    f, how, unit = _tables(problem, best, maximum=False)
    sum_s, s = _best_end(problem, f)
    if not np.isfinite(sum_s):
        return None

    # From the first layer on, as the table was reached.
    stages, i, p = list[StageChoice](), 0, 0
    while s > 0:
        reached = int(how[s, i, p // unit])
        if reached == IDLE:
            p = int(table.skip_to[p])
            continue
        j, g = divmod(reached, len(problem.counts))
        stages.append(StageChoice(i, j, _fastest(problem, i, j, g, int(problem.live_of[s]), sigma), p))
        s, i, p = s - 1, j + 1, p + int(problem.counts[g])
    return _solution(table, tuple(stages))


def _least_maximum(problem: _Problem, values: Floats) -> float:
    """The least that the largest of `values` can be over the stages of a pipeline; inf where there is no pipeline."""
    best = _least_stages(problem, values, np.zeros_like(values), np.finfo(np.float64).max, np.inf)
    return _best_end(problem, _tables(problem, best, maximum=True)[0])[0]


def _least_stages(problem: _Problem, values: Floats, step: Floats, tau: float, sigma: float) -> Floats:
    return least_stages(
        values, step, problem.most, len(problem.live), problem.groups, len(problem.counts), tau, sigma
    )  # fmt: skip


def _fastest(problem: _Problem, i: int, j: int, group: int, live: int, sigma: float) -> int:
    """The candidate of `least_stages` for a stage."""
    table = problem.table
    allowed = (problem.groups == group) & (problem.most[i, j] >= live) & (table.step_seconds[i, j] <= sigma)
    return int(np.argmin(np.where(allowed, table.seconds[i, j], np.inf)))


def _tables(problem: _Problem, best: Floats, *, maximum: bool) -> tuple[Floats, Ints, int]:
    """`fill_tables`, and how many devices one of its places stands for: stages may all begin at multiples of some."""
    table, counts = problem.table, problem.counts
    used = np.isfinite(best[0]).any(axis=(0, 2))  # fits with the least in flight
    unit = math.gcd(table.cluster_devices, *counts[used].tolist())
    if problem.idle:
        unit = math.gcd(unit, int(table.skip_to[0]))
        unit = 1 if (table.skip_to[::unit] % unit).any() else unit
    units = np.where(used, counts // unit, table.cluster_devices + 1)
    filled = fill_tables(
        best, problem.live_of, units, np.ascontiguousarray(problem.starts[:, ::unit]), table.skip_to[::unit] // unit,
        np.ascontiguousarray(table.transfer_seconds[:, ::unit]), problem.idle, maximum,
    )  # fmt: skip
    return *filled, unit


def _best_end(problem: _Problem, f: Floats) -> tuple[float, int]:
    """Least value of a whole pipeline and its number of stages; of equals, the fewest."""
    ends = [(float(f[s, 0, 0]), s) for s in problem.stages if s < len(f)]
    return min(ends, default=(np.inf, 0))


def _least_memory(problem: _Problem) -> float:
    """The least bytes per device that the largest stage of some pipeline needs."""
    table = problem.table
    allowed = np.isfinite(table.seconds) & np.isfinite(table.step_seconds)
    best = np.full((len(problem.live), table.n_layers, len(problem.counts), table.n_layers), np.inf)
    for k, live in enumerate(problem.live):
        need = np.where(allowed, table.fixed_bytes + live * table.in_flight_bytes, np.inf)
        for m, g in enumerate(problem.groups):
            np.minimum(best[k, :, g, :], need[:, :, m], out=best[k, :, g, :])
    return _best_end(problem, _tables(problem, best, maximum=True)[0])[0]


def _infeasible_message(problem: _Problem, schedule: str, n_micro_batches: int) -> str:
    """Why no pipeline is possible: too little memory, or no stages that the table allows."""
    table, stages = problem.table, problem.stages

    # Bytes that are inf even so mean that memory is not the reason.
    boundless = np.full_like(problem.memory, np.inf)
    need = _least_memory(_problem(table, stages, schedule, n_micro_batches, boundless, idle=problem.idle))
    if np.isfinite(need):
        return (
            f"No pipeline fits: under `{schedule}` with {n_micro_batches} micro-batches the smallest one needs "
            f"{need:.6g} bytes per device and the devices have {problem.memory.max():.6g}. Raise `n_micro_batches` so "
            "that each is smaller, allow more devices, or use devices with more memory."
        )

    least = 1 if problem.idle else table.cluster_devices
    return (
        f"No pipeline of {table.n_layers} layers in {stages[0]} to {stages[-1]} stages uses {least} to "
        f"{table.cluster_devices} devices: candidates take {', '.join(map(str, sorted(set(problem.counts.tolist()))))} "
        "devices, and entries of `seconds` or `step_seconds` that are inf are not allowed. Offer more candidates, or "
        "set `use_all_devices=False`."
    )
