"""The loops of the stage DP, compiled by numba: costs of stages in, the least over all pipelines and how out."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: In `how`: this device stays idle.
IDLE = -1


@njit(cache=True)
def least_stages(
    values: Floats, step: Floats, fixed: Floats, in_flight: Floats, memory: Floats, live: Floats, groups: Ints,
    n_groups: int, tau: float, sigma: float,
) -> tuple[Floats, Ints]:  # fmt: skip
    """best[l, i, j, g]: least of `values[i, j, m]` over the candidates m of group g, and `which` m that is.

    Candidates with values > tau, step > sigma, or fixed + live[l] * in_flight > memory are left out.
    """
    n_layers = values.shape[0]
    best = np.full((len(live), n_layers, n_layers, n_groups), np.inf)
    which = np.zeros(best.shape, np.int64)
    for i in range(n_layers):
        for j in range(i, n_layers):
            for m in range(values.shape[2]):
                value = values[i, j, m]
                if not (value <= tau and step[i, j, m] <= sigma) or value == np.inf:
                    continue
                for k in range(len(live)):
                    need = fixed[i, j, m] + live[k] * in_flight[i, j, m]
                    if need <= memory[m] and value < best[k, i, j, groups[m]]:
                        best[k, i, j, groups[m]] = value
                        which[k, i, j, groups[m]] = m
    return best, which


@njit(cache=True)
def fill_tables(
    best: Floats, live_of: Ints, counts: Ints, may_start: Bools, skip_to: Ints, transfer: Floats, idle: bool,
    maximum: bool,
) -> tuple[Floats, Ints]:  # fmt: skip
    """f[s, i, p] of the stage DP, and how it is reached: j * n_groups + g, or IDLE.

    live_of[s]: entry of `best` for a stage with s stages from itself to the end. transfer[j, p]: from layer j to a
    stage that starts at device p, which counts for that stage. skip_to[p]: where to go on if
    device p stays idle. maximum: combine stages by their largest, without transfers.
    """
    n_layers, n_groups = best.shape[1], best.shape[3]
    n_stages, n_devices = len(live_of) - 1, may_start.shape[1]
    f = np.full((n_stages + 1, n_layers + 1, n_devices + 1), np.inf)
    how = np.full(f.shape, IDLE, np.int64)
    f[0, n_layers, n_devices] = 0.0
    if idle:
        f[0, n_layers, :] = 0.0
    for s in range(1, n_stages + 1):
        of_live = best[live_of[s]]
        for i in range(n_layers):
            for p in range(n_devices - 1, -1, -1):
                least, at = np.inf, IDLE
                for g in range(n_groups):
                    end = p + counts[g]
                    if end > n_devices or not may_start[g, p]:
                        continue
                    for j in range(i, n_layers):
                        value, rest = of_live[i, j, g], f[s - 1, j + 1, end]
                        if value == np.inf or rest == np.inf:
                            continue
                        total = max(value, rest) if maximum else value + rest
                        if total < least:
                            least, at = total, j * n_groups + g
                if i > 0 and not maximum:
                    least += transfer[i - 1, p]
                if idle and f[s, i, skip_to[p]] <= least:
                    least, at = f[s, i, skip_to[p]], IDLE
                f[s, i, p], how[s, i, p] = least, at
    return f, how
