"""The moves of a cross-mesh resharding: tiles on both meshes in; sender, receivers and order of each part out.

1. The cuts of both specs make cells: parts of the array inside one tile on either side          -> _cells
2. Each host gets each cell of its tiles once, from the host with a copy that has sent least     -> _choose_sender
3. Moves between two workers are one message; senders start with different receivers             -> _messages_in_order
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from minialpa.cluster import ClusterSpec
from minialpa.errors import ShardingError
from minialpa.programs.program import MeshShape
from minialpa.programs.resharding import Box, Move, n_elements, shard_boxes, tile_at
from minialpa.sharding import Spec

_Tile = tuple[int, ...]
"""Number of a distinct shard along each dimension of the array."""

_Cell = tuple[Box, _Tile, _Tile]
"""A part of the array, with its tiles on source and target."""

_Workers = tuple[bool, int, int]
"""Whether the sender relays; sending host; receiving host."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles (distinct shards) of an array on a mesh.

    Attributes:
        parts: the number of parts along each dimension.
        devices: tile -> host -> devices with a copy, in ascending order.
        boxes: each device with its shard.
    """

    parts: tuple[int, ...]
    devices: Mapping[_Tile, Mapping[int, tuple[int, ...]]]
    boxes: tuple[tuple[int, Box], ...]

    @property
    def n_hosts(self) -> int:
        """Most hosts with a copy of the same tile."""
        return max(map(len, self.devices.values()))


def tiling(shape: tuple[int, ...], spec: Spec, mesh: MeshShape, cluster: ClusterSpec) -> Tiling:
    """The tiles of an array of `shape` on `mesh`. Raises ShardingError if the spec or the mesh does not fit."""
    lengths = mesh.logical_shape
    last = mesh.first_device + math.prod(lengths) - 1
    if mesh.first_device < 0 or last >= cluster.n_devices:
        raise ShardingError(
            f"A stage has the devices {mesh.first_device} to {last}, but the cluster has {cluster.n_devices} devices. "
            "This is a bug in minialpa: report it with this message."
        )
    if spec.axes and max(spec.axes) >= len(lengths):
        raise ShardingError(
            f"The spec {spec} of an array of shape {shape} has axes that a mesh of shape {lengths} does not have. This "
            "is a bug in minialpa: report it with this message."
        )

    boxes = shard_boxes(shape, spec, mesh)
    devices: dict[_Tile, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for device, place in enumerate(itertools.product(*map(range, lengths)), mesh.first_device):
        copies, host = devices[tile_at(place, spec, lengths)], device // cluster.devices_per_host
        copies[host] = (*copies.get(host, ()), device)

    parts = tuple(math.prod(lengths[axis] for axis in axes) for axes in spec.dims)
    return Tiling(parts, devices, tuple(boxes.items()))


# ---- turns -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServingTurn:
    """The round in which a host of the target mesh gets its tiles, and the host of that mesh that relays them."""

    round: int = 0
    relay: int | None = None


def serving_turns(target: Tiling, n_sources: int) -> dict[int, ServingTurn]:
    """The turn of each host: in a round, each source host and each complete target host serves one host.

    With one of `n_sources`, 7 hosts with equal tiles take 3 rounds: 1, 3, then 7 have them.
    """
    groups = _hosts_with_equal_tiles(target)
    n_hosts = sum(map(len, groups))
    n_served = [0] * len(groups)
    turns: dict[int, ServingTurn] = {}
    number = 0
    while len(turns) < n_hosts:
        # Only hosts that were complete before this round relay in it.
        relays = [hosts[:n] for hosts, n in zip(groups, n_served, strict=True)]

        # The source mesh serves the groups with the fewest relays.
        for _ in range(min(n_sources, n_hosts - len(turns))):
            waiting = (g for g, hosts in enumerate(groups) if n_served[g] < len(hosts))
            g = min(waiting, key=n_served.__getitem__)
            turns[groups[g][n_served[g]]] = ServingTurn(number)
            n_served[g] += 1

        for g, hosts in enumerate(groups):
            for relay, host in zip(relays[g], hosts[n_served[g] :], strict=False):
                turns[host] = ServingTurn(number, relay)
                n_served[g] += 1
        number += 1
    return turns


def _hosts_with_equal_tiles(target: Tiling) -> list[list[int]]:
    """The hosts of the target mesh, in groups that can relay to each other."""
    tiles: dict[int, list[_Tile]] = defaultdict(list)
    for tile, copies in target.devices.items():
        for host in copies:
            tiles[host].append(tile)

    groups: dict[tuple[_Tile, ...], list[int]] = defaultdict(list)
    for host in sorted(tiles):
        groups[tuple(tiles[host])].append(host)
    return list(groups.values())


# ---- moves -----------------------------------------------------------------------------------------------------------


def moves_between(
    shape: tuple[int, ...], source: Tiling, target: Tiling, turns: Mapping[int, ServingTurn]
) -> tuple[Move, ...]:
    """The moves that bring each cell once to each host with its tile. Hosts without a turn are in the first round."""
    cells_of: dict[int, list[_Cell]] = defaultdict(list)
    for cell in _cells(shape, source.parts, target.parts):
        for host in target.devices[cell[2]]:
            cells_of[host].append(cell)

    turn_of = {host: turns.get(host, ServingTurn()) for host in cells_of}
    sent = _SenderLoads()
    for host in sorted(cells_of, key=lambda h: (turn_of[h].round, h)):
        for box, source_tile, target_tile in cells_of[host]:
            targets, holders = target.devices[target_tile][host], source.devices[source_tile]
            relayed, sender = _choose_sender(host, turn_of[host].relay, holders, sent)
            copies = target.devices[target_tile][sender] if relayed else holders[sender]

            # A device that has the cell uses no link.
            device = min(copies, key=lambda d: (d not in targets, sent.by_device[d], d))
            size = n_elements(box)
            sent.by_device[device] += size
            if not relayed and sender != host:
                sent.by_host[sender] += size
            sent.messages[relayed, sender, host].append(Move(box, device, targets, relayed))
    return tuple(move for workers in _messages_in_order(sent.messages, turn_of) for move in sent.messages[workers])


def _cells(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> list[_Cell]:
    """source, target: number of tiles along each dimension."""
    dims = []
    for size, n, m in zip(shape, source, target, strict=True):
        cuts = sorted({k * size // n for k in range(n + 1)} | {k * size // m for k in range(m + 1)})
        dims.append([((a, b), a * n // size, a * m // size) for a, b in itertools.pairwise(cuts)])

    cells: list[_Cell] = [
        (tuple(d[0] for d in cell), tuple(d[1] for d in cell), tuple(d[2] for d in cell))
        for cell in itertools.product(*dims)
    ]
    # Large cells first: small ones then even out the loads of the senders.
    return sorted(cells, key=lambda cell: -n_elements(cell[0]))


@dataclass(slots=True)
class _SenderLoads:
    """The loads of senders so far.

    Attributes:
        by_host: elements that each source host sends to other hosts.
        by_device: elements that each device sends.
        messages: the moves of each message.
    """

    by_host: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    by_device: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    messages: dict[_Workers, list[Move]] = field(default_factory=lambda: defaultdict(list))


def _choose_sender(host: int, relay: int | None, holders: Collection[int], sent: _SenderLoads) -> tuple[bool, int]:
    """Whether a cell is relayed to `host`, and the sending host. holders: source hosts with the cell."""
    if host in holders:
        return False, host
    if relay is not None:
        return True, relay
    # Another cell in the message of the same sender saves the start of a message.
    return False, min(holders, key=lambda h: ((False, h, host) not in sent.messages, sent.by_host[h], h))


def _messages_in_order(messages: Iterable[_Workers], turn_of: Mapping[int, ServingTurn]) -> list[_Workers]:
    """Round by round. In a round, senders begin with different receivers."""
    rounds: dict[int, list[int]] = defaultdict(list)
    for host in sorted(turn_of):
        rounds[turn_of[host].round].append(host)
    number = {host: i for hosts in rounds.values() for i, host in enumerate(hosts)}

    def place(workers: _Workers) -> tuple[int, int, int]:
        _, sender, host = workers
        turn = turn_of[host].round
        return turn, (number[host] - sender) % len(rounds[turn]), sender

    return sorted(messages, key=place)
