"""Resharding between meshes: shardings of an array on two meshes in, the moves from device to device out.

An array of shape (8,) in halves on devices 0 and 1 goes to copies on devices 2 and 3:

    Move(box=((0, 4),), source=0, targets=(2, 3))
    Move(box=((4, 8),), source=1, targets=(2, 3))

`inter/lower/cross_mesh.py` makes a `Resharding` and the runtime carries it out. Device numbers count in the cluster. A
worker has the devices of one mesh on one host.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from minialpa.programs.program import MeshShape
from minialpa.sharding import Spec

Box = tuple[tuple[int, int], ...]
"""(start, stop) of a part of an array in each dimension."""


@dataclass(frozen=True, slots=True)
class Move:
    """A part of an array that one device sends once to devices of one host.

    Attributes:
        box: the part, in elements of the global array.
        targets: devices of one host whose shards include the part.
        relayed: whether `source` is a device of the target mesh that received the part in an earlier move.
    """

    box: Box
    source: int
    targets: tuple[int, ...]
    relayed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """The way of an array from one mesh to another.

    Attributes:
        shape: global shape, as stored (`Spec.stored_shape`).
        item_bytes: of one element.
        source_boxes, landing_boxes: (device, shard) for each device of the source and of the target mesh.
        landing: spec in which the array arrives. If it is finer than the spec of the readers, the target mesh gathers
            the rest over its links.
        moves: in the order of sending; moves between the same two workers are adjacent. A host that has begun to relay
            receives no more, so hosts never wait for each other in a circle.
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
    """The shard of each device of `mesh`, by device number. Raises ShardingError if axes do not divide a dimension."""
    lengths = mesh.logical_shape
    sizes = spec.shard_shape(shape, lengths)
    boxes = {}
    for device, place in enumerate(itertools.product(*map(range, lengths)), mesh.first_device):
        tile = tile_at(place, spec, lengths)
        boxes[device] = tuple((k * size, (k + 1) * size) for k, size in zip(tile, sizes, strict=True))
    return boxes


def tile_at(place: tuple[int, ...], spec: Spec, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The index, along each array dimension, of the shard at coordinates `place` of a mesh with axes of `lengths`."""
    tile = []
    for axes in spec.dims:
        number = 0
        for axis in axes:
            number = number * lengths[axis] + place[axis]
        tile.append(number)
    return tuple(tile)
