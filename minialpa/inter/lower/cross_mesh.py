"""Cross-mesh resharding: an array with its specs on two meshes in, the moves of its parts between devices out.

A tile (distinct shard) reaches several hosts in one of three ways:

- direct: its holders send it to each host;
- broadcast: hosts that have received it relay it, see `serving_turns`;
- gather: the hosts receive distinct parts, and the target mesh gathers them, see `_finer_specs`.

The work of planning grows with the number of tiles, not of elements.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jax.sharding import PartitionSpec

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.inter.lower.cross_mesh_moves import ServingTurn, Tiling, moves_between, serving_turns, tiling
from minialpa.programs.program import MeshShape
from minialpa.programs.resharding import Move, Resharding, n_elements
from minialpa.sharding import Spec

Way = Literal["direct", "broadcast", "gather"]

#: Two ways that take the same time may differ by this factor.
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """An array that crosses from mesh `source` to mesh `target`. shape: global, as stored (`Spec.stored_shape`)."""

    shape: tuple[int, ...]
    item_bytes: int
    source: MeshShape
    source_spec: PartitionSpec
    target: MeshShape
    target_spec: PartitionSpec
    cluster: ClusterSpec


@dataclass(frozen=True, slots=True)
class ReshardingCandidate:
    way: Way
    resharding: Resharding
    seconds: float


def plan_resharding(crossing: Crossing) -> Resharding:
    """The fastest resharding. Raises ShardingError if a spec does not fit the array, or a mesh the cluster."""
    best, *others = resharding_candidates(crossing)
    for other in others:
        if best.seconds > other.seconds * _ROUNDING:
            best = other
    return best.resharding


def resharding_candidates(crossing: Crossing) -> Iterator[ReshardingCandidate]:
    """The ways to reshard, "direct" first. Raises as `plan_resharding`."""
    shape, target, cluster = crossing.shape, crossing.target, crossing.cluster
    target_spec = Spec.of(crossing.target_spec, len(shape))
    source_tiles = tiling(shape, Spec.of(crossing.source_spec, len(shape)), crossing.source, cluster)
    target_tiles = tiling(shape, target_spec, target, cluster)
    yield _candidate("direct", crossing, source_tiles, crossing.target_spec, target_tiles)

    # Relaying and gathering help several hosts only.
    if target_tiles.n_hosts == 1:
        return

    turns = serving_turns(target_tiles, len({device // cluster.devices_per_host for device, _ in source_tiles.boxes}))
    if any(turn.relay is not None for turn in turns.values()):
        yield _candidate("broadcast", crossing, source_tiles, crossing.target_spec, target_tiles, turns)

    # The seconds of gathering follow from the links of the target mesh.
    if _logical_mesh(target, cluster) is None:
        return
    for spec in _finer_specs(target_spec, shape, target.logical_shape, source_tiles.parts):
        finer_tiles = tiling(shape, spec, target, cluster)
        if finer_tiles.n_hosts < target_tiles.n_hosts:
            yield _candidate("gather", crossing, source_tiles, spec.partition_spec(), finer_tiles)


def _candidate(
    way: Way,
    crossing: Crossing,
    source_tiles: Tiling,
    landing: PartitionSpec,
    landing_tiles: Tiling,
    turns: Mapping[int, ServingTurn] | None = None,
) -> ReshardingCandidate:
    """landing: spec in which the array arrives."""
    resharding = Resharding(
        shape=crossing.shape,
        item_bytes=crossing.item_bytes,
        source_boxes=source_tiles.boxes,
        landing_boxes=landing_tiles.boxes,
        landing=landing,
        moves=moves_between(crossing.shape, source_tiles, landing_tiles, turns or {}),
    )
    return ReshardingCandidate(way, resharding, resharding_s(resharding, crossing))


# ---- seconds ---------------------------------------------------------------------------------------------------------


def resharding_s(resharding: Resharding, crossing: Crossing) -> float:
    """Seconds until the target mesh has the array in its spec: all moves, then gathering.

    Moves from one worker to another are one message: alpha + beta * bytes. A host sends one message at a time to other
    hosts and receives one at a time, in the order of the moves. It relays after it has received everything. Workers of
    one host copy from device to device, all devices at the same time. Copies among the targets of a move are free.
    """
    seconds = _moves_s(resharding, crossing.cluster)
    ndim = len(resharding.shape)
    landed, target_spec = Spec.of(resharding.landing, ndim), Spec.of(crossing.target_spec, ndim)

    gathered_axes = set(landed.axes) - set(target_spec.axes)
    if gathered_axes:
        mesh = _logical_mesh(crossing.target, crossing.cluster)
        assert mesh is not None, crossing.target
        n_bytes = math.prod(target_spec.shard_shape(resharding.shape, mesh.shape)) * resharding.item_bytes
        seconds += mesh.all_gather_s(n_bytes, sorted(gathered_axes))
    return seconds


def _moves_s(resharding: Resharding, cluster: ClusterSpec) -> float:
    """Seconds of all moves, by the rules of `resharding_s`."""
    per_host = cluster.devices_per_host
    messages: dict[tuple[bool, int, int], list[Move]] = defaultdict(list)
    for move in resharding.moves:
        messages[move.relayed, move.source // per_host, move.targets[0] // per_host].append(move)

    # For each host: the ends of its last message out, of its last message in, and of all messages in so far.
    sent_s: dict[int, float] = defaultdict(float)
    received_s: dict[int, float] = defaultdict(float)
    complete_s: dict[int, float] = defaultdict(float)
    for (relayed, sender, host), moves in messages.items():
        if sender == host:
            end_s = cluster.intra_host.transfer_s(_largest_load(moves) * resharding.item_bytes)
        else:
            begin_s = max(sent_s[sender], received_s[host], complete_s[sender] if relayed else 0.0)
            n_bytes = sum(n_elements(move.box) for move in moves) * resharding.item_bytes
            end_s = sent_s[sender] = received_s[host] = begin_s + cluster.inter_host.transfer_s(n_bytes)
        complete_s[host] = max(complete_s[host], end_s)
    return max(complete_s.values(), default=0.0)


def _largest_load(moves: Sequence[Move]) -> int:
    """Most elements that one device sends or receives in moves inside one host. `moves` is not empty.

    The first target receives. Copies from it to the other targets are free, see `resharding_s`.
    """
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for move in moves:
        sent[move.source] += n_elements(move.box)
        received[move.targets[0]] += n_elements(move.box)
    return max(*sent.values(), *received.values())


def _logical_mesh(mesh: MeshShape, cluster: ClusterSpec) -> LogicalMesh | None:
    """The mesh with its links; None if it is neither a part of one host nor whole hosts."""
    n_devices, per_host = math.prod(mesh.logical_shape), cluster.devices_per_host
    start = mesh.first_device % per_host
    if start + n_devices <= per_host:
        return cluster.logical_mesh((1, n_devices), mesh.logical_shape)
    if start or n_devices % per_host:
        return None
    return cluster.logical_mesh((n_devices // per_host, per_host), mesh.logical_shape)


# ---- specs to gather from --------------------------------------------------------------------------------------------


def _finer_specs(
    target_spec: Spec, shape: tuple[int, ...], lengths: tuple[int, ...], source_parts: tuple[int, ...]
) -> Iterator[Spec]:
    """For each set of idle axes of `target_spec`: the spec that also splits over them and makes the fewest cells."""
    idle = [axis for axis, length in enumerate(lengths) if length > 1 and axis not in target_spec.axes]
    for k in range(1, len(idle) + 1):
        for axes in itertools.combinations(idle, k):
            specs = [_with_axes(target_spec, axes, dims) for dims in itertools.product(range(len(shape)), repeat=k)]
            fitting = [spec for spec in specs if spec.fits(shape, lengths)]
            if fitting:
                yield min(fitting, key=lambda spec: _n_cells(spec, lengths, source_parts))


def _with_axes(spec: Spec, axes: Sequence[int], dims: Sequence[int]) -> Spec:
    new = list(spec.dims)
    for axis, d in zip(axes, dims, strict=True):
        new[d] = (*new[d], axis)
    return Spec(tuple(new))


def _n_cells(spec: Spec, lengths: tuple[int, ...], source_parts: tuple[int, ...]) -> int:
    """Parts that the cuts of both meshes make together."""
    parts = (math.prod(lengths[axis] for axis in axes) for axes in spec.dims)
    return math.prod(n + m - math.gcd(n, m) for n, m in zip(source_parts, parts, strict=True))
