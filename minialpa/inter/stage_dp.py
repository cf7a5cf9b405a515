"""Stage DP: a table of stage costs in, the fastest pipeline out.

    minimise T = sum_k t_k + sum_borders transfer + (B - 1) * max_k t_k + max_k step_k

over all ways to cut the layers into stages and to give each stage a candidate (a submesh and how it is used). t_k is
the time of one micro-batch on stage k, step_k what stage k does once per step, B the number of micro-batches.

For bounds tau on max t and sigma on max step, one dynamic program gives G(tau, sigma), the least sum under the bounds:
    f[s, i, d] = min over j, m of  t[i, j, m] + transfer[j] + f[s - 1, j + 1, d - n_devices[m]]       -> _tables
is the least sum for layers i.. in s stages on d devices. `_search` lowers tau and sigma from one solution to the next
until no better total is possible. Counting the stages from the end makes the memory check exact: the number of live
micro-batches of a stage depends on s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from minialpa.errors import InfeasibleError, ShardingError
from minialpa.inter.schedule import PipelineSize, max_live

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class StageCostTable:
    """What layers i to j, both included, cost on candidate m. Entries with i > j are not looked at.

    n_devices[m]: devices that the candidate takes.
    seconds[i, j, m]: forward and backward of one micro-batch; inf where the candidate is not allowed.
    step_seconds[i, j, m]: gradient sync and update, once per step.
    fixed_bytes[i, j, m], in_flight_bytes[i, j, m]: per device, whatever happens and for each live micro-batch.
    transfer_seconds[j]: one micro-batch's activations and gradients over the border after layer j < n_layers - 1.
    """

    n_devices: NDArray[np.int64]
    seconds: Floats
    step_seconds: Floats
    fixed_bytes: Floats
    in_flight_bytes: Floats
    transfer_seconds: Floats

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_devices", np.array(self.n_devices, np.int64))
        n_candidates = len(self.n_devices)
        if not n_candidates or self.n_devices.min() < 1:
            raise ShardingError(f"Every candidate needs a device and there must be one; got {self.n_devices}.")
        n_layers = len(self.seconds)
        cube = (n_layers, n_layers, n_candidates)
        shapes = dict.fromkeys(("seconds", "step_seconds", "fixed_bytes", "in_flight_bytes"), cube)
        for name, shape in {**shapes, "transfer_seconds": (n_layers - 1,)}.items():
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


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Layers `first_layer` to `last_layer`, both included, on candidate `candidate` of the table."""

    first_layer: int
    last_layer: int
    candidate: int


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """Stages from first to last, and the time of one step by the formula above."""

    stages: tuple[StageChoice, ...]
    seconds: float


def step_seconds_of(table: StageCostTable, stages: tuple[StageChoice, ...], n_micro_batches: int) -> float:
    """The formula above, for given stages."""
    t = [float(table.seconds[s.first_layer, s.last_layer, s.candidate]) for s in stages]
    step = [float(table.step_seconds[s.first_layer, s.last_layer, s.candidate]) for s in stages]
    transfer = [float(table.transfer_seconds[s.last_layer]) for s in stages[:-1]]
    return sum(t) + sum(transfer) + (n_micro_batches - 1) * max(t) + max(step)


def choose_stages(
    table: StageCostTable,
    *,
    n_devices: int,
    n_micro_batches: int,
    memory_bytes: float,
    schedule: str = "1f1b",
    n_stages: int | None = None,
    use_all_devices: bool = True,
) -> StageAssignment:
    """The exact minimum of T, with all devices in use unless `use_all_devices=False`, and `n_stages` stages if given.

    Each stage needs fixed + live * in_flight <= memory_bytes, with the live micro-batches that `schedule` allows at its
    distance from the end. Raises InfeasibleError, with the least memory that would do where memory is what fails.
    """
    if min(n_devices, n_micro_batches, 1 if n_stages is None else n_stages) < 1:
        raise ShardingError(f"Counts start at 1; got {n_devices=}, {n_micro_batches=}, {n_stages=}.")
    ends = _Ends(
        range(1, table.n_layers + 1) if n_stages is None else range(n_stages, n_stages + 1),
        range(n_devices if use_all_devices else 1, n_devices + 1),
    )
    problem = _problem(table, ends, schedule, n_micro_batches)
    best = _search(replace(problem, fits=problem.need <= memory_bytes), n_micro_batches)
    if best is None:
        raise InfeasibleError(_infeasible_message(table, problem, memory_bytes, schedule, n_micro_batches))
    return StageAssignment(best.stages, step_seconds_of(table, best.stages, n_micro_batches))


