"""The seconds and bytes of the passes of each stage in, an order of all passes out that makes stages wait little.

Stage k runs forward, backward and weights passes of n micro-batches (`schedules`). A list scheduler builds an order: it
always takes the stage that can decide first, and there the first of these passes that is ready and fits in memory:

    backward    other stages wait for it
    forward     if fewer than `ahead[k]` micro-batches are between their forward and their backward
    weights     if none of the others starts within a part `patience` of its seconds

The order depends on `ahead` and `patience`. All combinations of a few values are tried, and the fastest order is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from minialpa.inter.schedule.schedules import Kind, Pass, PipelineSize, Schedule, make_schedule, ticks

#: Parts of a weights pass for which a stage waits rather than run one.
_PATIENCE = (0.0, 0.25, 0.5, 1.0)
#: Of orders that take up to this multiple of the shortest time, the one with the least memory is taken.
_AS_FAST = 1.002
#: Budgets and sums of bytes differ by rounding.
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """The passes of a stage.

    seconds: of a forward, a backward and a weights pass.
    kept: bytes of a micro-batch from forward to backward, from forward to weights, and from backward to weights.
    budget: bytes for all micro-batches.
    sends_s: seconds of a transfer from a forward pass to the next stage, and from a backward pass to the one before.
    """

    seconds: tuple[float, float, float]
    kept: tuple[float, float, float] = (0.0, 1.0, 0.0)
    budget: float = math.inf
    sends_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Policy:
    ahead: tuple[int, ...]
    patience: float


def synthesise(stages: Sequence[StageWork], n_micro_batches: int) -> Schedule:
    """The fastest order of the policies and the named schedules within the budgets; at least one of them must fit."""
    size = PipelineSize(len(stages), n_micro_batches)
    named = [one for one in named_orders(size) if fits(stages, one)]
    orders = (_order(stages, n_micro_batches, policy) for policy in _policies(stages, n_micro_batches))
    found = [*named, *(Schedule("zb", size, passes) for passes in orders if passes is not None)]

    seconds = [seconds_of(stages, one) for one in found]
    most_s = min([_AS_FAST * min(seconds), *seconds[: len(named)]])
    nearly_fastest = [one for one, s in zip(found, seconds, strict=True) if s <= most_s]
    return min(nearly_fastest, key=lambda one: sum(map(_peak_bytes, stages, one.passes)))


def named_orders(size: PipelineSize) -> list[Schedule]:
    """`zb-h1`, and `1f1b` and `gpipe` with each weights pass after its backward pass."""
    split = [make_schedule("zb-h1", size)]
    for name in ("1f1b", "gpipe"):
        passes = tuple(
            tuple(
                each
                for one in order
                for each in (one, *([replace(one, kind="weights")] if one.kind == "backward" else []))
            )
            for order in make_schedule(name, size).passes
        )
        split.append(Schedule("zb", size, passes))
    return split


def _policies(stages: Sequence[StageWork], n: int) -> list[_Policy]:
    p = len(stages)
    aheads = {
        tuple(min(n, p - k) for k in range(p)),
        tuple(min(n, p - k + 1) for k in range(p)),
        tuple(min(n, p) for _ in range(p)),
        tuple(min(n, 2 * (p - k) - 1) for k in range(p)),
        tuple(min(n, 2 * (p - k)) for k in range(p)),
        tuple(n for _ in range(p)),
    }
    return [_Policy(ahead, patience) for ahead, patience in itertools.product(sorted(aheads), _PATIENCE)]


class _State:
    """A stage while the scheduler runs: when it is free, its bytes, and how many passes of each kind it has run."""

    def __init__(self, work: StageWork) -> None:
        self.work, self.free_s, self.n_bytes = work, 0.0, 0.0
        self.n_run: dict[Kind, int] = {"forward": 0, "backward": 0, "weights": 0}
        self.passes: list[Pass] = []

    def fits(self, kind: Kind) -> bool:
        """A forward pass leaves room for a backward pass, so that the stage can always go on."""
        until_backward, until_weights, after_backward = self.work.kept
        match kind:
            case "forward":
                return self.n_bytes + until_backward + until_weights + after_backward <= self.work.budget * _ROUNDING
            case "backward":
                return self.n_bytes + after_backward <= self.work.budget * _ROUNDING
            case _:
                return True

    def run(self, stage: int, kind: Kind, start_s: float) -> float:
        """Returns the end of the pass."""
        until_backward, until_weights, after_backward = self.work.kept
        self.passes.append(Pass(kind, stage, self.n_run[kind]))
        self.n_run[kind] += 1
        self.n_bytes += {
            "forward": until_backward + until_weights,
            "backward": after_backward - until_backward,
            "weights": -until_weights - after_backward,
        }[kind]
        self.free_s = start_s + self.work.seconds[("forward", "backward", "weights").index(kind)]
        return self.free_s


def _order(stages: Sequence[StageWork], n: int, policy: _Policy) -> tuple[tuple[Pass, ...], ...] | None:
    """The passes of each stage; None if the budgets stop the pipeline."""
    p = len(stages)
    states = list(map(_State, stages))
    # When the operands of each pass arrive; unknown before the other stage has run.
    arrive_s: dict[tuple[Kind, int, int], float] = {("forward", 0, b): 0.0 for b in range(n)}

    def ready_s(k: int, kind: Kind) -> float:
        state, b = states[k], states[k].n_run[kind]
        if b == n or not state.fits(kind):
            return math.inf
        if kind == "weights":
            return 0.0 if b < state.n_run["backward"] else math.inf
        if kind == "forward" and b - state.n_run["backward"] >= policy.ahead[k]:
            return math.inf
        if kind == "backward" and b >= state.n_run["forward"]:
            return math.inf
        return arrive_s.get((kind, k, b), math.inf)

    for _ in range(3 * n * p):
        times = [max(state.free_s, min(ready_s(k, kind) for kind in state.n_run)) for k, state in enumerate(states)]
        k = min(range(p), key=times.__getitem__)
        now = times[k]
        if math.isinf(now):
            return None

        state = states[k]
        arrivals = {kind: ready_s(k, kind) for kind in state.n_run}
        awaited: Kind = min(("backward", "forward"), key=lambda kind: max(now, arrivals[kind]))
        start_s = max(now, arrivals[awaited])
        waits_s = start_s - now
        kind = awaited
        if math.isinf(start_s) or (waits_s > 0 and waits_s >= policy.patience * state.work.seconds[2]):
            kind, start_s = ("weights", now) if not math.isinf(arrivals["weights"]) else (awaited, start_s)

        b = state.n_run[kind]
        end_s = state.run(k, kind, start_s)
        if kind == "forward":
            if k + 1 < p:
                arrive_s["forward", k + 1, b] = end_s + state.work.sends_s[0]
            else:
                arrive_s["backward", k, b] = end_s
        elif kind == "backward" and k > 0:
            arrive_s["backward", k - 1, b] = end_s + state.work.sends_s[1]
    return tuple(tuple(state.passes) for state in states)


def fits(stages: Sequence[StageWork], schedule: Schedule) -> bool:
    """Whether each stage keeps at most its budget at all times."""
    return all(
        _peak_bytes(work, passes) <= work.budget * _ROUNDING
        for work, passes in zip(stages, schedule.passes, strict=True)
    )


def _peak_bytes(work: StageWork, passes: Sequence[Pass]) -> float:
    until_backward, until_weights, after_backward = work.kept
    now = peak = 0.0
    for one in passes:
        now += {"forward": until_backward + until_weights, "backward": after_backward, "weights": 0.0}[one.kind]
        peak = max(peak, now)
        now -= {"forward": 0.0, "backward": until_backward, "weights": until_weights + after_backward}[one.kind]
    return peak


def seconds_of(stages: Sequence[StageWork], schedule: Schedule) -> float:
    """When the last stage ends. Transfers do not wait for each other."""
    end_s: dict[Pass, float] = {}
    free_s = [0.0] * len(stages)
    for one in (one for tick in ticks(schedule) for one in tick):
        k, b = one.chunk, one.micro_batch
        start_s = free_s[k]
        if one.kind == "forward" and k > 0:
            start_s = max(start_s, end_s[Pass("forward", k - 1, b)] + stages[k - 1].sends_s[0])
        if one.kind == "backward" and k + 1 < len(stages):
            start_s = max(start_s, end_s[Pass("backward", k + 1, b)] + stages[k + 1].sends_s[1])
        kind = ("forward", "backward", "weights").index(one.kind)
        end_s[one] = free_s[k] = start_s + stages[k].seconds[kind]
    return max(free_s)


def bound_s(stages: Sequence[StageWork], n: int) -> float:
    """No order of the passes is faster.

    - Stage k starts after the first forward passes of the stages before it, and then runs all its passes.
    - The last micro-batch passes through all stages after all forward passes of stage k, and comes back.
    - A micro-batch needs bytes for some seconds at each stage, of which the stage has its budget times all seconds.
    """
    p = len(stages)
    forward, backward, weights = zip(*(work.seconds for work in stages), strict=True)
    there = [work.sends_s[0] for work in stages]
    back = [work.sends_s[1] for work in stages]

    bounds: list[float] = []
    for k, work in enumerate(stages):
        reached_s = sum(forward[:k]) + sum(there[:k])
        returns_s = sum(backward[:k]) + sum(back[1 : k + 1]) if k else 0.0
        beyond_s = sum(forward[k + 1 :]) + sum(there[k:-1]) + sum(backward[k + 1 :]) + sum(back[k + 1 :])
        bounds.append(reached_s + n * sum(work.seconds))
        # After the last forward of this stage, the last micro-batch goes to the end and back to the first stage.
        bounds.append(reached_s + n * forward[k] + beyond_s + backward[k] + returns_s + min(weights[: k + 1]))
        if k == p - 1:
            bounds.append(reached_s + n * (forward[k] + backward[k]) + returns_s + min(weights))
        until_backward, until_weights, after_backward = work.kept
        round_s = forward[k] + beyond_s + backward[k]
        byte_seconds = until_backward * round_s + until_weights * (round_s + weights[k])
        byte_seconds += after_backward * (backward[k] + weights[k])
        bounds.append(reached_s + n * byte_seconds / work.budget)
    return max(bounds)
