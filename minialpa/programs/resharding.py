"""Resharding between meshes: which parts of an array go from which device to which, as a value.

A `Resharding` lists the moves of an array between two meshes, part by part; `inter/lower/cross_mesh.py` makes it and
the runtime carries it out. Devices are numbered as in the cluster; each host has `devices_per_host` consecutive
numbers. A worker has the devices of one mesh on one host: a host that two meshes share has two workers.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import PartitionSpec

from minialpa.errors import VerifyError
from minialpa.programs.program import MeshShape
from minialpa.sharding import Spec

Box = tuple[tuple[int, int], ...]
"""Start and stop of a part of an array in each dimension."""


@dataclass(frozen=True, slots=True)
class Move:
    """A part of an array that one device sends and devices of one host receive. It crosses to that host once.

    Attributes:
        box: the part, in elements of the global array.
        source: the device that sends it.
        targets: the devices, all of one host, whose shards include the part.
        relayed: whether the source is a device of the target mesh that received the same part in an earlier move.
    """

    box: Box
    source: int
    targets: tuple[int, ...]
    relayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """How an array gets from one mesh to another.

    Attributes:
        shape: global shape, as stored (`Spec.stored_shape`).
        item_bytes: bytes of one element.
        source_boxes: (device, its shard) for each device of the source mesh.
        landing_boxes: (device, its shard) for each device of the target mesh.
        landing: spec in which the array arrives on the target mesh. If it is finer than the spec that readers want,
            the target mesh gathers the rest over its own links.
        moves: in an order in which each worker can send. Moves from one worker to another are adjacent.
    """

    shape: tuple[int, ...]
    item_bytes: int
    source_boxes: tuple[tuple[int, Box], ...]
    landing_boxes: tuple[tuple[int, Box], ...]
    landing: PartitionSpec
    moves: tuple[Move, ...]


def n_elements(box: Box) -> int:
    """Number of elements of a part."""
    return math.prod(stop - start for start, stop in box)


def bytes_per_link(resharding: Resharding, devices_per_host: int) -> Mapping[tuple[int, int], int]:
    """(sending host, receiving host) -> bytes. Both are the same host where the meshes share it."""
    n_bytes: dict[tuple[int, int], int] = defaultdict(int)
    for move in resharding.moves:
        link = move.source // devices_per_host, move.targets[0] // devices_per_host
        n_bytes[link] += n_elements(move.box) * resharding.item_bytes
    return dict(n_bytes)


def verify_resharding(resharding: Resharding, devices_per_host: int) -> None:
    """Raise VerifyError unless

    * every move takes a part of the array that is not empty (`_check_part`);
    * the targets of a move are different devices of the target mesh, on one host (`_target_host`);
    * a device of the source mesh sends elements of its shard, and a device that relays sends a part that it received
      in an earlier move (`_check_source`);
    * a host that has begun to relay receives nothing more, so that no two hosts wait for each other;
    * no element crosses to a host twice (`_check_crossings`);
    * each device of the target mesh receives its shard, no more and no less (`_check_shards`).
    """
    held, landing = dict(resharding.source_boxes), dict(resharding.landing_boxes)
    received: dict[int, set[Box]] = {device: set() for device in landing}
    crossed: dict[int, list[Box]] = defaultdict(list)
    relaying: set[int] = set()

    # In order: what a device may relay and what a host may still receive depends on the moves before.
    for i, move in enumerate(resharding.moves):
        _check_part(i, move, resharding.shape)
        host = _target_host(i, move, landing, devices_per_host)
        _check_source(i, move, held, received)
        if host in relaying:
            raise VerifyError(f"Move {i} goes to host {host}, which relays already. Put it before.")

        if move.relayed:
            relaying.add(move.source // devices_per_host)
        crossed[host].append(move.box)
        for device in move.targets:
            received[device].add(move.box)

    _check_crossings(crossed)
    _check_shards(received, landing)


def _check_part(i: int, move: Move, shape: tuple[int, ...]) -> None:
    if not n_elements(move.box) or not _inside(move.box, tuple((0, size) for size in shape)):
        raise VerifyError(f"Move {i} takes {move.box}, which is no part of an array of shape {shape}.")


def _target_host(i: int, move: Move, landing: Mapping[int, Box], devices_per_host: int) -> int:
    """The host that receives move `i`."""
    hosts = {device // devices_per_host for device in move.targets}
    if len(hosts) != 1 or len(set(move.targets)) != len(move.targets) or not landing.keys() >= {*move.targets}:
        raise VerifyError(f"Move {i} goes to {move.targets}, which are not different devices of one target host.")
    return hosts.pop()


def _check_source(i: int, move: Move, held: Mapping[int, Box], received: Mapping[int, set[Box]]) -> None:
    if move.relayed:
        has_part = move.box in received.get(move.source, ())
    else:
        has_part = move.source in held and _inside(move.box, held[move.source])
    if not has_part:
        raise VerifyError(f"Move {i} sends {move.box} from device {move.source}, which does not hold it.")


def _check_crossings(crossed: Mapping[int, Sequence[Box]]) -> None:
    """crossed[host]: the parts that a host receives."""
    for host, boxes in crossed.items():
        for first, second in _overlaps(boxes):
            raise VerifyError(f"Elements cross to host {host} twice, in {first} and {second}.")


def _check_shards(received: Mapping[int, set[Box]], landing: Mapping[int, Box]) -> None:
    for device, boxes in received.items():
        shard = landing[device]
        stray = sorted(box for box in boxes if not _inside(box, shard))
        if stray:
            raise VerifyError(f"Device {device} gets {stray[0]}, which is outside of its shard {shard}.")
        if sum(map(n_elements, boxes)) != n_elements(shard):
            raise VerifyError(f"Device {device} does not get all of its shard {shard}.")


def _inside(box: Box, outer: Box) -> bool:
    return len(box) == len(outer) and all(
        first <= start <= stop <= last for (start, stop), (first, last) in zip(box, outer, strict=True)
    )


def _overlaps(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs of boxes, none of them empty, that share an element."""
    edges = np.array(boxes, np.int64).reshape(len(boxes), -1, 2)
    for i, box in enumerate(boxes[:-1]):
        rest = edges[i + 1 :]
        shared = np.all((rest[:, :, 0] < edges[i, :, 1]) & (edges[i, :, 0] < rest[:, :, 1]), axis=1)
        for j in np.flatnonzero(shared):
            yield box, boxes[i + 1 + int(j)]


def shard_boxes(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> dict[int, Box]:
    """The shard that each device of `mesh` holds of an array of `shape` with sharding `spec`, by device number.

    Raises ShardingError if the mesh axes of a dimension do not divide its length.
    """
    lengths = mesh.logical_shape
    sizes = spec.shard_shape(shape, lengths)
    boxes = {}
    for device, place in enumerate(itertools.product(*map(range, lengths)), mesh.first_device):
        tile = tile_at(place, spec, lengths)
        boxes[device] = tuple((k * size, (k + 1) * size) for k, size in zip(tile, sizes, strict=True))
    return boxes


def tile_at(place: tuple[int, ...], spec: Spec, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The shard at coordinates `place` of a mesh with axes of these lengths: its number along each array dimension."""
    tile = []
    for axes in spec.dims:
        number = 0
        for axis in axes:
            number = number * lengths[axis] + place[axis]
        tile.append(number)
    return tuple(tile)
