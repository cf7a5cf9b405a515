"""Orders of pipeline passes on numbers, as machine code: a list scheduler, the seconds of an order, a local search.

A pass is the number kind * C + c, of kind 0 (forward), 1 (backward) or 2 (weights) and of chunk c of C. Each stage runs
the micro-batches of a kind and chunk in order, so a pass needs no micro-batch. `Arrays` has the seconds and bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minialpa.support.loops import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Arrays(NamedTuple):
    """The passes of a pipeline.

    stage_of: [C] the stage of each chunk.
    seconds: [3, C] of a pass.
    kept: [3, C] bytes of a micro-batch from forward to backward, from forward to weights, from backward to weights.
    sends_s: [2, C] seconds from a forward pass to the next chunk, and from a backward pass to the chunk before.
    budget: [p] bytes of each stage, with an allowance for rounding.
    """

    stage_of: Ints
    seconds: Floats
    kept: Floats
    sends_s: Floats
    budget: Floats


class _State(NamedTuple):
    """A pipeline after some passes.

    n_run: [3, C] micro-batches that have run.
    arrive_s: [3, C, n] when the operands of each pass arrive; infinity until that is known.
    free_s: [p] when each stage is free.
    n_bytes: [p] of the stage for its micro-batches.
    """

    n_run: Ints
    arrive_s: Floats
    free_s: Floats
    n_bytes: Floats


@compiled
def _begin(n_chunks: int, n_stages: int, n: int) -> _State:
    arrive_s = np.full((3, n_chunks, n), np.inf)
    arrive_s[0, 0, :] = 0.0
    return _State(np.zeros((3, n_chunks), np.int64), arrive_s, np.zeros(n_stages), np.zeros(n_stages))


@compiled
def _run(work: Arrays, state: _State, kind: int, c: int) -> None:
    """Runs the next micro-batch of a kind and chunk as soon as its stage is free and its operands have arrived."""
    k, b, kept = work.stage_of[c], state.n_run[kind, c], work.kept
    end_s = max(state.free_s[k], state.arrive_s[kind, c, b]) + work.seconds[kind, c]
    state.free_s[k] = end_s
    state.n_run[kind, c] += 1
    if kind == 0:
        state.n_bytes[k] += kept[0, c] + kept[1, c]
        if c + 1 < len(work.stage_of):
            state.arrive_s[0, c + 1, b] = end_s + work.sends_s[0, c]
        else:
            state.arrive_s[1, c, b] = end_s
    elif kind == 1:
        state.n_bytes[k] += kept[2, c] - kept[0, c]
        state.arrive_s[2, c, b] = end_s
        if c > 0:
            state.arrive_s[1, c - 1, b] = end_s + work.sends_s[1, c]
    else:
        state.n_bytes[k] -= kept[1, c] + kept[2, c]


@compiled
def _ready_s(work: Arrays, state: _State, ahead: Ints, kind: int, c: int) -> float:
    """When the next pass of a kind and chunk can start; infinity if that is unknown, or if it does not fit."""
    k, b, kept = work.stage_of[c], state.n_run[kind, c], work.kept
    if b == state.arrive_s.shape[2]:
        return np.inf
    needed = kept[2, c] if kind == 1 else 0.0
    if kind == 0:
        # Of the first chunk of a stage, only some micro-batches are in flight.
        is_first = True
        for earlier in range(c):
            is_first = is_first and work.stage_of[earlier] != k
        if is_first and b - state.n_run[1, c] >= ahead[k]:
            return np.inf
        # Later chunks of the stage have bytes for one micro-batch, so that it can always go on.
        for later in range(c, len(work.stage_of)):
            if work.stage_of[later] == k:
                needed += kept[0, later] + kept[1, later] + kept[2, later]
    return state.arrive_s[kind, c, b] if state.n_bytes[k] + needed <= work.budget[k] else np.inf


@compiled
def _next_pass(
    work: Arrays, state: _State, ahead: Ints, patience: float, deep_forward: bool, deep_backward: bool, k: int
) -> tuple[int, int]:
    """The kind and chunk of the next pass of stage k."""
    n_chunks = len(work.stage_of)
    oldest, weights_s = -1, np.inf
    for c in range(n_chunks):
        if work.stage_of[c] == k and (oldest < 0 or state.n_run[2, c] <= state.n_run[2, oldest]):
            ready_s = _ready_s(work, state, ahead, 2, c)
            if ready_s < np.inf:
                oldest, weights_s = c, max(state.free_s[k], ready_s)

    # Of the passes for which other stages wait, the first that can start; of several, a backward pass.
    kind, chunk, start_s = 2, oldest, np.inf
    for candidate in (1, 0):
        deep = deep_backward if candidate == 1 else deep_forward
        for j in range(n_chunks):
            c = n_chunks - 1 - j if deep else j
            if work.stage_of[c] == k:
                at_s = max(state.free_s[k], _ready_s(work, state, ahead, candidate, c))
                if at_s < start_s:
                    kind, chunk, start_s = candidate, c, at_s

    # Or a weights pass, if the stage would wait long.
    if oldest >= 0 and start_s > weights_s and start_s - weights_s >= patience * work.seconds[2, oldest]:
        return 2, oldest
    return kind, chunk


@compiled
def list_order(
    work: Arrays, n: int, ahead: Ints, patience: float, deep_forward: bool, deep_backward: bool, order: Ints
) -> float:
    """Fills `order` with all 3 n C passes of n micro-batches; the seconds, or infinity if the budgets stop all stages.

    ahead: the most micro-batches of a stage between the forward and the backward pass of its first chunk.
    patience: the part of the seconds of a weights pass for which a stage waits rather than run one.
    deep_forward, deep_backward: of ready passes of a kind, whether the last chunk goes first.
    """
    n_chunks, n_stages = len(work.stage_of), len(work.budget)
    state = _begin(n_chunks, n_stages, n)
    next_s = np.full(n_stages, np.inf)
    next_s[0] = 0.0
    for i in range(len(order)):
        k = 0
        for stage in range(n_stages):
            if next_s[stage] < next_s[k]:
                k = stage
        if next_s[k] == np.inf:
            return np.inf
        kind, chunk = _next_pass(work, state, ahead, patience, deep_forward, deep_backward, k)
        order[i] = kind * n_chunks + chunk
        _run(work, state, kind, chunk)

        # This stage and the receiver of its results can run a pass next.
        receiver = min(n_chunks - 1, chunk + 1) if kind == 0 else max(0, chunk - 1)
        for stage in (k, work.stage_of[receiver]):
            ready_s = np.inf
            for c in range(n_chunks):
                if work.stage_of[c] == stage:
                    for any_kind in range(3):
                        ready_s = min(ready_s, _ready_s(work, state, ahead, any_kind, c))
            next_s[stage] = max(state.free_s[stage], ready_s)
    return _end_s(state)


@compiled
def order_seconds(work: Arrays, n: int, orders: Ints) -> float:
    """When the last stage ends; infinity if an order exceeds a budget, or stages wait for each other in a circle.

    orders: [p, passes] the passes of each stage, then -1.
    """
    n_chunks, n_stages, kept = len(work.stage_of), len(work.budget), work.kept
    state = _begin(n_chunks, n_stages, n)
    position = np.zeros(n_stages, np.int64)
    n_done, n_before = 0, -1
    while n_done > n_before:
        n_before = n_done
        for k in range(n_stages):
            while position[k] < orders.shape[1] and orders[k, position[k]] >= 0:
                kind, c = orders[k, position[k]] // n_chunks, orders[k, position[k]] % n_chunks
                if state.arrive_s[kind, c, state.n_run[kind, c]] == np.inf:
                    break
                more = kept[0, c] + kept[1, c] if kind == 0 else kept[2, c] if kind == 1 else 0.0
                if state.n_bytes[k] + more > work.budget[k]:
                    return np.inf
                _run(work, state, kind, c)
                position[k] += 1
                n_done += 1
    return _end_s(state) if n_done == 3 * n * n_chunks else np.inf


@compiled
def _end_s(state: _State) -> float:
    most_s = 0.0
    for free_s in state.free_s:
        most_s = max(most_s, free_s)
    return most_s


@compiled
def improve_orders(work: Arrays, n: int, orders: Ints, n_moves: int, bound_s: float, temperature_s: float) -> float:
    """Simulated annealing: passes move by up to three places. Leaves the fastest orders in `orders`; their seconds.

    temperature_s: at the first move, and then less, down to 0. A move that costs this much is accepted with
        probability 1/e.
    """
    current, now_s = orders.copy(), order_seconds(work, n, orders)
    best_s = now_s
    np.random.seed(0)
    for move in range(n_moves):
        if best_s <= bound_s:
            break
        k, length = np.random.randint(len(current)), current.shape[1]
        while current[k, length - 1] < 0:
            length -= 1
        i = np.random.randint(length)
        j = i + np.random.randint(-3, 4)
        if not 0 <= j < length or current[k, i] == current[k, j]:
            continue

        step = 1 if j > i else -1
        moved = current[k, i]
        for at in range(i, j, step):
            current[k, at] = current[k, at + step]
        current[k, j] = moved

        then_s = order_seconds(work, n, current)
        left = temperature_s * (1.0 - move / n_moves) + 1e-300
        if then_s <= now_s or np.random.random() < np.exp((now_s - then_s) / left):
            now_s = then_s
            if then_s < best_s:
                best_s = then_s
                orders[:] = current
            continue
        for at in range(j, i, -step):
            current[k, at] = current[k, at - step]
        current[k, i] = moved
    return best_s
