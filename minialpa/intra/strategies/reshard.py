"""Resharding: from two specs of one array to the cheapest chain of steps between them, and its seconds.

A step is what devices can do with their shards: cut a dimension or drop all but one copy of a value (free), all-gather,
all-reduce, reduce-scatter, all-to-all. Specs are the nodes of a graph and steps its edges; with one or two mesh axes
there are some dozens of specs, so all shortest paths of an array are one small table (Floyd-Warshall).

In: shape and bytes of an array, a mesh. Out: `Resharding`, its table; and the steps, which both the prices and the
program come from.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.cost import Collective, CollectiveKind
from minialpa.errors import ShardingError
from minialpa.rules.factors import Reduction
from minialpa.sharding import Spec, specs_of

StepKind = Literal["cut", "mask", "all-gather", "all-reduce", "reduce-scatter", "all-to-all"]
#: Of ways that cost the same, the one with fewer steps; and a sum is not left pending without a reason.
_STEP_S, _MASK_S = 1e-13, 1e-12


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on the shards of an array, from spec `src` to spec `dst`, along mesh `axes`.

    dim: the dimension that is cut, gathered, scattered to, or which an all-to-all splits. source: the dimension that an
    all-to-all puts together again. reduction: of an all-reduce; all others sum.
    """

    kind: StepKind
    axes: tuple[int, ...]
    src: Spec
    dst: Spec
    dim: int = 0
    source: int = 0
    reduction: Reduction = "sum"

    def collective(self, n_bytes: float, mesh_shape: tuple[int, ...]) -> Collective | None:
        """What is communicated for an array of `n_bytes` in all; None where nothing is."""
        match self.kind:
            case "cut" | "mask":
                return None
            case "all-gather":
                return Collective("all-gather", n_bytes / self.dst.n_shards(mesh_shape), self.axes)
            case _:
                kind: CollectiveKind = self.kind
                return Collective(kind, n_bytes / self.src.n_shards(mesh_shape), self.axes)


