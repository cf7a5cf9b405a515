"""Resharding between meshes: the moves of an array from device to device, part by part.

`inter/lower/cross_mesh.py` makes a `Resharding` and the runtime carries it out. The cluster numbers the devices, and
each host has `devices_per_host` consecutive numbers. A worker has the devices of one mesh on one host: a host that two
meshes share has two workers.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from minialpa.programs.program import MeshShape
from minialpa.sharding import Spec

Box = tuple[tuple[int, int], ...]
"""Start and stop of a part of an array in each dimension."""


@dataclass(frozen=True, slots=True)
class Move:
    """A part of an array that one device sends once to devices of one host.

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
        landing: spec in which the array arrives on the target mesh. If it is finer than the readers' spec, the target
            mesh gathers the rest over its own links.
        moves: in an order in which each worker can send. Moves from one worker to another are adjacent. A host that
            has begun to relay receives no more, so hosts never wait for each other.
    """

    shape: tuple[int, ...]
    item_bytes: int
    source_boxes: tuple[tuple[int, Box], ...]
    landing_boxes: tuple[tuple[int, Box], ...]
    landing: PartitionSpec
    moves: tuple[Move, ...]


def n_elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


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
