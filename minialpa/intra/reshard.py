"""Resharding: from two specs of one array to the collectives, and the seconds, that changing one into the other takes.

Axes that appear are cut locally (free), axes that move from one dimension to another are all-to-alls, axes that
disappear are all-gathers. Cuts come first and gathers last, so that every collective moves the fewest bytes.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.cost import Collective
from minialpa.options import AutoShardingOption
from minialpa.sharding import Spec


def reshard_steps(src: Spec, dst: Spec, n_bytes: float, mesh: LogicalMesh) -> tuple[Collective, ...]:
    """Collectives that turn `src` into `dst` for an array of `n_bytes` in all."""
    if src == dst:
        return ()
    from_dim = {axis: d for d, axes in enumerate(src.dims) for axis in axes}
    to_dim = {axis: d for d, axes in enumerate(dst.dims) for axis in axes}
    moved = [axis for axis in from_dim if axis in to_dim and from_dim[axis] != to_dim[axis]]
    gathered = [axis for axis in from_dim if axis not in to_dim]
    for before, after in zip(src.dims, dst.dims, strict=True):
        kept = [axis for axis in before if axis not in moved and axis not in gathered]
        if kept != list(after[: len(kept)]):
            gathered += kept  # the order of axes changes, or an outer one comes in: gather and cut again
        elif len(kept) < len(before) and kept and before[: len(kept)] != tuple(kept):
            gathered += kept  # an outer axis leaves from under an inner one
    cut = [axis for axis in to_dim if axis not in from_dim]
    local = n_bytes / math.prod(mesh.shape[axis] for axis in (*from_dim, *cut))
    steps = [Collective("all-to-all", local, (axis,)) for axis in moved]
    if gathered:
        full = local * math.prod(mesh.shape[axis] for axis in gathered)
        steps.append(Collective("all-gather", full, tuple(sorted(gathered))))
    return tuple(steps)


@functools.lru_cache(maxsize=1 << 18)
def reshard_s(src: Spec, dst: Spec, n_bytes: float, mesh: LogicalMesh, option: AutoShardingOption) -> float:
    """Seconds to turn `src` into `dst` for an array of `n_bytes` in all; inf where the options forbid the way."""
    seconds = 0.0
    for step in reshard_steps(src, dst, n_bytes, mesh):
        if step.kind == "all-gather" and not option.allow_all_gather:
            return float("inf")
        if step.kind == "all-to-all" and not option.allow_all_to_all:
            return float("inf")
        seconds += step.seconds(mesh)
    return seconds


def reshard_matrix(
    src: tuple[Spec, ...], dst: tuple[Spec, ...], n_bytes: float, mesh: LogicalMesh, option: AutoShardingOption
) -> NDArray[np.float64]:
    """`reshard_s` for every pair, shape [len(src), len(dst)]."""
    rows, row_of = _distinct(src)
    columns, column_of = _distinct(dst)
    table = np.array([[reshard_s(a, b, n_bytes, mesh, option) for b in columns] for a in rows])
    return table[np.ix_(row_of, column_of)]


def _distinct(specs: tuple[Spec, ...]) -> tuple[list[Spec], list[int]]:
    numbers: dict[Spec, int] = {}
    places = [numbers.setdefault(spec, len(numbers)) for spec in specs]
    return list(numbers), places