@dataclass(frozen=True, slots=True)
class _Ends:
    """Counts of stages and devices that a whole pipeline may have."""

    stages: range
    devices: range


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """The arrays of the DP, with candidates sorted by device count.

    t, step: [i, j, m], inf where not allowed. transfer: [j], 0 after the last layer.
    need: [s - 1, i, j, m], bytes of a stage that has s stages from itself to the end; fits: whether they are there.
    order: [m], number of the candidate in the table. counts: different device counts, [u]; starts: place of the first
    candidate of each.
    """

    t: Floats
    step: Floats
    transfer: Floats
    need: Floats
    fits: NDArray[np.bool_]
    order: NDArray[np.intp]
    counts: tuple[int, ...]
    starts: NDArray[np.intp]
    ends: _Ends


@dataclass(frozen=True, slots=True)
class _Solution:
    """`sum_s` is the sum of stage times and transfers."""

    stages: tuple[StageChoice, ...]
    sum_s: float
    max_t: float
    max_step: float

    def total(self, n_micro_batches: int) -> float:
        return self.sum_s + (n_micro_batches - 1) * self.max_t + self.max_step


def _problem(table: StageCostTable, ends: _Ends, schedule: str, n_micro_batches: int) -> _Problem:
    """Without a memory limit yet."""
    order = np.argsort(table.n_devices, kind="stable")
    order = order[table.n_devices[order] <= ends.devices[-1]]
    counts, starts = np.unique(table.n_devices[order], return_index=True)
    allowed = np.isfinite(table.step_seconds) & ~np.tri(table.n_layers, k=-1, dtype=bool)[:, :, None]
    most_stages = min(table.n_layers, ends.stages[-1])
    ends_in = [PipelineSize(s, n_micro_batches) for s in range(1, most_stages + 1)]
    live = np.array([max_live(schedule, 0, size) for size in ends_in], np.float64)
    need = table.fixed_bytes[:, :, order] + live[:, None, None, None] * table.in_flight_bytes[:, :, order]
    return _Problem(
        t=np.where(allowed, table.seconds, np.inf)[:, :, order],
        step=np.where(allowed, table.step_seconds, np.inf)[:, :, order],
        transfer=np.append(table.transfer_seconds, 0.0),
        need=need,
        fits=np.ones(need.shape, bool),
        order=order,
        counts=tuple(counts.tolist()),
        starts=starts,
        ends=ends,
    )


def _search(problem: _Problem, n_micro_batches: int) -> _Solution | None:
    """A pipeline with the least total, or None where none is allowed.

    For a fixed tau, sigma falls below each solution's max step. Any pipeline with max t <= tau is matched, in sum and
    in max step, by one of the solutions found. Then tau falls below the largest max t among those: a pipeline with a
    max t between there and the old tau is matched in max t too. Lower bounds on sum, max t and max step end both walks.
    """
    cheapest = _solve(problem, np.inf, np.inf)
    if cheapest is None:
        return None
    least_t, least_step = (_least_maximum(problem, values) for values in (problem.t, problem.step))
    extremes = (cheapest, _solve(problem, least_t, np.inf), _solve(problem, np.inf, least_step))
    best = min((solution for solution in extremes if solution), key=lambda solution: solution.total(n_micro_batches))
    tau = np.inf
    while True:
        if n_micro_batches > 1:
            tau = min(tau, (best.total(n_micro_batches) - cheapest.sum_s - least_step) / (n_micro_batches - 1))
        sigma, reached_t, hopeless = np.inf, -np.inf, False
        while not hopeless and (solution := _solve(problem, tau, sigma)) is not None:
            best = min(best, solution, key=lambda solution: solution.total(n_micro_batches))
            floor = solution.sum_s + (n_micro_batches - 1) * least_t + least_step
            hopeless = floor >= best.total(n_micro_batches)
            if hopeless and sigma == np.inf:
                return best  # lower tau only raises the floor
            reached_t = max(reached_t, solution.max_t)
            sigma = np.nextafter(solution.max_step, -np.inf)
        if reached_t < 0:
            return best
        tau = np.nextafter(reached_t, -np.inf)


