"""Stage DP: a table with the cost of each stage on each submesh in, the fastest pipeline out.

    minimise T = sum_k t_k + sum_borders transfer + (B - 1) * max_k t_k + max_k step_k

over all ways to cut the layers into stages and to give each stage k a candidate m (a column of the table). t_k is the
time of one micro-batch on stage k, step_k its time once per step, B the number of micro-batches. Stages take the
devices of the cluster in order, so the link of each border is known.

With upper bounds tau on max t and sigma on max step, one dynamic program gives the least sum of t and transfers:

    f[s, i, p] = min over j, m of  t[i, j, m] + f[s - 1, j + 1, p + n_devices[m]] + transfer[i - 1, p]

for the layers from i on, in s stages, on the devices from p on. `_search` finds the tau and sigma of the least T.
Stages count from the end, so s gives the number of live micro-batches, and the memory check is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from minialpa.errors import InfeasibleError
from minialpa.inter.schedule.schedules import PipelineSize, max_live
from minialpa.inter.search.stage_kernels import IDLE, Bools, Floats, Ints, fill_tables, least_stages, most_live
from minialpa.support.sizes import bytes_text


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StageCostTable:
    """Costs of a stage with layers i to j, both included, on candidate m. Entries with i > j have no meaning.

    Attributes:
        n_devices: [m].
        may_start: [m, p], whether a stage may start at device p of the cluster.
        skip_to: [p], the next device if device p stays idle. From the first device of a host this is the next host, so
            the start of a stage shows whether the previous stage is on the same host.
        seconds: [i, j, m], of one micro-batch; inf if the stage is not allowed.
        step_seconds: [i, j, m], gradient sync and update, once per step.
        fixed_bytes: [i, j, m], per device.
        in_flight_bytes: [i, j, m], per device for each live micro-batch.
        transfer_seconds: [j, p], of one micro-batch in both directions over the border after layer j, to a stage that
            starts at device p.
    """

    n_devices: Ints
    may_start: Bools
    skip_to: Ints
    seconds: Floats
    step_seconds: Floats
    fixed_bytes: Floats
    in_flight_bytes: Floats
    transfer_seconds: Floats

    @property
    def n_layers(self) -> int:
        return len(self.seconds)

    @property
    def cluster_devices(self) -> int:
        return int(self.may_start.shape[1])


class PipelineTooLargeError(InfeasibleError):
    """No pipeline fits in memory. lacks: (bytes per device of the smallest pipeline) / (memory of a device)."""

    def __init__(self, message: str, lacks: float) -> None:
        super().__init__(message)
        self.lacks = lacks


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Both layers are included."""

    first_layer: int
    last_layer: int
    candidate: int
    first_device: int


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """seconds: T. least_t: see `Start`."""

    stages: tuple[StageChoice, ...]
    seconds: float
    least_t: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """A known allowed pipeline. least_t: lower bound on max t of any pipeline."""

    stages: tuple[StageChoice, ...]
    least_t: float = 0.0


def step_seconds_of(table: StageCostTable, stages: tuple[StageChoice, ...], n_micro_batches: int) -> float:
    return _pipeline_of(table, stages).total(n_micro_batches)


