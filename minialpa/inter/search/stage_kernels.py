"""The loops of the stage DP, compiled by numba. `stage_dp` defines the letters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minialpa.support.loops import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Entry of `how` for a device that stays idle.
IDLE = -1


@compiled
def of_runs(per_layer: Floats, sums: bool) -> Floats:
    """[m, i, j] = the sum of per_layer[i..j, m], or the largest; 0 below the diagonal."""
    n_layers, n_columns = per_layer.shape
    out = np.zeros((n_columns, n_layers, n_layers))
    for m in range(n_columns):
        for i in range(n_layers):
            so_far = 0.0 if sums else -np.inf
            for j in range(i, n_layers):
                so_far = so_far + per_layer[j, m] if sums else max(so_far, per_layer[j, m])
                out[m, i, j] = so_far
    return out


@compiled
def most_live(fixed: Floats, in_flight: Floats, memory: Floats, live: Floats) -> Ints:
    """[m, i, j]: the last index of `live` (ascending) with fixed + live * in_flight <= memory[m], or -1."""
    n_layers = fixed.shape[1]
    most = np.full(fixed.shape, -1, np.int64)
    for m in range(fixed.shape[0]):
        for i in range(n_layers):
            for j in range(i, n_layers):
                k = len(live)
                while k > 0 and not fixed[m, i, j] + live[k - 1] * in_flight[m, i, j] <= memory[m]:
                    k -= 1
                most[m, i, j] = k - 1
    return most


@compiled
def least_stages(
    values: Floats, step: Floats, most: Ints, used: Ints, n_live: int, groups: Ints, n_groups: int,
    tau: float, sigma: float,
) -> Floats:  # fmt: skip
    """best[l, i, g, j]: least `values[m, i, j]` over the candidates m of group g that fit with live[l] micro-batches.

    Candidates are `used`, with values <= tau and step <= sigma.
    """
    n_layers = values.shape[1]
    best = np.full((n_live, n_layers, n_groups, n_layers), np.inf)
    for m in used:
        g = groups[m]
        for i in range(n_layers):
            for j in range(i, n_layers):
                value, k = values[m, i, j], most[m, i, j]
                fits = value <= tau and k >= 0 and step[m, i, j] <= sigma
                if fits and value < best[k, i, g, j]:
                    best[k, i, g, j] = value

    for k in range(n_live - 2, -1, -1):
        best[k] = np.minimum(best[k], best[k + 1])
    return best


@compiled
def _put_in_front(
    value: float, rest: Floats, n: int, may_start: Bools, code: int, total: Floats, at: Ints, maximum: bool
) -> None:
    """For each start p, put a stage of `n` devices before `rest` if that lowers `total[p]`; then `at[p]` is `code`."""
    for p in range(len(total) - n):
        x = max(value, rest[p + n]) if maximum else value + rest[p + n]
        if x < total[p] and may_start[p]:
            total[p], at[p] = x, code


@compiled
def _fill_row(
    total: Floats, at: Ints, border: Floats, skip_to: Ints, idle: bool, cap: float, f: Floats, how: Ints
) -> bool:  # fmt: skip
    """Fill `f[p]` and `how[p]` for all starts p of a first stage. Returns whether a value is finite.

    total, at: from `_put_in_front`. border: [p], the transfer to a stage that starts at p.
    """
    reached_any = False
    # Last device first: an idle device has the value of a later one.
    for p in range(len(border) - 1, -1, -1):
        least, reached = total[p] + border[p], at[p]
        if idle and f[skip_to[p]] <= least:
            least, reached = f[skip_to[p]], IDLE
        if least <= cap and least < np.inf:
            f[p], how[p] = least, reached
            reached_any = True
    return reached_any


@compiled
def fill_tables(
    best: Floats, live_of: Ints, counts: Ints, may_start: Bools, skip_to: Ints, transfer: Floats, idle: bool,
    maximum: bool, cap: float,
) -> tuple[Floats, Ints]:  # fmt: skip
    """f[s, i, p] of the stage DP, and its argmin `how`: j * n_groups + g, or IDLE.

    best: see `least_stages`.
    live_of: [s], the index l in `best` for the s-th stage from the end.
    counts, may_start: [g] and [g, p], of each group.
    skip_to: [p], the next device if device p stays idle, which `idle` allows.
    transfer: [j, p], seconds from layer j to a stage that starts at device p.
    maximum: take the largest value of the stages, without transfers, instead of the sum.
    cap: larger values count as infinite.
    """
    n_layers, n_groups = best.shape[1], best.shape[2]
    n_stages, n_devices = len(live_of) - 1, may_start.shape[1]

    # Zero stages take zero layers, on no devices or on idle devices.
    f = np.full((n_stages + 1, n_layers + 1, n_devices + 1), np.inf)
    how = np.full(f.shape, IDLE, np.int64)
    f[0, n_layers, n_devices] = 0.0
    if idle:
        f[0, n_layers, :] = 0.0

    total, at, no_transfer = np.empty(n_devices + 1), np.empty(n_devices + 1, np.int64), np.zeros(n_devices)
    reached_any = np.zeros((n_stages + 1, n_layers + 1), np.bool_)
    reached_any[0, n_layers] = True
    for s in range(1, n_stages + 1):
        k = live_of[s]
        for i in range(n_layers - s + 1):  # s stages have that many layers
            total[:], at[:] = np.inf, IDLE
            for g in range(n_groups):
                n = counts[g]
                for j in range(i, n_layers - s + 1):
                    value = best[k, i, g, j]
                    if reached_any[s - 1, j + 1] and value <= cap and value < np.inf:
                        _put_in_front(value, f[s - 1, j + 1], n, may_start[g], j * n_groups + g, total, at, maximum)

            border = transfer[i - 1] if i > 0 and not maximum else no_transfer
            reached_any[s, i] = _fill_row(total, at, border, skip_to, idle, cap, f[s, i], how[s, i])
        if not reached_any[s].any():
            break
    return f, how
