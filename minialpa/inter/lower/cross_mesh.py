"""Cross-mesh resharding: how an array gets from a mesh to another one, over few bytes of slow links.

1. The cuts of both specs make cells: parts of the array that lie in one tile (distinct shard) on either side -> _cells
2. Each host with a tile gets each of its cells once, from a host with a copy that has sent least             -> _moves
3. Moves between two workers are one message; senders start with different receivers                       -> _in_order
4. A tile that several hosts want may be sent to each of them (direct); relayed by those that have it
   (broadcast, see _turns); or sent in distinct parts, which the target mesh gathers (gather, see _finer)

The fastest is taken by `resharding_s`. Everything is done tile by tile, never element by element.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jax.sharding import PartitionSpec

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.errors import ShardingError
from minialpa.programs.program import MeshShape
from minialpa.programs.resharding import Box, Move, Resharding, bytes_per_link, n_elements, shard_boxes, tile_at
from minialpa.sharding import Spec

Way = Literal["direct", "broadcast", "gather"]

_Tile = tuple[int, ...]
"""Place of a distinct shard: its number along each dimension of the array."""


@dataclass(frozen=True, slots=True)
class ReshardingCandidate:
    """A way to reshard, and the seconds that it takes with the gathering behind it."""

    way: Way
    resharding: Resharding
    seconds: float


def plan_resharding(
    shape: tuple[int, ...],
    item_bytes: int,
    source: MeshShape,
    source_spec: PartitionSpec,
    target: MeshShape,
    target_spec: PartitionSpec,
    cluster: ClusterSpec,
) -> Resharding:
    """The fastest way from `source_spec` on one mesh to `target_spec` on another; direct where others are no faster.

    shape: of the array as it is stored. Raises ShardingError where a spec does not fit it or a mesh the cluster.
    """
    candidates = resharding_candidates(shape, item_bytes, source, source_spec, target, target_spec, cluster)
    best = next(candidates)
    if best.seconds > _receiving_s(best.resharding, cluster) * _ROUNDING:
        for other in candidates:
            if best.seconds > other.seconds * _ROUNDING:
                best = other
    return best.resharding


#: Two ways that take the same time may differ by this factor.
_ROUNDING = 1 + 1e-9


def _receiving_s(resharding: Resharding, cluster: ClusterSpec) -> float:
    """Seconds that some host needs to get its tiles over its link, sent straight or gathered: no way takes less."""
    received: dict[int, int] = defaultdict(int)
    for (sender, host), n_bytes in bytes_per_link(resharding, cluster.devices_per_host).items():
        if sender != host:
            received[host] += n_bytes
    return cluster.inter_host.transfer_s(max(received.values())) if received else 0.0


def resharding_candidates(
    shape: tuple[int, ...],
    item_bytes: int,
    source: MeshShape,
    source_spec: PartitionSpec,
    target: MeshShape,
    target_spec: PartitionSpec,
    cluster: ClusterSpec,
) -> Iterator[ReshardingCandidate]:
    """The ways to reshard, "direct" first, each made when it is asked for. See `plan_resharding`."""
    wanted = Spec.of(target_spec, len(shape))
    tiles = _tiling(shape, Spec.of(source_spec, len(shape)), source, cluster)
    target_tiles = _tiling(shape, wanted, target, cluster)

    def candidate(
        way: Way, landing: PartitionSpec, landing_tiles: _Tiling, turns: Mapping[int, _Turn]
    ) -> ReshardingCandidate:
        cells = _cells(shape, tiles.parts, landing_tiles.parts)
        moves = _moves(cells, tiles, landing_tiles, turns)
        resharding = Resharding(
            shape=shape,
            item_bytes=item_bytes,
            source_boxes=tiles.boxes,
            landing_boxes=landing_tiles.boxes,
            landing=landing,
            moves=moves,
        )
        return ReshardingCandidate(way, resharding, resharding_s(resharding, target, target_spec, cluster))

    yield candidate("direct", target_spec, target_tiles, {})
    if target_tiles.n_hosts == 1:
        return
    turns = _turns(target_tiles, len({device // cluster.devices_per_host for device, _ in tiles.boxes}))
    if any(turn.relay is not None for turn in turns.values()):
        yield candidate("broadcast", target_spec, target_tiles, turns)
    if _logical_mesh(target, cluster) is None:
        return
    for spec in _finer(wanted, shape, target.logical_shape, tiles.parts):
        finer_tiles = _tiling(shape, spec, target, cluster)
        if finer_tiles.n_hosts < target_tiles.n_hosts:
            yield candidate("gather", spec.partition_spec(), finer_tiles, {})


def resharding_s(resharding: Resharding, target: MeshShape, target_spec: PartitionSpec, cluster: ClusterSpec) -> float:
    """Seconds until the array lies on `target` by `target_spec`: all moves, then the gathering if there is any.

    Moves from one worker to another are one message: alpha + beta * bytes. A host sends one message at a time to other
    hosts and gets one at a time, in the order of the moves, and relays when it has everything. Workers of one host pass
    parts from device to device, all devices at the same time. Copies among the targets of a move cost nothing.
    """
    seconds = _moves_s(resharding, cluster)
    ndim = len(resharding.shape)
    landed, wanted = Spec.of(resharding.landing, ndim), Spec.of(target_spec, ndim)
    axes = set(landed.axes) - set(wanted.axes)
    if axes:
        mesh = _logical_mesh(target, cluster)
        assert mesh is not None, target
        n_bytes = math.prod(wanted.shard_shape(resharding.shape, mesh.shape)) * resharding.item_bytes
        seconds += mesh.all_gather_s(n_bytes, sorted(axes))
    return seconds


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How a spec cuts an array: into `parts` along each dimension.

    devices: those that have a copy of a tile, by host, in ascending order. boxes: the shard of each device.
    """

    parts: tuple[int, ...]
    devices: Mapping[_Tile, Mapping[int, tuple[int, ...]]]
    boxes: tuple[tuple[int, Box], ...]

    @property
    def n_hosts(self) -> int:
        """Hosts that have a copy of the same tile, at most."""
        return max(map(len, self.devices.values()))