def _solve(problem: _Problem, tau: float, sigma: float) -> _Solution | None:
    """A pipeline of least sum with t <= tau and step <= sigma on every stage."""
    values = np.where((problem.t <= tau) & (problem.step <= sigma), problem.t, np.inf)
    values = np.where(problem.fits, values + problem.transfer[:, None], np.inf)
    f = _tables(problem, values, np.add)
    sum_s, s, d = _best_end(problem, f)
    if not np.isfinite(sum_s):
        return None
    stages, t, step, i = [], [], [], 0
    while s > 0:
        after = f[s - 1, 1:, [d - n if n <= d else -1 for n in problem.counts]]  # [u, j]
        ahead = np.where(np.array(problem.counts)[:, None] <= d, after, np.inf) + _grouped(problem, values[s - 1, i]).T
        u, j = np.unravel_index(int(ahead.argmin()), ahead.shape)
        group = slice(problem.starts[u], problem.starts[u + 1] if u + 1 < len(problem.starts) else None)
        m = int(problem.starts[u]) + int(values[s - 1, i, j, group].argmin())
        stages.append(StageChoice(i, int(j), int(problem.order[m])))
        t.append(float(problem.t[i, j, m]))
        step.append(float(problem.step[i, j, m]))
        s, i, d = s - 1, int(j) + 1, d - problem.counts[u]
    return _Solution(tuple(stages), sum_s, max(t), max(step))


def _least_maximum(problem: _Problem, values: Floats) -> float:
    """The least that the largest of `values` can be over the stages of a pipeline; inf where there is no pipeline."""
    allowed = problem.fits & np.isfinite(problem.t)
    return _best_end(problem, _tables(problem, np.where(allowed, values, np.inf), np.maximum))[0]


def _tables(problem: _Problem, values: Floats, combine: np.ufunc) -> Floats:
    """f[s, i, d]: least combination of `values[s - 1, i, j, m]` for layers i to the end in s stages on d devices."""
    n_stages, n_layers = values.shape[:2]
    f = np.full((n_stages + 1, n_layers + 1, problem.ends.devices[-1] + 1), np.inf)
    f[0, n_layers, 0] = 0.0
    grouped = _grouped(problem, values)
    for s in range(1, n_stages + 1):
        for u, n in enumerate(problem.counts):
            after = f[s - 1, 1:, : f.shape[2] - n]  # [j, d]
            least = combine(grouped[s - 1, :, :, u, None], after).min(axis=1)
            np.minimum(f[s, :n_layers, n:], least, out=f[s, :n_layers, n:])
    return f


def _grouped(problem: _Problem, values: Floats) -> Floats:
    """The least value among candidates with the same device count; the last axis turns from m into u."""
    least: Floats = np.minimum.reduceat(values, problem.starts, axis=-1)
    return least


def _best_end(problem: _Problem, f: Floats) -> tuple[float, int, int]:
    """Least value of a whole pipeline, its number of stages and of devices; of equals, the fewest."""
    ends = [(float(f[s, 0, d]), s, d) for s in problem.ends.stages if s < len(f) for d in problem.ends.devices]
    return min(ends, default=(np.inf, 0, 0))


def _infeasible_message(
    table: StageCostTable, problem: _Problem, memory_bytes: float, schedule: str, n_micro_batches: int
) -> str:
    need = _least_maximum(problem, problem.need)
    if np.isfinite(need):
        return (
            f"No pipeline fits: under `{schedule}` with {n_micro_batches} micro-batches the thriftiest one needs "
            f"{need:.6g} bytes per device and the devices have {memory_bytes:.6g}. Raise `n_micro_batches` so that "
            "each is smaller, allow more devices, or use devices with more memory."
        )
    devices, stages = problem.ends.devices, problem.ends.stages
    return (
        f"No pipeline of {table.n_layers} layers in {stages[0]} to {stages[-1]} stages uses {devices[0]} to "
        f"{devices[-1]} devices: candidates take {', '.join(map(str, problem.counts)) or 'more'} devices, and entries "
        "of `seconds` or `step_seconds` that are inf are not allowed. Offer more candidates, or set "
        "`use_all_devices=False`."
    )
