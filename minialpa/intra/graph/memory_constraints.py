"""The variables in memory over time (`Usage`) in; the usage terms of a cost graph (`terms_of`) out.

    at every time t:   sum_{d live at t} bytes_d[s_node(d)] <= limit

A `Demand` d is a usage with the node that decides its sharding. Example: a float32[1024] on 4 devices takes 4096 bytes
per device under a replicated strategy, and 1024 bytes under a strategy that splits it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import Var
from numpy.typing import NDArray

from minialpa.errors import InfeasibleError
from minialpa.intra.graph.decisions import Choice
from minialpa.intra.solver.cost_graph import NodeUsage
from minialpa.ir.equations import device_bytes_of, dtype_name, shape_of
from minialpa.sharding import Spec
from minialpa.support.identity import ById
from minialpa.support.sizes import bytes_text

#: Demands below this fraction of the limit count at their largest and for the whole time, which keeps the terms few.
_TINY = 1e-4
_N_LISTED = 5


@dataclass(frozen=True, slots=True)
class Usage:
    """`n_copies` of `var` are in memory at the times start, ..., end - 1.

    copy_of: a variable that has these bytes already, with all copies stacked, if the shardings are equal.
    reader: the first result of an equation; `var` is in memory in the spec in which this equation reads it.
    if_gathered: whether the usage counts only for values in fewer shards than possible, as after an all-gather.
    """

    var: Var
    n_copies: int
    start: int
    end: int
    copy_of: Var | None = None
    reader: Var | None = None
    if_gathered: bool = False


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes per device. usages: without parameters and optimizer state."""

    limit_bytes: float
    usages: tuple[Usage, ...] = ()
    name_of: Callable[[Var], str] = lambda _: ""

    @property
    def n_times(self) -> int:
        return max((usage.end for usage in self.usages), default=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Bytes per device of a variable at the times start, ..., end - 1.

    n_bytes: [strategy of `node`], which decides the sharding; one entry without a node.
    """

    var: Var
    node: int | None
    n_bytes: NDArray[np.float64]
    start: int
    end: int


def demands_of(
    usages: Iterable[Usage],
    choices: Mapping[Var, Choice],
    mesh_shape: tuple[int, ...],
    as_read: Callable[[Var, Var], Choice | None] = lambda var, reader: None,
) -> list[Demand]:
    """as_read: the spec choice for `Usage.reader`."""
    shards_by_specs: dict[ById[tuple[Spec, ...]], NDArray[np.int64]] = {}
    demands = []

    for usage in usages:
        choice = choices.get(usage.var) if usage.reader is None else as_read(usage.var, usage.reader)
        if choice is None:
            continue
        specs = ById(choice.specs)
        n_shards = shards_by_specs.get(specs)
        if n_shards is None:
            n_shards = shards_by_specs[specs] = np.array([spec.n_shards(mesh_shape) for spec in choice.specs])
        n_bytes = usage.n_copies * device_bytes_of(usage.var) / n_shards
        if usage.copy_of is not None:
            n_bytes = n_bytes * _differing_specs(choice, choices.get(usage.copy_of))
        if usage.if_gathered:
            n_bytes = n_bytes * (n_shards < max(spec.n_shards(mesh_shape) for spec in choices[usage.var].specs))
        demands.append(Demand(var=usage.var, node=choice.node, n_bytes=n_bytes, start=usage.start, end=usage.end))

    return demands


def _differing_specs(copy: Choice, source: Choice | None) -> NDArray[np.bool_]:
    """The specs of a copy that neither the source nor a slice of it can have."""
    specs = source.specs if source else ()
    same = {*specs, *(Spec(spec.dims[1:], spec.partial) for spec in specs if spec.dims and not spec.dims[0])}
    return np.array([spec not in same for spec in copy.specs])


def terms_of(demands: Sequence[Demand], limit_bytes: float, n_times: int) -> tuple[NodeUsage, ...]:
    """`demands` in whole bytes, one per node and interval; empty if all fit at their largest."""
    if _peak(demands, _most_bytes, n_times)[0] <= limit_bytes:
        return ()

    large: list[Demand] = []
    tiny: list[Demand] = []
    for demand in demands:
        is_large = demand.node is not None and _most_bytes(demand) > _TINY * limit_bytes
        (large if is_large else tiny).append(demand)
    rest = _peak(tiny, _most_bytes, n_times)[0]

    by_node: dict[tuple[int, int, int], NDArray[np.float64]] = {}
    for demand in large:
        assert demand.node is not None
        key = (demand.node, demand.start, demand.end)
        by_node[key] = by_node[key] + demand.n_bytes if key in by_node else demand.n_bytes
    # Rounded up: arrays of elements below a byte may end inside a byte.
    terms = [(node, (start, end), np.ceil(n_bytes).astype(np.int64)) for (node, start, end), n_bytes in by_node.items()]

    # A term needs a node; any will do, as the rest is equal under all strategies.
    if large and rest:
        terms.append((terms[0][0], (0, n_times), np.full(len(terms[0][2]), math.ceil(rest))))
    return tuple(terms)


def check_least(demands: Sequence[Demand], limit: MemoryLimit, allowed: Callable[[Demand], NDArray[np.bool_]]) -> None:
    """Raise InfeasibleError, with the largest tensors, if the smallest allowed demands exceed the limit."""

    def least(demand: Demand) -> float:
        return float(demand.n_bytes[allowed(demand)].min(initial=demand.n_bytes.max()))

    n_bytes, peak_time = _peak(demands, least, limit.n_times)
    if n_bytes <= limit.limit_bytes:
        return

    sizes: dict[Var, float] = {}
    for demand in demands:
        if demand.start <= peak_time < demand.end:
            sizes[demand.var] = sizes.get(demand.var, 0.0) + least(demand)
    largest = sorted(sizes, key=lambda var: -sizes[var])[:_N_LISTED]
    listed = "".join(
        f"\n  {limit.name_of(var)} {dtype_name(var)}{list(shape_of(var))}: {bytes_text(sizes[var])} per device"
        for var in largest
    )

    raise InfeasibleError(
        f"The step needs at least {bytes_text(n_bytes)} per device, {bytes_text(n_bytes - limit.limit_bytes)} above "
        f"the limit of {bytes_text(limit.limit_bytes)}. Use more devices or micro-batches, or raise "
        f"`memory_limit_bytes`. The largest arrays, split as far as possible:{listed}"
    )


def _most_bytes(demand: Demand) -> float:
    return float(demand.n_bytes.max())


def _peak(demands: Sequence[Demand], size: Callable[[Demand], float], n_times: int) -> tuple[float, int]:
    """Also the first time of the peak."""
    change = np.zeros(n_times + 1)
    for demand in demands:
        n_bytes = size(demand)
        change[demand.start] += n_bytes
        change[demand.end] -= n_bytes

    total = np.cumsum(change[:-1])
    if not len(total):
        return 0.0, 0
    peak_time = int(total.argmax())
    return float(total[peak_time]), peak_time
