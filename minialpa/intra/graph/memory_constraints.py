"""The memory limit of a cost graph: what uses memory and when, and how many bytes it is under each strategy.

    at every time t:   sum_{d live at t} bytes_d[s_node(d)] <= limit

A `Usage` is of a variable; a `Demand` knows the node that decides on its sharding. What is tiny is counted at its
largest, once for the whole time, to keep the number of terms small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import Var
from numpy.typing import NDArray

from minialpa.errors import InfeasibleError
from minialpa.tracing.jaxprs import dtype_name, shape_of

#: Demands below this fraction of the limit are counted at their largest.
_TINY = 1e-4
Term = tuple[int, tuple[int, int], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Usage:
    """`n_copies` of `var` are in memory at the times start, ..., end - 1."""

    var: Var
    n_copies: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes per device; what uses them besides parameters and state; names of variables, for messages."""

    limit_bytes: float
    usages: tuple[Usage, ...] = ()
    name_of: Callable[[Var], str] = lambda _: ""

    @property
    def n_times(self) -> int:
        return max((usage.end for usage in self.usages), default=1)


@dataclass(frozen=True, slots=True)
class Demand:
    """`n_bytes[s]` at the times start, ..., end - 1 under strategy s of `node`; None has the one strategy."""

    var: Var
    node: int | None
    n_bytes: NDArray[np.float64]
    start: int
    end: int


def terms_of(demands: Sequence[Demand], limit_bytes: float, n_times: int) -> tuple[Term, ...]:
    """Usage terms of `demands`, those of one node and time as one. None where even the largest of all fit together."""
    if _peak(demands, lambda d: float(d.n_bytes.max()), n_times)[0] <= limit_bytes:
        return ()
    large = [d for d in demands if d.node is not None and d.n_bytes.max() > _TINY * limit_bytes]
    chosen = {id(d) for d in large}
    rest = _peak([d for d in demands if id(d) not in chosen], lambda d: float(d.n_bytes.max()), n_times)[0]
    terms: dict[tuple[int, int, int], NDArray[np.float64]] = {}
    for d in large:
        assert d.node is not None
        key = (d.node, d.start, d.end)
        terms[key] = terms[key] + d.n_bytes if key in terms else d.n_bytes
    out = [(node, (start, end), n_bytes) for (node, start, end), n_bytes in terms.items()]
    if large and rest:
        out.append((out[0][0], (0, n_times), np.full(len(out[0][2]), rest)))
    return tuple(out)


def check_least(demands: Sequence[Demand], limit: MemoryLimit, allowed: Callable[[Demand], NDArray[np.bool_]]) -> None:
    """Raise InfeasibleError, with the largest tensors, if each demand at its smallest is too much together.

    `allowed` are the strategies of a demand that a solution may take.
    """

    def least(d: Demand) -> float:
        return float(d.n_bytes[allowed(d)].min(initial=d.n_bytes.max()))

    n_bytes, at = _peak(demands, least, limit.n_times)
    if n_bytes <= limit.limit_bytes:
        return
    sizes: dict[Var, float] = {}
    for d in demands:
        if d.start <= at < d.end:
            sizes[d.var] = sizes.get(d.var, 0.0) + least(d)
    largest = sorted(sizes, key=lambda v: -sizes[v])[:5]
    listed = "".join(
        f"\n  {limit.name_of(v)} {dtype_name(v)}{list(shape_of(v))}: {sizes[v]:,.0f} bytes per device" for v in largest
    )
    raise InfeasibleError(
        f"It needs at least {n_bytes:,.0f} bytes per device and the limit is {limit.limit_bytes:,.0f}. Allow more "
        "devices or micro-batches, or raise `memory_limit_bytes`. The largest tensors, each as small as it gets:"
        f"{listed}"
    )


def _peak(demands: Sequence[Demand], size: Callable[[Demand], float], n_times: int) -> tuple[float, int]:
    """Most bytes at any time, and the first such time."""
    change = np.zeros(n_times + 1)
    for d in demands:
        n_bytes = size(d)
        change[d.start] += n_bytes
        change[d.end] -= n_bytes
    total = np.cumsum(change[:-1])
    at = int(total.argmax()) if len(total) else 0
    return (float(total[at]) if len(total) else 0.0), at
