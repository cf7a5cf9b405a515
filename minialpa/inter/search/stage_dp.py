"""Stage DP: the fastest pipeline, by a table of what each stage would cost on each submesh.

    minimise T = sum_k t_k + sum_borders transfer + max((B - 1) * max_k t_k + max_k step_k, max_k rest_k)

over all ways to cut the layers into stages and to give each stage a candidate (a submesh and how it is used). t_k is
the time of one micro-batch on stage k, step_k what stage k does once per step, B the number of micro-batches. Stages
take the devices of the cluster in order, so it is known which links a border crosses. rest_k matters where only bounds
are known: (B - 1) * t_k + step_k may be known to be larger than what follows from those on t_k and step_k.

For bounds tau on max t, sigma on max step and rho on max rest, one dynamic program gives the least sum under them:
    f[s, i, p] = min over j, m of  t[i, j, m] + f[s - 1, j + 1, p + n_devices[m]] + transfer[i - 1, p]
is the least sum for layers i.. in s stages on the devices from p on. `_search` looks for the bounds of the least total.
Counting the stages from the end makes the memory check exact: the number of live micro-batches of a stage depends on s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
        rest_seconds: [i, j, m], what (B - 1) * seconds + step_seconds are known to be at least.
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
    rest_seconds: Floats | None = None
    transfer_seconds: Floats

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_devices", np.array(self.n_devices, np.int64))
        object.__setattr__(self, "may_start", np.array(self.may_start, np.bool_))
        object.__setattr__(self, "skip_to", np.array(self.skip_to, np.int64))
        self._check_devices()

        n_layers, n_candidates, n_places = len(self.seconds), len(self.n_devices), len(self.skip_to)
        cube = (n_layers, n_layers, n_candidates)
        names = ("seconds", "step_seconds", "fixed_bytes", "in_flight_bytes", "rest_seconds")
        shapes = {name: cube for name in names if getattr(self, name) is not None}
        for name, shape in {**shapes, "transfer_seconds": (n_layers - 1, n_places)}.items():
            array = _frozen(getattr(self, name))
            if not n_layers or array.shape != shape:
                raise ShardingError(f"`{name}` needs shape {shape} with at least one layer; got {array.shape}.")
            if not array.min(initial=0.0) >= 0:  # entries below the diagonal may be anything
                seen = array[np.triu_indices(n_layers)] if array.ndim == 3 else array
                if np.isnan(seen).any() or (seen < 0).any():
                    raise ShardingError(f"`{name}` holds NaN or negative values; forbid a stage with `np.inf`.")
            object.__setattr__(self, name, array)

    def _check_devices(self) -> None:
        """Raise ShardingError unless each candidate takes devices, and each device of the cluster has its entries."""
        n_candidates = len(self.n_devices)
        if not n_candidates or self.n_devices.min() < 1:
            raise ShardingError(f"Every candidate needs a device and there must be one; got {self.n_devices}.")

        if self.may_start.ndim != 2 or len(self.may_start) != n_candidates or not self.may_start.shape[1]:
            raise ShardingError(
                f"`may_start` needs a row for each of {n_candidates} candidates and a column for each device; got "
                f"{self.may_start.shape}."
            )
        n_places = self.may_start.shape[1]
        if self.skip_to.shape != (n_places,) or (self.skip_to <= np.arange(n_places)).any():
            raise ShardingError(f"`skip_to` needs a later place for each of {n_places} devices; got {self.skip_to}.")

    @property
    def rest(self) -> Floats:
        """`rest_seconds`, or zeros without any."""
        return np.zeros_like(self.seconds) if self.rest_seconds is None else self.rest_seconds

    @property
    def n_layers(self) -> int:
        return len(self.seconds)

    @property
    def cluster_devices(self) -> int:
        return int(self.may_start.shape[1])


def _frozen(array: Floats) -> Floats:
    """The array, if it is read-only; else a copy that is, which nobody can change."""
    if isinstance(array, np.ndarray) and array.dtype == np.float64 and not array.flags.writeable:
        return array
    array = np.array(array, np.float64)
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Layers `first_layer` to `last_layer`, both included, on candidate `candidate` of the table, from a device on."""

    first_layer: int
    last_layer: int
    candidate: int
    first_device: int


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """Stages from first to last, and the time of one step by the formula above. least_t: see `Start`."""

    stages: tuple[StageChoice, ...]
    seconds: float
    least_t: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """What is known of the best pipeline before a search for it.

    Attributes:
        stages: a pipeline that is allowed.
        least_t: seconds per micro-batch that the slowest stage of any pipeline takes at least.
    """

    stages: tuple[StageChoice, ...]
    least_t: float = 0.0


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
    start: Start | None = None,
) -> StageAssignment:
    """The minimum of T, at most `tolerance` (a fraction of T) above it.

    With all devices in use unless `use_all_devices=False`, and `n_stages` stages if given. `start` saves time.

    Each stage needs fixed + live * in_flight <= memory_bytes (of its candidate), with the live micro-batches that
    `schedule` allows at its distance from the end. Raises InfeasibleError, with the least memory that would do where
    memory is what fails.
    """
    if min(n_micro_batches, 1 if n_stages is None else n_stages) < 1:
        raise ShardingError(f"Counts start at 1; got {n_micro_batches=}, {n_stages=}.")
    memory = np.broadcast_to(np.asarray(memory_bytes, np.float64), table.n_devices.shape)
    stages = range(1, table.n_layers + 1) if n_stages is None else range(n_stages, n_stages + 1)
    problem = _problem(table, stages, schedule, n_micro_batches, memory, idle=not use_all_devices)
    best, least_t = _search(problem, tolerance, start)
    if best is None:
        raise InfeasibleError(_infeasible_message(problem, schedule, n_micro_batches))
    return StageAssignment(best.stages, best.total(n_micro_batches), least_t)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Problem:
    """The arrays of the DP.

    Attributes:
        table: costs of stages.
        stages: how many stages there may be.
        idle: whether devices may stay idle.
        n_micro_batches: of a step.
        live: different counts of live micro-batches, which rise.
        live_of: [s], which of them a stage has that is the s-th from the end.
        memory: [m], bytes per device.
        used: candidates on which some stage fits with one live micro-batch.
        most: [m, i, j], see `most_live`.
        costs: [m, i, j] each: seconds, step_seconds and rest_seconds of the table.
        groups: [m], the group g of each candidate: those that take as many devices and may start at the same places.
        counts: [g], devices of each group.
        starts: [g, p], whether it may start at device p.
    """

    table: StageCostTable
    stages: range
    idle: bool
    n_micro_batches: int
    live: Floats
    live_of: Ints
    memory: Floats
    used: Ints
    most: Ints
    costs: tuple[Floats, Floats, Floats]
    groups: Ints
    counts: Ints
    starts: Bools


