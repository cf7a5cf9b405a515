"""The seconds and bytes of the passes of each chunk in, an order of all passes out that makes stages wait little.

A list scheduler (`list_scheduler`) builds an order: it always takes the stage that can decide first, and there the
first of these passes that is ready and fits in memory:

    backward    other stages wait for it
    forward     of the first chunk of a stage only if fewer than `ahead[k]` micro-batches are in flight
    weights     if both of the others would start later than after a part `patience` of its seconds

1. A few values of `ahead` and `patience` are tried, and the best ones climb in steps of one micro-batch at one stage.
2. Unless the fastest order is near `bound_s`, passes change places in it, by simulated annealing.
3. Of this order and the named ones, one of the fastest is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from minialpa.inter.schedule.list_scheduler import Arrays, Ints, improve_orders, list_order, order_seconds
from minialpa.inter.schedule.schedules import (
    KINDS,
    PipelineSize,
    Schedule,
    layouts,
    make_schedule,
    passes_of,
    schedule_names,
    splits_backward,
)

#: Parts of a weights pass for which a stage waits rather than run one.
_PATIENCE = (0.0, 0.25, 0.5, 1.0)
#: Policies that climb.
_N_CLIMBERS = 3
#: An order is near the bound, or as fast as another one, up to this multiple of the seconds.
_AS_FAST = 1.002
#: Passes that annealing orders in all of its moves: about 0.2 seconds.
_ANNEALED_PASSES = 3_000_000
_MOST_MOVES = 100_000
#: Budgets and sums of bytes differ by rounding.
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWork:
    """The passes of a chunk.

    seconds: of a forward, a backward and a weights pass.
    kept: bytes of a micro-batch from forward to backward, from forward to weights, and from backward to weights.
    sends_s: seconds of a transfer from a forward pass to the next chunk, and from a backward pass to the one before.
    """

    seconds: tuple[float, float, float]
    kept: tuple[float, float, float] = (0.0, 1.0, 0.0)
    sends_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PipelineWork:
    """chunks: by number. budgets: bytes of each stage for all micro-batches."""

    size: PipelineSize
    chunks: tuple[ChunkWork, ...]
    budgets: tuple[float, ...]

    def arrays(self) -> Arrays:
        return Arrays(
            np.array(self.size.stage_of),
            np.array([one.seconds for one in self.chunks]).T.copy(),
            np.array([one.kept for one in self.chunks], float).T.copy(),
            np.array([one.sends_s for one in self.chunks], float).T.copy(),
            _ROUNDING * np.array(self.budgets, float),
        )


@dataclass(frozen=True, slots=True, order=True)
class _Policy:
    ahead: tuple[int, ...]
    patience: float
    deep_forward: bool
    deep_backward: bool


def synthesise(work: PipelineWork) -> Schedule:
    """One of the fastest orders within the budgets. Raises ValueError without any such order."""
    found = [(seconds_of(work, one), one) for one in named_orders(work.size)]
    least_named_s = min(seconds for seconds, _ in found)
    found += [(seconds, Schedule("zb", work.size, passes_of(order, work.size))) for seconds, order in _listed(work)]

    fastest_s, fastest = min(found, key=lambda pair: pair[0])
    if math.isinf(fastest_s):
        raise ValueError(f"No order of passes fits into the bytes of {work}.")
    if fastest_s > _AS_FAST * bound_s(work):
        found.append(_annealed(work, fastest, fastest_s))
        fastest_s = min(seconds for seconds, _ in found)

    # Of nearly equal seconds, the least memory.
    most_s = min(_AS_FAST * fastest_s, max(least_named_s, fastest_s))
    return min((one for seconds, one in found if seconds <= most_s), key=lambda one: sum(peak_bytes(work, one)))


def named_orders(size: PipelineSize) -> list[Schedule]:
    """The named schedules with split backward passes, and `1f1b` or `1f1b-interleaved` with weights passes at once."""
    return [
        make_schedule(one, size) for one in schedule_names() if splits_backward(one) and size.layout in layouts(one)
    ]


def _listed(work: PipelineWork) -> Iterator[tuple[float, Ints]]:
    """The seconds and the order of the best policies."""
    arrays, n = work.arrays(), work.size.n_micro_batches
    order: Ints = np.empty(3 * n * len(work.chunks), np.int64)
    seconds: dict[_Policy, float] = {}

    def seconds_with(policy: _Policy) -> float:
        if policy not in seconds:
            ahead = np.array(policy.ahead)
            flags = policy.patience, policy.deep_forward, policy.deep_backward
            seconds[policy] = list_order(arrays, n, ahead, *flags, order)
        return seconds[policy]

    best = sorted(_policies(work.size), key=lambda policy: (seconds_with(policy), policy))[:_N_CLIMBERS]
    for policy in best:
        climbed = _climbed(policy, n, seconds_with)
        if not math.isinf(seconds.pop(climbed)):
            yield seconds_with(climbed), order.copy()


def _climbed(policy: _Policy, n: int, seconds_with: Callable[[_Policy], float]) -> _Policy:
    """The policy after all steps of `ahead` at one stage that save time."""
    is_better = True
    while is_better:
        is_better = False
        for k, step in itertools.product(range(len(policy.ahead)), (1, -1, 2, -2)):
            moved = min(n, max(1, policy.ahead[k] + step))
            other = replace(policy, ahead=(*policy.ahead[:k], moved, *policy.ahead[k + 1 :]))
            if seconds_with(other) < seconds_with(policy) / _ROUNDING:
                policy, is_better = other, True
    return policy


def _policies(size: PipelineSize) -> list[_Policy]:
    p, n = size.n_stages, size.n_micro_batches
    aheads = {
        tuple(min(n, most) for most in counts)
        for counts in (
            [p - k for k in range(p)],
            [p - k + 1 for k in range(p)],
            [p] * p,
            [2 * p - k for k in range(p)],
            [2 * (p - k) - 1 for k in range(p)],
            [2 * (p - k) for k in range(p)],
            [n] * p,
        )
    }
    deep = [(True, True)] if size.n_chunks == 1 else list(itertools.product((True, False), repeat=2))
    return [_Policy(ahead, patience, *flags) for ahead, patience, flags in itertools.product(aheads, _PATIENCE, deep)]


def _annealed(work: PipelineWork, schedule: Schedule, seconds: float) -> tuple[float, Schedule]:
    orders = _numbers(schedule)
    n_moves = min(_MOST_MOVES, _ANNEALED_PASSES // sum(map(len, schedule.passes)))
    # At first, a move may cost a part of the seconds of one micro-batch.
    temperature_s = 0.02 * seconds / work.size.n_micro_batches
    n = work.size.n_micro_batches
    seconds = improve_orders(work.arrays(), n, orders, n_moves, _AS_FAST * bound_s(work), temperature_s)
    flat = np.array([one for one in orders.flat if one >= 0])
    return seconds, Schedule("zb", work.size, passes_of(flat, work.size))


def _numbers(schedule: Schedule) -> Ints:
    """[p, passes] for `order_seconds`."""
    n_chunks = len(schedule.size.stage_of)
    orders = np.full((len(schedule.passes), max(map(len, schedule.passes))), -1)
    for k, passes in enumerate(schedule.passes):
        orders[k, : len(passes)] = [KINDS.index(one.kind) * n_chunks + one.chunk for one in passes]
    return orders


def seconds_of(work: PipelineWork, schedule: Schedule) -> float:
    """When the last stage ends; infinity if a stage exceeds its budget. Transfers do not wait for each other."""
    return order_seconds(work.arrays(), work.size.n_micro_batches, _numbers(schedule))


def peak_bytes(work: PipelineWork, schedule: Schedule) -> list[float]:
    peaks = []
    for passes in schedule.passes:
        now = peak = 0.0
        for one in passes:
            until_backward, until_weights, after_backward = work.chunks[one.chunk].kept
            now += {"forward": until_backward + until_weights, "backward": after_backward, "weights": 0.0}[one.kind]
            peak = max(peak, now)
            now -= {"forward": 0.0, "backward": until_backward, "weights": until_weights + after_backward}[one.kind]
        peaks.append(peak)
    return peaks


def bound_s(work: PipelineWork) -> float:
    """No order of the passes is faster. For each stage, whose passes begin after the way to its first chunk:

    - it runs all its passes, and no other than forward passes until the first micro-batch comes back;
    - after the forward passes of chunk c and of its chunks before c, the last micro-batch goes on to the last chunk and
      back to the first one, and each stage on the way back ends with a weights pass;
    - after these forward passes and all backward passes of chunk c and later, the last one goes back in the same way;
    - a micro-batch stays in chunk c for the way to the end and back: with bytes for m of them, n need n / m rounds;
    - a micro-batch needs bytes for some seconds, of which the stage has its budget times all seconds.
    """
    n, last = work.size.n_micro_batches, len(work.chunks) - 1
    forward, backward, weights = (np.array([one.seconds[kind] for one in work.chunks]) for kind in range(3))
    there, back = (np.array([one.sends_s[kind] for one in work.chunks]) for kind in range(2))

    reached_s = [float(forward[:c].sum() + there[:c].sum()) for c in range(last + 1)]
    # From the end of a forward pass to the begin of the backward pass, and from the end of that to the end of all.
    beyond_s = [float((forward + backward + back)[c + 1 :].sum() + there[c:last].sum()) for c in range(last + 1)]
    after_s = [float(weights[0])]
    for c in range(1, last + 1):
        after_s.append(max(float(weights[c]), float(back[c] + backward[c - 1]) + after_s[c - 1]))

    bounds: list[float] = []
    for k, budget in enumerate(work.budgets):
        own = work.size.chunks_of(k)
        start_s, deepest = reached_s[own[0]], own[-1]
        first_back_s = reached_s[deepest] + float(forward[deepest]) + beyond_s[deepest]
        forward_s = max(start_s + n * float(forward[own].sum()), first_back_s)
        bounds.append(forward_s + n * float(backward[own].sum() + weights[own].sum()))
        byte_seconds = 0.0
        for i, c in enumerate(own):
            round_s = float(forward[c] + backward[c]) + beyond_s[c]
            until_c_s = n * float(forward[own[: i + 1]].sum())
            bounds.append(start_s + until_c_s + beyond_s[c] + float(backward[c]) + after_s[c])
            bounds.append(forward_s + n * float(backward[own[i:]].sum()) + after_s[c])

            until_backward, until_weights, after_backward = work.chunks[c].kept
            each, most = until_backward + until_weights, budget * _ROUNDING
            if n * each > most:
                n_at_once = max(1, int(most / each))
                bounds.append(reached_s[c] + -(-n // n_at_once) * round_s + after_s[c])
            byte_seconds += until_backward * round_s + until_weights * (round_s + float(weights[c]))
            byte_seconds += after_backward * float(backward[c] + weights[c])
        bounds.append(start_s + n * byte_seconds / budget if budget else 0.0)
    return max(bounds)
