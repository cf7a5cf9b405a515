"""An array and two specs in; the cheapest chain of steps between the specs out, with its seconds.

A step is an operation on shards: cut a dimension or zero all copies but one (`mask`), both free; all-gather,
all-reduce, reduce-scatter, all-to-all. Example: S0,R to R,S0 is one all-to-all, R,R+P0 to S0,R one reduce-scatter.
An array has dozens of specs, on three mesh axes hundreds: all shortest paths are one table (Floyd-Warshall). Prices
and programs use the same steps.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.cost import Collective, CollectiveKind, as_one_of
from minialpa.errors import ShardingError
from minialpa.intra.strategies.combining import ALONE, Sharing
from minialpa.ir.equations import Atom, is_in_host
from minialpa.rules.factors import Reduction
from minialpa.sharding import Spec, specs_of

ReshardKind = Literal[
    "cut", "mask", "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "swap", "cut-halves", "rotate"
]
#: All kinds except a cut.
_EXCHANGES = ("mask", "all-gather", "all-reduce", "reduce-scatter", "all-to-all")
#: Seconds of every step: of paths with equal communication, the shortest is the cheapest.
_STEP_S = 1e-13
#: Of a mask, so that a partial sum needs a reason.
_MASK_S = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardStep:
    """One operation on the shards of an array.

    Attributes:
        kind: `mask` makes a partial sum of a replicated array, with zeros on all devices except the first. `swap`
            exchanges halves (balance.py). `cut-halves` is a cut and a swap of a replicated array at once. `rotate`
            shifts the whole array by `shift` positions (rotation.py).
        dim: the dimension that is cut, gathered, scattered to, split by an all-to-all, or swapped.
        source: the dimension that an all-to-all joins.
        reduction: of an all-reduce; a reduce-scatter sums.
        sent: the part of its shard that a device sends in a `rotate`.
    """

    kind: ReshardKind
    axes: tuple[int, ...]
    src: Spec
    dst: Spec
    dim: int = 0
    source: int = 0
    reduction: Reduction = "sum"
    shift: int = 0
    sent: float = 1.0

    def collective(self, n_bytes: float, mesh_shape: tuple[int, ...]) -> Collective | None:
        """For a whole array of `n_bytes`; None for a local step."""
        match self.kind:
            case "cut" | "mask" | "cut-halves":
                return None
            case "all-gather":
                return Collective("all-gather", n_bytes / self.dst.n_shards(mesh_shape), self.axes)
            case "swap":
                return Collective("collective-permute", n_bytes / self.src.n_shards(mesh_shape) / 2, self.axes)
            case "rotate":
                n_sent = n_bytes / self.src.n_shards(mesh_shape) * self.sent
                return Collective("collective-permute", n_sent, self.axes)
            case _:
                kind: CollectiveKind = self.kind
                return Collective(kind, n_bytes / self.src.n_shards(mesh_shape), self.axes)


def steps_from(src: Spec, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Iterator[ReshardStep]:
    live = tuple(axis for axis, length in enumerate(mesh_shape) if length > 1)
    for axes in itertools.chain.from_iterable(itertools.combinations(live, n) for n in range(1, len(live) + 1)):
        if set(axes) <= set(src.partial):
            rest = tuple(axis for axis in src.partial if axis not in axes)
            # All pending axes at once: sums over one axis after the other would start alone.
            if not rest:
                yield ReshardStep(kind="all-reduce", axes=axes, src=src, dst=Spec(src.dims))
            for dim, dst in _onto_dims(axes, Spec(src.dims, rest), shape, mesh_shape):
                yield ReshardStep(kind="reduce-scatter", axes=axes, src=src, dst=dst, dim=dim)

        if not set(axes) & {*src.axes, *src.partial}:
            yield ReshardStep(kind="mask", axes=axes, src=src, dst=Spec(src.dims, tuple(sorted((*src.partial, *axes)))))
            for dim, dst in _onto_dims(axes, src, shape, mesh_shape):
                yield ReshardStep(kind="cut", axes=axes, src=src, dst=dst, dim=dim)

        for dim, split in enumerate(src.dims):
            if split[-len(axes) :] == axes:
                yield from _steps_off(axes, src, dim, shape, mesh_shape)


def _steps_off(
    axes: tuple[int, ...], src: Spec, dim: int, shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> Iterator[ReshardStep]:
    """Take `axes`, the innermost split of dimension `dim`, off it."""
    gathered = Spec((*src.dims[:dim], src.dims[dim][: -len(axes)], *src.dims[dim + 1 :]), src.partial)
    yield ReshardStep(kind="all-gather", axes=axes, src=src, dst=gathered, dim=dim)
    if len(axes) == 1:
        for to, dst in _onto_dims(axes, gathered, shape, mesh_shape):
            if to != dim:
                yield ReshardStep(kind="all-to-all", axes=axes, src=src, dst=dst, dim=to, source=dim)


def _onto_dims(
    axes: tuple[int, ...], spec: Spec, shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> Iterator[tuple[int, Spec]]:
    for dim, split in enumerate(spec.dims):
        if split and split[-1] > axes[0]:
            continue
        dst = Spec((*spec.dims[:dim], (*split, *axes), *spec.dims[dim + 1 :]), spec.partial)
        if dst.fits(shape, mesh_shape):
            yield dim, dst


def partial_specs_of(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Iterator[Spec]:
    """Every spec, partial sums included."""
    live = [axis for axis, length in enumerate(mesh_shape) if length > 1]
    for spec in specs_of(shape, mesh_shape):
        free = [axis for axis in live if axis not in spec.axes]
        for n_axes in range(len(free) + 1):
            yield from (Spec(spec.dims, partial) for partial in itertools.combinations(free, n_axes))


@dataclass(frozen=True, slots=True, eq=False)
class ReshardTable:
    """All shortest paths between the specs of one array.

    seconds: [i, j], from spec i to spec j; inf without a path.
    first: [i, j], the index in `steps` of the first step from spec i to spec j.
    """

    number: dict[Spec, int]
    seconds: NDArray[np.float64]
    first: NDArray[np.int64]
    steps: tuple[ReshardStep, ...]

    def cost(self, src: Spec, dst: Spec) -> float:
        return float(self.seconds[self.number[src], self.number[dst]])

    def numbers(self, specs: Sequence[Spec]) -> NDArray[np.int64]:
        """Equal for all tables that share `number`."""
        return np.array([self.number[spec] for spec in specs], np.int64)

    def between(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.seconds[src[:, None], dst]

    def path(self, src: Spec, dst: Spec) -> tuple[ReshardStep, ...]:
        """Raises ShardingError if the options forbid every path."""
        path: list[ReshardStep] = []
        at, end = self.number[src], self.number[dst]
        while at != end:
            if not np.isfinite(self.seconds[at, end]):
                raise ShardingError(
                    f"The allowed collectives cannot reshard `{src}` to `{dst}`. Remove `allow_all_gather=False` or "
                    "`allow_all_to_all=False` from `AutoShardingOption`."
                )
            path.append(self.steps[self.first[at, end]])
            at = self.number[path[-1].dst]
        return tuple(path)


def same_divisors(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """One shape for all shapes that a mesh can split in the same ways.

    A size s > 1 on n devices becomes gcd(s, n) * (n + 1); n + 1 has no divisor in common with n. On 4 devices, 6 and 10
    become 10.
    """
    n_devices = math.prod(mesh_shape)
    return tuple(size if size < 2 else math.gcd(size, n_devices) * (n_devices + 1) for size in shape)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _StepGraph:
    """All specs and steps of arrays that can be split in the same ways.

    ends: for each step, the numbers of the specs before and after it.
    bill_of: for each step, the index in `bills` of a step with the same price.
    bills: one step per kind, axes and number of shards of the communicated value.
    """

    number: dict[Spec, int]
    steps: tuple[ReshardStep, ...]
    ends: tuple[tuple[int, int], ...]
    bill_of: tuple[int, ...]
    bills: tuple[ReshardStep, ...]


@functools.lru_cache(maxsize=1 << 12)
def _step_graph(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> _StepGraph:
    number = {spec: i for i, spec in enumerate(partial_specs_of(shape, mesh_shape))}
    steps, ends, bill_of = list[ReshardStep](), list[tuple[int, int]](), list[int]()
    bills: dict[object, tuple[int, ReshardStep]] = {}

    for i, src in enumerate(number):
        for step in steps_from(src, shape, mesh_shape):
            communicated = step.dst if step.kind == "all-gather" else src
            bill = step.kind, step.axes, communicated.n_shards(mesh_shape)
            steps.append(step)
            ends.append((i, number[step.dst]))
            bill_of.append(bills.setdefault(bill, (len(bills), step))[0])

    return _StepGraph(
        number=number,
        steps=tuple(steps),
        ends=tuple(ends),
        bill_of=tuple(bill_of),
        bills=tuple(step for _, step in bills.values()),
    )


def forbidden_for(atom: Atom, forbidden: tuple[str, ...]) -> tuple[str, ...]:
    """The forbidden kinds of steps of an array. Arrays in host memory are not exchanged."""
    return _EXCHANGES if is_in_host(atom.aval) else forbidden


@functools.lru_cache(maxsize=1 << 14)
def reshard_table(
    shape: tuple[int, ...],
    n_bytes: float,
    mesh: LogicalMesh,
    forbidden: tuple[str, ...] = (),
    sharing: Sharing = ALONE,
    forbidden_s: float = math.inf,
) -> ReshardTable:
    """Seconds and first step of the cheapest path between each two specs of an array.

    shape, n_bytes: of the whole array.
    sharing: how many sums start together.
    forbidden_s: seconds of a forbidden step; a finite value finds the paths with the fewest forbidden steps.
    """
    graph = _step_graph(same_divisors(shape, mesh.shape), mesh.shape)
    prices = [
        forbidden_s if step.kind in forbidden
        else _price(step, n_bytes, mesh, sharing)
        for step in graph.bills
    ]  # fmt: skip

    seconds, first = _shortest_paths(graph, prices)
    return ReshardTable(graph.number, seconds, first, graph.steps)


def _shortest_paths(graph: _StepGraph, prices: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`ReshardTable.seconds` and `.first`. prices: seconds of `graph.bills`."""
    n_specs = len(graph.number)
    direct = [[math.inf] * n_specs for _ in range(n_specs)]
    step_of = [[0] * n_specs for _ in range(n_specs)]

    for i in range(n_specs):
        direct[i][i] = 0.0
    for step, ((i, j), bill) in enumerate(zip(graph.ends, graph.bill_of, strict=True)):
        if prices[bill] < direct[i][j]:
            direct[i][j], step_of[i][j] = prices[bill], step

    # Floyd-Warshall.
    seconds, first = np.array(direct), np.array(step_of, np.int64)
    for k in range(n_specs):
        through = seconds[:, k, None] + seconds[None, k, :]
        shorter = through < seconds
        np.copyto(seconds, through, where=shorter)
        np.copyto(first, first[:, k, None], where=shorter)
    return seconds, first


def _price(step: ReshardStep, n_bytes: float, mesh: LogicalMesh, sharing: Sharing) -> float:
    collective = step.collective(n_bytes, mesh.shape)

    if collective is not None:
        mesh = as_one_of(sharing.of(collective.kind, collective.axes), mesh)
    return _STEP_S + (_MASK_S if step.kind == "mask" else 0.0) + (collective.seconds(mesh) if collective else 0.0)