def choose_stages(
    table: StageCostTable,
    *,
    n_micro_batches: int,
    memory_bytes: float | Floats,
    schedule: str = "1f1b",
    use_all_devices: bool = True,
    tolerance: float = 0.0,
    start: Start | None = None,
) -> StageAssignment:
    """A pipeline whose T is at most a fraction `tolerance` above the minimum.

    Each stage needs fixed + live * in_flight <= memory_bytes, where live is its most live micro-batches under
    `schedule`. Raises PipelineTooLargeError with the least sufficient memory if memory is the reason, otherwise
    InfeasibleError.

    memory_bytes: per device, for all candidates or for each.
    use_all_devices: if False, devices may stay idle.
    start: saves time.
    """
    memory = np.broadcast_to(np.asarray(memory_bytes, np.float64), table.n_devices.shape)
    problem = _dp_problem(table, schedule, n_micro_batches, memory, idle=not use_all_devices)
    best, least_t = _search(problem, tolerance, start)
    if best is None:
        raise _infeasible_error(problem, schedule, n_micro_batches)
    return StageAssignment(best.stages, best.total(n_micro_batches), least_t)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Problem:
    """The arrays of the DP.

    Attributes:
        live: the distinct numbers of live micro-batches, ascending.
        live_of: [s], the index in `live` of the s-th stage from the end.
        used: candidates on which some stage fits with one live micro-batch.
        most: [m, i, j], see `most_live`.
        costs: [m, i, j] each: seconds and step_seconds of the table.
        groups: [m], the group g of the candidate; a group has equal `n_devices` and `may_start`.
        counts, starts: [g] and [g, p], `n_devices` and `may_start` of the group.
    """

    table: StageCostTable
    idle: bool
    n_micro_batches: int
    live: Floats
    live_of: Ints
    memory: Floats
    used: Ints
    most: Ints
    costs: tuple[Floats, Floats]
    groups: Ints
    counts: Ints
    starts: Bools


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """sum_s: of t and transfers."""

    stages: tuple[StageChoice, ...]
    sum_s: float
    max_t: float
    max_step: float

    def total(self, n_micro_batches: int) -> float:
        return self.sum_s + (n_micro_batches - 1) * self.max_t + self.max_step


@dataclass(frozen=True, slots=True)
class _Box:
    """The pipelines with least_t <= max t <= tau and max step <= sigma."""

    tau: float
    sigma: float
    least_t: float