def steps_from(src: Spec, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Iterator[Step]:
    """Every step from `src` to another legal spec whose axes stand in ascending order in each dimension."""
    live = tuple(axis for axis, n in enumerate(mesh_shape) if n > 1)
    for axes in (*((axis,) for axis in live), *((live,) if len(live) > 1 else ())):
        if set(axes) <= set(src.partial):
            yield Step("all-reduce", axes, src, Spec(src.dims, _without(src.partial, axes)))
            yield from _onto_dims("reduce-scatter", axes, src, _without(src.partial, axes), shape, mesh_shape)
        if not set(axes) & {*src.axes, *src.partial}:
            yield Step("mask", axes, src, Spec(src.dims, tuple(sorted((*src.partial, *axes)))))
            yield from _onto_dims("cut", axes, src, src.partial, shape, mesh_shape)
        for d, dim in enumerate(src.dims):
            if dim[-len(axes) :] == axes:
                rest = Spec((*src.dims[:d], dim[: -len(axes)], *src.dims[d + 1 :]), src.partial)
                yield Step("all-gather", axes, src, rest, d)
                if len(axes) == 1:
                    moved = _onto_dims("all-to-all", axes, rest, src.partial, shape, mesh_shape)
                    yield from (Step("all-to-all", axes, src, step.dst, step.dim, d) for step in moved if step.dim != d)


def _without(axes: Sequence[int], gone: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in axes if axis not in gone)


def _onto_dims(
    kind: StepKind,
    axes: tuple[int, ...],
    src: Spec,
    partial: tuple[int, ...],
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
) -> Iterator[Step]:
    """Steps after which `axes` split one dimension more, innermost."""
    for d, dim in enumerate(src.dims):
        if dim and dim[-1] > axes[0]:
            continue
        dst = Spec((*src.dims[:d], (*dim, *axes), *src.dims[d + 1 :]), partial)
        if dst.fits(shape, mesh_shape):
            yield Step(kind, axes, src, dst, d)


def partial_specs_of(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Iterator[Spec]:
    """Every legal spec of an array of `shape`, partial sums included."""
    live = [axis for axis, n in enumerate(mesh_shape) if n > 1]
    for spec in specs_of(shape, mesh_shape):
        free = [axis for axis in live if axis not in spec.axes]
        for k in range(len(free) + 1):
            yield from (Spec(spec.dims, partial) for partial in itertools.combinations(free, k))


@dataclass(frozen=True, slots=True, eq=False)
class ReshardTable:
    """All shortest ways between the specs of one array. seconds[i, j]: from spec i to spec j; inf where there is none.

    first[i, j]: number, in `steps`, of the first step of the way.
    """

    number: dict[Spec, int]
    seconds: NDArray[np.float64]
    first: NDArray[np.int64]
    steps: tuple[Step, ...]

    def cost(self, src: Spec, dst: Spec) -> float:
        """Seconds to turn `src` into `dst`; inf where the options forbid every way."""
        return float(self.seconds[self.number[src], self.number[dst]])

    def matrix(self, src: Sequence[Spec], dst: Sequence[Spec]) -> NDArray[np.float64]:
        """`cost` for every pair, shape [len(src), len(dst)]."""
        return self.between(self.numbers(src), self.numbers(dst))

    def numbers(self, specs: Sequence[Spec]) -> NDArray[np.int64]:
        """Numbers of specs, which are the same in all tables with the same `number`."""
        return np.array([self.number[spec] for spec in specs], np.int64)

    def between(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.float64]:
        """`matrix`, by numbers."""
        return self.seconds[src[:, None], dst]

    def way(self, src: Spec, dst: Spec) -> tuple[Step, ...]:
        """The steps that turn `src` into `dst`. Raises ShardingError where there is no way."""
        out: list[Step] = []
        at, end = self.number[src], self.number[dst]
        while at != end:
            if not np.isfinite(self.seconds[at, end]):
                raise ShardingError(f"The options leave no way to reshard `{src}` to `{dst}`.")
            out.append(self.steps[self.first[at, end]])
            at = self.number[out[-1].dst]
        return tuple(out)


def same_divisors(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape for all shapes that can be split over the mesh in the same ways."""
    n = math.prod(mesh_shape)
    return tuple(size if size < 2 else math.gcd(size, n) * (n + 1) for size in shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """What arrays that can be split alike have in common: the numbers of their specs and the steps between them.

    ends[i]: numbers of the specs of step i. bill_of[i]: which of `bills` it pays: its kind, axes, and the shards of the
    value whose shard is communicated.
    """

    number: dict[Spec, int]
    steps: tuple[Step, ...]
    ends: tuple[tuple[int, int], ...]
    bill_of: tuple[int, ...]
    bills: tuple[Step, ...]


@functools.lru_cache(maxsize=1 << 12)
def _steps(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> _Steps:
    number = {spec: i for i, spec in enumerate(partial_specs_of(shape, mesh_shape))}
    steps, ends, bill_of = list[Step](), list[tuple[int, int]](), list[int]()
    bills: dict[object, tuple[int, Step]] = {}
    for i, src in enumerate(number):
        for step in steps_from(src, shape, mesh_shape):
            kept = step.dst if step.kind == "all-gather" else src
            bill = step.kind, step.axes, kept.n_shards(mesh_shape)
            steps.append(step)
            ends.append((i, number[step.dst]))
            bill_of.append(bills.setdefault(bill, (len(bills), step))[0])
    return _Steps(number, tuple(steps), tuple(ends), tuple(bill_of), tuple(step for _, step in bills.values()))


@functools.lru_cache(maxsize=1 << 14)
def reshard_table(
    shape: tuple[int, ...],
    n_bytes: float,
    mesh: LogicalMesh,
    forbidden: tuple[str, ...] = (),
    n_together: int = 1,
    forbidden_s: float = math.inf,
) -> ReshardTable:
    """The table of an array of `shape` and `n_bytes` in all; steps of the `forbidden` kinds are not taken.

    n_together: sums that share the time to start with the sum of this array. forbidden_s: seconds of a forbidden step,
    for those who look for the ways that need fewest.
    """
    together = dataclasses.replace(mesh, alpha=tuple(alpha / n_together for alpha in mesh.alpha))
    common = _steps(same_divisors(shape, mesh.shape), mesh.shape)
    prices = [
        forbidden_s if step.kind in forbidden
        else _price(step, n_bytes, together if step.kind in ("all-reduce", "reduce-scatter") else mesh)
        for step in common.bills
    ]  # fmt: skip
    n = len(common.number)
    direct = [[math.inf] * n for _ in range(n)]
    way = [[0] * n for _ in range(n)]
    for i in range(n):
        direct[i][i] = 0.0
    for step, ((i, j), bill) in enumerate(zip(common.ends, common.bill_of, strict=True)):
        if prices[bill] < direct[i][j]:
            direct[i][j], way[i][j] = prices[bill], step
    seconds, first = np.array(direct), np.array(way, np.int64)
    for k in range(n):
        through = seconds[:, k, None] + seconds[None, k, :]
        shorter = through < seconds
        seconds = np.where(shorter, through, seconds)
        first = np.where(shorter, first[:, k, None], first)
    return ReshardTable(common.number, seconds, first, common.steps)


def _price(step: Step, n_bytes: float, mesh: LogicalMesh) -> float:
    collective = step.collective(n_bytes, mesh.shape)
    return _STEP_S + (_MASK_S if step.kind == "mask" else 0.0) + (collective.seconds(mesh) if collective else 0.0)