@dataclass(frozen=True, slots=True)
class _Solution:
    """A pipeline; the letters of the formula above.

    Attributes:
        stages: its stages in order.
        sum_s: of stage times and transfers.
        max_t: seconds of the slowest stage per micro-batch.
        max_step: seconds of the slowest stage per step.
        max_rest: the largest of `rest_seconds`.
    """

    stages: tuple[StageChoice, ...]
    sum_s: float
    max_t: float
    max_step: float
    max_rest: float

    def total(self, n_micro_batches: int) -> float:
        return self.sum_s + max((n_micro_batches - 1) * self.max_t + self.max_step, self.max_rest)


@dataclass(frozen=True, slots=True)
class _Box:
    """Pipelines that are left to look at.

    Attributes:
        tau: no stage takes more seconds per micro-batch.
        sigma: no stage takes more seconds per step.
        rho: no stage has a larger rest.
        least_t: their slowest stage takes at least so long per micro-batch.
    """

    tau: float
    sigma: float
    rho: float
    least_t: float


def _problem(
    table: StageCostTable, stages: range, schedule: str, n_micro_batches: int, memory: Floats, *, idle: bool
) -> _Problem:
    memory = np.array(memory, np.float64)
    by_column = [_columns_first(x) for x in (table.seconds, table.step_seconds, table.rest)]
    fixed, in_flight = (_columns_first(x) for x in (table.fixed_bytes, table.in_flight_bytes))

    # With one live micro-batch, as the last stage has: what does not even fit there is of no use.
    one = most_live(fixed, in_flight, memory, np.ones(1))
    used = np.flatnonzero((one == 0).any(axis=(1, 2)) & _allowed_somewhere(*by_column[:2]))
    least_devices = int(table.n_devices[used].min(initial=table.cluster_devices))
    most_stages = min(table.n_layers, stages[-1], table.cluster_devices // least_devices)
    counts = [max_live(schedule, 0, PipelineSize(max(1, s), n_micro_batches)) for s in range(most_stages + 1)]
    live, live_of = np.unique(np.array(counts, np.float64), return_inverse=True)

    # Candidates that only differ in what they cost are looked at together.
    rows = np.concatenate([table.n_devices[:, None], table.may_start], axis=1)
    kinds, groups = np.unique(rows, axis=0, return_inverse=True)
    return _Problem(
        table=table,
        stages=stages,
        idle=idle,
        n_micro_batches=n_micro_batches,
        live=live,
        live_of=live_of.ravel(),
        memory=memory,
        used=used,
        most=most_live(fixed, in_flight, memory, live),
        costs=(by_column[0], by_column[1], by_column[2]),
        groups=groups.ravel(),
        counts=kinds[:, 0].copy(),
        starts=kinds[:, 1:].astype(np.bool_),
    )


def _columns_first(cube: Floats) -> Floats:
    """[m, i, j] of [i, j, m]: what the loops read in a row is together."""
    return np.ascontiguousarray(np.moveaxis(cube, -1, 0))


def _allowed_somewhere(seconds: Floats, step_seconds: Floats) -> Bools:
    """[m]: whether some stage is allowed on the candidate."""
    n_layers = seconds.shape[1]
    above = np.triu(np.ones((n_layers, n_layers), np.bool_))
    return np.asarray((np.isfinite(seconds + step_seconds) & above).any(axis=(1, 2)), np.bool_)


def _solution(table: StageCostTable, stages: tuple[StageChoice, ...]) -> _Solution:
    places = [(c.first_layer, c.last_layer, c.candidate) for c in stages]
    t = [float(table.seconds[at]) for at in places]
    step = [float(table.step_seconds[at]) for at in places]
    rest = [0.0 if table.rest_seconds is None else float(table.rest_seconds[at]) for at in places]
    transfer = [float(table.transfer_seconds[c.first_layer - 1, c.first_device]) for c in stages[1:]]
    return _Solution(stages, sum(t) + sum(transfer), max(t), max(step), max(rest))


def _search(problem: _Problem, tolerance: float, start: Start | None) -> tuple[_Solution | None, float]:
    """A pipeline with a total at most `tolerance` of itself above the least, or None where none is allowed.

    Also what the slowest stage of any pipeline takes at least.

    Branch and bound over boxes of (max t, max step, max rest). The solution of least sum in a box matches, in sum,
    max t and max step, all pipelines in it whose max t and max step are no smaller. What is left are two boxes, one
    with a smaller max t and one with a smaller max step; of both, the part is cut off in which the sum, which only
    rises, leaves no room for a total that is better by the tolerance. If the total is that of its rest, a smaller rest
    is all that is left.
    """
    n, waits = problem.n_micro_batches, problem.n_micro_batches - 1
    everything = _Box(np.inf, np.inf, np.inf, 0.0)
    if start is None:
        first = best = _solve(problem, everything, np.inf)
        if best is None:
            return None, 0.0
        seconds, step_seconds, _ = problem.costs
        least_t = _least_maximum(problem, np.where(np.isfinite(step_seconds), seconds, np.inf))
    else:
        first, best, least_t = None, _solution(problem.table, start.stages), start.least_t

    boxes = [replace(everything, least_t=least_t)]
    while boxes:
        box = boxes.pop()
        cap_s = _better_s(best.total(n), tolerance) - waits * box.least_t  # of the sum, for a better total
        found, first = first or _solve(problem, box, cap_s), None
        if found is None:
            continue

        best = min(best, found, key=lambda solution: solution.total(n))
        room_s = _better_s(best.total(n), tolerance) - found.sum_s
        if found.max_rest >= room_s:
            boxes += _boxes(box, waits, min(np.nextafter(found.max_rest, -np.inf), room_s), room_s)
            continue

        # Two boxes are left, each without the part whose sums leave no room for a better total.
        slower = max(box.least_t, found.max_t) if waits else box.least_t
        smaller_step = np.nextafter(found.max_step, -np.inf)
        boxes += _boxes(_Box(box.tau, min(box.sigma, smaller_step), box.rho, slower), waits, room_s, room_s)
        if waits:
            smaller_t = np.nextafter(found.max_t, -np.inf)
            boxes += _boxes(_Box(min(box.tau, smaller_t), box.sigma, box.rho, box.least_t), waits, room_s, room_s)
    return best, least_t


def _better_s(total_s: float, tolerance: float) -> float:
    """Totals below this are better by the tolerance; all are if there is no finite total yet."""
    return total_s * (1 - tolerance) if np.isfinite(total_s) else np.inf


def _boxes(box: _Box, waits: int, rho: float, room_s: float) -> list[_Box]:
    """The part of a box that leaves room: (B - 1) * max t + max step <= room_s, and max rest <= rho; or nothing."""
    tau = min(box.tau, room_s / waits) if waits else box.tau
    sigma = min(box.sigma, room_s - waits * box.least_t)
    rho = min(box.rho, rho)
    return [_Box(tau, sigma, rho, box.least_t)] if tau >= box.least_t and min(sigma, rho) >= 0 else []


def _solve(problem: _Problem, box: _Box, cap_s: float) -> _Solution | None:
    """A pipeline of least sum in a box, if that is at most `cap_s`."""
    table = problem.table
    best = _least_stages(problem, *problem.costs, box)
    f, how, unit = _tables(problem, best, cap_s, maximum=False)
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
        stages.append(StageChoice(i, j, _fastest(problem, i, j, g, int(problem.live_of[s]), box), p))
        s, i, p = s - 1, j + 1, p + int(problem.counts[g])
    return _solution(table, tuple(stages))


def _least_maximum(problem: _Problem, values: Floats) -> float:
    """The least that the largest of `values` can be over the stages of a pipeline; inf where there is no pipeline."""
    nothing = np.zeros_like(values)
    best = _least_stages(problem, values, nothing, nothing, _Box(np.inf, np.inf, np.inf, 0.0))
    return _best_end(problem, _tables(problem, best, np.inf, maximum=True)[0])[0]


def _least_stages(problem: _Problem, values: Floats, step: Floats, rest: Floats, box: _Box) -> Floats:
    # The kernel takes no pipeline of infinite cost for one.
    tau, sigma, rho = (min(bound, float(np.finfo(np.float64).max)) for bound in (box.tau, box.sigma, box.rho))
    return least_stages(
        values, step, rest, problem.most, problem.used, len(problem.live), problem.groups, len(problem.counts),
        tau, sigma, rho,
    )  # fmt: skip


def _fastest(problem: _Problem, i: int, j: int, group: int, live: int, box: _Box) -> int:
    """The candidate of `least_stages` for a stage."""
    seconds, step, rest = (cost[:, i, j] for cost in problem.costs)
    allowed = (problem.groups == group) & (problem.most[:, i, j] >= live) & (step <= box.sigma) & (rest <= box.rho)
    return int(np.argmin(np.where(allowed, seconds, np.inf)))


def _tables(problem: _Problem, best: Floats, cap_s: float, *, maximum: bool) -> tuple[Floats, Ints, int]:
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
        np.ascontiguousarray(table.transfer_seconds[:, ::unit]), problem.idle, maximum, cap_s,
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
    return _best_end(problem, _tables(problem, best, np.inf, maximum=True)[0])[0]


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