def _dp_problem(table: StageCostTable, schedule: str, n_micro_batches: int, memory: Floats, *, idle: bool) -> _Problem:
    memory = np.array(memory, np.float64)
    by_column = [_columns_first(x) for x in (table.seconds, table.step_seconds)]
    fixed, in_flight = (_columns_first(x) for x in (table.fixed_bytes, table.in_flight_bytes))

    # The last stage has one live micro-batch.
    one = most_live(fixed, in_flight, memory, np.ones(1))
    used = np.flatnonzero((one == 0).any(axis=(1, 2)) & _is_allowed_somewhere(*by_column))
    least_devices = int(table.n_devices[used].min(initial=table.cluster_devices))
    most_stages = min(table.n_layers, table.cluster_devices // least_devices)
    counts = [max_live(schedule, 0, PipelineSize(max(1, s), n_micro_batches)) for s in range(most_stages + 1)]
    live, live_of = np.unique(np.array(counts, np.float64), return_inverse=True)

    rows = np.concatenate([table.n_devices[:, None], table.may_start], axis=1)
    kinds, groups = np.unique(rows, axis=0, return_inverse=True)
    return _Problem(
        table=table,
        idle=idle,
        n_micro_batches=n_micro_batches,
        live=live,
        live_of=live_of.ravel(),
        memory=memory,
        used=used,
        most=most_live(fixed, in_flight, memory, live),
        costs=(by_column[0], by_column[1]),
        groups=groups.ravel(),
        counts=kinds[:, 0].copy(),
        starts=kinds[:, 1:].astype(np.bool_),
    )


def _columns_first(cube: Floats) -> Floats:
    return np.ascontiguousarray(np.moveaxis(cube, -1, 0))


def _is_allowed_somewhere(seconds: Floats, step_seconds: Floats) -> Bools:
    """[m]: whether some layers have finite costs."""
    n_layers = seconds.shape[1]
    above = np.triu(np.ones((n_layers, n_layers), np.bool_))
    return np.asarray((np.isfinite(seconds + step_seconds) & above).any(axis=(1, 2)), np.bool_)


def _pipeline_of(table: StageCostTable, stages: tuple[StageChoice, ...]) -> _Pipeline:
    places = [(c.first_layer, c.last_layer, c.candidate) for c in stages]
    t = [float(table.seconds[at]) for at in places]
    step = [float(table.step_seconds[at]) for at in places]
    transfer = [float(table.transfer_seconds[c.first_layer - 1, c.first_device]) for c in stages[1:]]
    return _Pipeline(stages, sum(t) + sum(transfer), max(t), max(step))


def _search(problem: _Problem, tolerance: float, start: Start | None) -> tuple[_Pipeline | None, float]:
    """A pipeline with T within `tolerance` of the least, or `None`; and a lower bound on max t.

    Branch and bound over boxes of (max t, max step). The pipeline of least sum in a box beats all pipelines in the box
    whose max t and max step are as large or larger. Two boxes remain, one with smaller max step and one with smaller
    max t. Their sums are as large or larger, which bounds the max t and max step of a better T.
    """
    n, waits = problem.n_micro_batches, problem.n_micro_batches - 1
    everything = _Box(np.inf, np.inf, 0.0)
    if start is None:
        first = best = _least_pipeline(problem, everything, np.inf)
        if best is None:
            return None, 0.0
        seconds, step_seconds = problem.costs
        least_t = _least_maximum(problem, np.where(np.isfinite(step_seconds), seconds, np.inf))
    else:
        first, best, least_t = None, _pipeline_of(problem.table, start.stages), start.least_t

    boxes = [replace(everything, least_t=least_t)]
    while boxes:
        box = boxes.pop()
        cap_s = _better_s(best.total(n), tolerance) - waits * box.least_t  # largest sum of a better pipeline
        found = first or _least_pipeline(problem, box, cap_s)
        first = None
        if found is None:
            continue

        best = min(best, found, key=lambda solution: solution.total(n))
        room_s = _better_s(best.total(n), tolerance) - found.sum_s
        slower = max(box.least_t, found.max_t) if waits else box.least_t
        smaller_step = np.nextafter(found.max_step, -np.inf)
        boxes += _shrunk_boxes(_Box(box.tau, min(box.sigma, smaller_step), slower), waits, room_s)
        if waits:
            smaller_t = np.nextafter(found.max_t, -np.inf)
            boxes += _shrunk_boxes(_Box(min(box.tau, smaller_t), box.sigma, box.least_t), waits, room_s)
    return best, least_t


def _better_s(total_s: float, tolerance: float) -> float:
    return total_s * (1 - tolerance) if np.isfinite(total_s) else np.inf


def _shrunk_boxes(box: _Box, waits: int, room_s: float) -> list[_Box]:
    """The part of a box with (B - 1) * max t + max step <= room_s."""
    tau = min(box.tau, room_s / waits) if waits else box.tau
    sigma = min(box.sigma, room_s - waits * box.least_t)
    return [_Box(tau, sigma, box.least_t)] if tau >= box.least_t and sigma >= 0 else []


def _least_pipeline(problem: _Problem, box: _Box, cap_s: float) -> _Pipeline | None:
    """If its sum is at most `cap_s`."""
    table = problem.table
    best = _least_stages(problem, *problem.costs, box)
    f, how, unit = _tables(problem, best, cap_s, maximum=False)
    sum_s, s = _best_end(f)
    if not np.isfinite(sum_s):
        return None

    stages, i, p = list[StageChoice](), 0, 0
    while s > 0:
        reached = int(how[s, i, p // unit])
        if reached == IDLE:
            p = int(table.skip_to[p])
            continue
        j, g = divmod(reached, len(problem.counts))
        stages.append(StageChoice(i, j, _fastest_candidate(problem, i, j, g, int(problem.live_of[s]), box), p))
        s, i, p = s - 1, j + 1, p + int(problem.counts[g])
    return _pipeline_of(table, tuple(stages))


def _least_maximum(problem: _Problem, values: Floats) -> float:
    """Of `values` over the stages of a pipeline; inf without a pipeline."""
    best = _least_stages(problem, values, np.zeros_like(values), _Box(np.inf, np.inf, 0.0))
    return _best_end(_tables(problem, best, np.inf, maximum=True)[0])[0]


def _least_stages(problem: _Problem, values: Floats, step: Floats, box: _Box) -> Floats:
    # Finite bounds exclude infinite costs.
    tau, sigma = (min(bound, float(np.finfo(np.float64).max)) for bound in (box.tau, box.sigma))
    return least_stages(
        values, step, problem.most, problem.used, len(problem.live), problem.groups, len(problem.counts), tau, sigma
    )  # fmt: skip


def _fastest_candidate(problem: _Problem, i: int, j: int, group: int, live: int, box: _Box) -> int:
    """Within box and memory."""
    seconds, step = (cost[:, i, j] for cost in problem.costs)
    allowed = (problem.groups == group) & (problem.most[:, i, j] >= live) & (step <= box.sigma)
    return int(np.argmin(np.where(allowed, seconds, np.inf)))


def _tables(problem: _Problem, best: Floats, cap_s: float, *, maximum: bool) -> tuple[Floats, Ints, int]:
    """`fill_tables` over units of devices, for speed: f, how, and the devices per unit, which divides all starts."""
    table, counts = problem.table, problem.counts
    used = np.isfinite(best[0]).any(axis=(0, 2))  # fits with the fewest live micro-batches
    unit = math.gcd(table.cluster_devices, *counts[used].tolist())
    if problem.idle:
        unit = math.gcd(unit, int(table.skip_to[0]))
        unit = 1 if (table.skip_to[::unit] % unit).any() else unit
    units = np.where(used, counts // unit, table.cluster_devices + 1)
    filled = fill_tables(
        best, problem.live_of, units, np.ascontiguousarray(problem.starts[:, ::unit]), table.skip_to[::unit] // unit,
        np.ascontiguousarray(table.transfer_seconds[:, ::unit]), problem.idle, maximum, cap_s,
    )  # fmt: skip
    return *filled, unit


def _best_end(f: Floats) -> tuple[float, int]:
    """The least `f` of all layers, and its number of stages."""
    return min(((float(f[s, 0, 0]), s) for s in range(1, len(f))), default=(np.inf, 0))


def _least_memory(problem: _Problem) -> float:
    """Per device, for any pipeline; inf if the table allows no pipeline."""
    table = problem.table
    allowed = np.isfinite(table.seconds) & np.isfinite(table.step_seconds)
    best = np.full((len(problem.live), table.n_layers, len(problem.counts), table.n_layers), np.inf)
    for k, live in enumerate(problem.live):
        need = np.where(allowed, table.fixed_bytes + live * table.in_flight_bytes, np.inf)
        for m, g in enumerate(problem.groups):
            np.minimum(best[k, :, g, :], need[:, :, m], out=best[k, :, g, :])
    return _best_end(_tables(problem, best, np.inf, maximum=True)[0])[0]


def _infeasible_error(problem: _Problem, schedule: str, n_micro_batches: int) -> InfeasibleError:
    table = problem.table

    # If unlimited memory does not help, memory is not the reason.
    boundless = np.full_like(problem.memory, np.inf)
    need = _least_memory(_dp_problem(table, schedule, n_micro_batches, boundless, idle=problem.idle))
    if np.isfinite(need):
        most = float(problem.memory.max())
        return PipelineTooLargeError(
            f"No pipeline fits in memory. With the schedule `{schedule}` and {n_micro_batches} micro-batches, the "
            f"smallest one needs {bytes_text(need)} per device, and the devices have {bytes_text(most)}. Raise "
            "`num_micro_batches`, or use more devices or devices with more memory.",
            need / most,
        )

    least = 1 if problem.idle else table.cluster_devices
    counts = ", ".join(map(str, sorted(set(problem.counts.tolist()))))
    return InfeasibleError(
        f"No pipeline of {table.n_layers} layers fits on {least} to {table.cluster_devices} devices with stages of "
        f"{counts} devices, because some stages have no sharding there. Allow more shapes in "
        "`submesh_physical_shape_space`, remove options that forbid shardings, or use `AutoParallel`, which may leave "
        "devices idle."
    )
