"""Resharding between meshes: which parts of an array go from which device to which, as a value.

A `Resharding` lists what crosses, part by part; `inter/lower/cross_mesh.py` makes it and the runtime moves by it.
Devices are numbered as in the cluster; a host has `devices_per_host` neighbouring ones. A worker is a host of one of
the meshes: where the meshes share a host, it counts as two.
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
    """A part of an array that one device sends and devices of one host get.

    box: the part, in elements of the whole array. source: the device that sends it. targets: the devices, all of one
    host, whose shards hold it: it crosses to that host once.
    relayed: the source is a device of the target mesh, which got the same part in an earlier move.
    """

    box: Box
    source: int
    targets: tuple[int, ...]
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Resharding:
    """How an array gets from one mesh to another.

    shape: of the whole array, as it is stored (`Spec.stored_shape`). item_bytes: of an element.
    source_boxes, landing_boxes: the shard of each device of the source and target mesh, by device number.
    landing: spec in which the array lands on the target mesh. Where it is finer than the spec that is wanted, the
    target mesh gathers the rest itself, over its own links.
    moves: in an order in which each worker can send. Those from one worker to another stand together.
    """

    shape: tuple[int, ...]
    item_bytes: int
    source_boxes: tuple[tuple[int, Box], ...]
    landing_boxes: tuple[tuple[int, Box], ...]
    landing: PartitionSpec
    moves: tuple[Move, ...]


def n_elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def bytes_per_link(resharding: Resharding, devices_per_host: int) -> Mapping[tuple[int, int], int]:
    """(sending host, receiving host) -> bytes. Both are the same where the meshes share a host."""
    n_bytes: dict[tuple[int, int], int] = defaultdict(int)
    for move in resharding.moves:
        link = move.source // devices_per_host, move.targets[0] // devices_per_host
        n_bytes[link] += n_elements(move.box) * resharding.item_bytes
    return dict(n_bytes)


def verify_resharding(resharding: Resharding, devices_per_host: int) -> None:
    """Raise VerifyError unless

    * every move takes a part of the array that is not empty;
    * the targets of a move are different devices of the target mesh, on one host;
    * a device of the source mesh sends what its shard holds, and one that relays, the same part as it got before;
    * a host that has begun to relay gets nothing more, so that no two hosts wait for each other;
    * no element crosses to a host twice;
    * what a device of the target mesh gets is its shard, no more and no less.
    """
    held, landing = dict(resharding.source_boxes), dict(resharding.landing_boxes)
    whole = tuple((0, size) for size in resharding.shape)
    got: dict[int, set[Box]] = {device: set() for device in landing}
    boxes: dict[int, list[Box]] = defaultdict(list)
    relaying: set[int] = set()
    for i, move in enumerate(resharding.moves):
        if not n_elements(move.box) or not _inside(move.box, whole):
            raise VerifyError(f"Move {i} takes {move.box}, which is no part of an array of shape {resharding.shape}.")
        hosts = {device // devices_per_host for device in move.targets}
        if len(hosts) != 1 or len(set(move.targets)) != len(move.targets) or not landing.keys() >= {*move.targets}:
            raise VerifyError(f"Move {i} goes to {move.targets}, which are not different devices of one target host.")
        if not (_got(move, got) if move.relayed else _holds(move, held)):
            raise VerifyError(f"Move {i} sends {move.box} from device {move.source}, which does not hold it.")
        (host,) = hosts
        if host in relaying:
            raise VerifyError(f"Move {i} goes to host {host}, which relays already. Put it before.")
        if move.relayed:
            relaying.add(move.source // devices_per_host)
        boxes[host].append(move.box)
        for device in move.targets:
            got[device].add(move.box)
    for host, parts in boxes.items():
        for a, b in _overlaps(parts):
            raise VerifyError(f"Elements cross to host {host} twice, in {a} and {b}.")
    for device, parts_of_device in got.items():
        shard = landing[device]
        stray = sorted(box for box in parts_of_device if not _inside(box, shard))
        if stray:
            raise VerifyError(f"Device {device} gets {stray[0]}, which is outside of its shard {shard}.")
        if sum(map(n_elements, parts_of_device)) != n_elements(shard):
            raise VerifyError(f"Device {device} does not get all of its shard {shard}.")


def _holds(move: Move, held: Mapping[int, Box]) -> bool:
    return move.source in held and _inside(move.box, held[move.source])


def _got(move: Move, got: Mapping[int, set[Box]]) -> bool:
    return move.box in got.get(move.source, ())


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
    """The shard of each device of `mesh`, by device number, of an array of `shape` that `spec` lays out.

    Raises ShardingError where a dimension does not divide.
    """
    lengths = mesh.logical_shape
    sizes = spec.shard_shape(shape, lengths)
    boxes = {}
    for device, place in enumerate(itertools.product(*map(range, lengths)), mesh.first_device):
        tile = tile_at(place, spec, lengths)
        boxes[device] = tuple((k * n, (k + 1) * n) for k, n in zip(tile, sizes, strict=True))
    return boxes


def tile_at(place: tuple[int, ...], spec: Spec, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Number, along each dimension of the array, of the shard at a place of a mesh with axes of these lengths."""
    tile = []
    for axes in spec.dims:
        number = 0
        for axis in axes:
            number = number * lengths[axis] + place[axis]
        tile.append(number)
    return tuple(tile)