def _tiling(shape: tuple[int, ...], spec: Spec, mesh: MeshShape, cluster: ClusterSpec) -> _Tiling:
    lengths = mesh.logical_shape
    last = mesh.first_device + math.prod(lengths) - 1
    if mesh.first_device < 0 or last >= cluster.n_devices:
        raise ShardingError(
            f"The mesh has devices {mesh.first_device} to {last} and the cluster {cluster.n_devices} devices."
        )
    if spec.axes and max(spec.axes) >= len(lengths):
        raise ShardingError(f"Spec {spec} splits over axes that a mesh of shape {lengths} does not have.")
    boxes = shard_boxes(shape, spec, mesh)
    devices: dict[_Tile, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for device, place in enumerate(itertools.product(*map(range, lengths)), mesh.first_device):
        tile = tile_at(place, spec, lengths)
        hosts, host = devices[tile], device // cluster.devices_per_host
        hosts[host] = (*hosts.get(host, ()), device)
    parts = tuple(math.prod(lengths[axis] for axis in axes) for axes in spec.dims)
    return _Tiling(parts, devices, tuple(boxes.items()))


_Cell = tuple[Box, _Tile, _Tile]
"""A part of the array, and the tiles of source and target that it lies in."""


def _cells(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> list[_Cell]:
    """The parts that both tilings cut the array into, largest first."""
    dims = []
    for size, n, m in zip(shape, source, target, strict=True):
        cuts = sorted({k * size // n for k in range(n + 1)} | {k * size // m for k in range(m + 1)})
        dims.append([((a, b), a * n // size, a * m // size) for a, b in itertools.pairwise(cuts)])
    cells: list[_Cell] = [
        (tuple(d[0] for d in cell), tuple(d[1] for d in cell), tuple(d[2] for d in cell))
        for cell in itertools.product(*dims)
    ]
    return sorted(cells, key=lambda cell: -n_elements(cell[0]))


@dataclass(frozen=True, slots=True)
class _Turn:
    """The round in which a host gets its tiles, and the host of the target mesh that relays them, if one does."""

    round: int = 0
    relay: int | None = None


def _turns(target: _Tiling, n_sources: int) -> dict[int, _Turn]:
    """Turns in which each host of the source mesh, and each that has its tiles, serves one other host a round."""
    tiles: dict[int, list[_Tile]] = defaultdict(list)
    for tile, holders in target.devices.items():
        for host in holders:
            tiles[host].append(tile)
    groups: dict[tuple[_Tile, ...], list[int]] = defaultdict(list)  # hosts that want the same
    for host in sorted(tiles):
        groups[tuple(tiles[host])].append(host)
    alike = list(groups.values())
    served = [0] * len(alike)
    turns: dict[int, _Turn] = {}
    while len(turns) < len(tiles):
        number = max((turn.round + 1 for turn in turns.values()), default=0)
        relays = [hosts[:n] for hosts, n in zip(alike, served, strict=True)]
        for _ in range(min(n_sources, len(tiles) - len(turns))):
            g = min((g for g, hosts in enumerate(alike) if served[g] < len(hosts)), key=served.__getitem__)
            turns[alike[g][served[g]]] = _Turn(number)
            served[g] += 1
        for g, hosts in enumerate(alike):
            for relay, host in zip(relays[g], hosts[served[g] :], strict=False):
                turns[host] = _Turn(number, relay)
                served[g] += 1
    return turns


def _moves(cells: Sequence[_Cell], source: _Tiling, target: _Tiling, turns: Mapping[int, _Turn]) -> tuple[Move, ...]:
    """Each cell once to each host with its tile, in the turn of the host, or in the first round.

    It comes from the host itself if that is in both meshes and has a copy, or from the relay of its turn, or from the
    host with a copy that has sent least.
    """
    wanted: dict[int, list[_Cell]] = defaultdict(list)
    for cell in cells:
        for host in target.devices[cell[2]]:
            wanted[host].append(cell)
    turn_of = {host: turns.get(host, _Turn()) for host in wanted}
    by_host: dict[int, int] = defaultdict(int)  # elements that it sends to other hosts
    by_device: dict[int, int] = defaultdict(int)
    messages: dict[_Workers, list[Move]] = defaultdict(list)
    for host in sorted(wanted, key=lambda h: (turn_of[h].round, h)):
        relay = turn_of[host].relay
        for box, source_tile, target_tile in wanted[host]:
            size, targets, holders = n_elements(box), target.devices[target_tile][host], source.devices[source_tile]
            relayed = relay is not None and host not in holders
            if host in holders:
                sender = host
            elif relay is not None:
                sender = relay
            else:
                # A host gets one message at a time. From one that sends it something anyway, it saves a start.
                sender = min(holders, key=lambda h: ((False, h, host) not in messages, by_host[h], h))
                by_host[sender] += size
            pool = target.devices[target_tile][sender] if relayed else holders[sender]
            device = min(pool, key=lambda d: (d not in targets, by_device[d], d))
            by_device[device] += size
            messages[relayed, sender, host].append(Move(box, device, targets, relayed))
    return tuple(move for workers in _in_order(messages, turn_of) for move in messages[workers])


_Workers = tuple[bool, int, int]
"""Whether the sender is a host of the target mesh, which relays; the sending host, the receiving host."""


def _in_order(messages: Iterable[_Workers], turn_of: Mapping[int, _Turn]) -> list[_Workers]:
    """Round by round, and in a round each sender begins with another receiver and goes on to the next of them."""
    rounds: dict[int, list[int]] = defaultdict(list)
    for host in sorted(turn_of):
        rounds[turn_of[host].round].append(host)
    number = {host: i for hosts in rounds.values() for i, host in enumerate(hosts)}

    def place(workers: _Workers) -> tuple[int, int, int]:
        _, sender, host = workers
        turn = turn_of[host].round
        return turn, (number[host] - sender) % len(rounds[turn]), sender

    return sorted(messages, key=place)


def _moves_s(resharding: Resharding, cluster: ClusterSpec) -> float:
    """See `resharding_s`."""
    per_host = cluster.devices_per_host
    messages: dict[_Workers, list[Move]] = defaultdict(list)
    for move in resharding.moves:
        messages[move.relayed, move.source // per_host, move.targets[0] // per_host].append(move)
    sent: dict[int, float] = defaultdict(float)
    received: dict[int, float] = defaultdict(float)
    complete: dict[int, float] = defaultdict(float)
    for (relayed, sender, host), moves in messages.items():
        sizes = [n_elements(move.box) * resharding.item_bytes for move in moves]
        if sender == host:
            load: dict[tuple[bool, int], int] = defaultdict(int)
            for move, n_bytes in zip(moves, sizes, strict=True):
                load[False, move.source] += n_bytes
                load[True, move.targets[0]] += n_bytes
            end_s = cluster.intra_host.transfer_s(max(load.values()))
        else:
            begin_s = max(sent[sender], received[host], complete[sender] if relayed else 0.0)
            end_s = sent[sender] = received[host] = begin_s + cluster.inter_host.transfer_s(sum(sizes))
        complete[host] = max(complete[host], end_s)
    return max(complete.values(), default=0.0)


def _finer(
    wanted: Spec, shape: tuple[int, ...], lengths: tuple[int, ...], source_parts: tuple[int, ...]
) -> Iterator[Spec]:
    """For each set of axes that `wanted` does not use, the spec that also splits over these into fewest cells."""
    idle = [axis for axis, n in enumerate(lengths) if n > 1 and axis not in wanted.axes]
    for k in range(1, len(idle) + 1):
        for axes in itertools.combinations(idle, k):
            found = [_with_axes(wanted, axes, dims) for dims in itertools.product(range(len(shape)), repeat=k)]
            fitting = [spec for spec in found if spec.fits(shape, lengths)]
            if fitting:
                yield min(fitting, key=lambda spec: _n_cells(spec, lengths, source_parts))


def _with_axes(spec: Spec, axes: Sequence[int], dims: Sequence[int]) -> Spec:
    """`spec` with dimension `dims[i]` split over `axes[i]` too, inside what splits it already."""
    new = list(spec.dims)
    for axis, d in zip(axes, dims, strict=True):
        new[d] = (*new[d], axis)
    return Spec(tuple(new))


def _n_cells(spec: Spec, lengths: tuple[int, ...], source_parts: tuple[int, ...]) -> int:
    parts = (math.prod(lengths[axis] for axis in axes) for axes in spec.dims)
    return math.prod(n + m - math.gcd(n, m) for n, m in zip(source_parts, parts, strict=True))


def _logical_mesh(mesh: MeshShape, cluster: ClusterSpec) -> LogicalMesh | None:
    """The mesh with its links; None where it is neither a part of a host nor whole hosts, and its links are mixed."""
    n, per_host = math.prod(mesh.logical_shape), cluster.devices_per_host
    start = mesh.first_device % per_host
    if start + n <= per_host:
        return cluster.logical_mesh((1, n), mesh.logical_shape)
    if start or n % per_host:
        return None
    return cluster.logical_mesh((n // per_host, per_host), mesh.logical_shape)
