"""The arguments of a worker: shards that the caller sends, or an order to read samples that become shards.

Shards are *plain*: pickle moves arrays of NumPy's own dtypes without a copy. Other dtypes, such as bfloat16, cross as
unsigned integers of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minialpa.arrays import own_copy
from minialpa.programs.resharding import Box
from minialpa.samples import BatchForm, ReadSamples, read_samples


@dataclass(frozen=True, slots=True)
class Given:
    """An argument that the caller sends.

    Attributes:
        shards: distinct plain shards. A shard for several workers may be its position in the `shared` arrays of a call.
        shard_of_device: for each device, the position of its shard.
    """

    shards: tuple[np.ndarray[Any, Any] | int, ...]
    shard_of_device: tuple[int, ...]


Argument = int | Given
"""The number of an array that the workers hold, or shards. Numbers are cheap: every step pickles thousands."""


def to_plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def from_plain(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    return array if np.dtype(dtype).isbuiltin == 1 else array.view(dtype)


# ---- samples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRead:
    """An input that a worker reads from a leaf of the batch.

    Attributes:
        leaf: number of the leaf in the batch.
        boxes: distinct shards of the worker, in the leaf.
        shard_of_device: as in `Given`.
    """

    input: int
    leaf: int
    dtype: str
    boxes: tuple[Box, ...]
    shard_of_device: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """The inputs that one worker makes of a batch. ranges: rows (start, stop), in order and not adjacent. The user's
    function is called for each.
    """

    form: BatchForm
    ranges: tuple[tuple[int, int], ...]
    inputs: tuple[InputRead, ...]


def read_inputs(read: ReadSamples, order: ReadOrder, first: int) -> list[Given]:
    """In new memory. first: the first sample of the batch."""
    rows = [(a, b, read_samples(read, first + a, first + b, order.form)) for a, b in order.ranges]
    return [
        Given(tuple(_shard(rows, of_input, box) for box in of_input.boxes), of_input.shard_of_device)
        for of_input in order.inputs
    ]


def _shard(
    rows: Sequence[tuple[int, int, list[np.ndarray[Any, Any]]]], of_input: InputRead, box: Box
) -> np.ndarray[Any, Any]:
    """rows: (start, stop, leaves) for each range that was read."""
    (start, stop), *others = box
    first, leaves = next((a, leaves) for a, b, leaves in rows if a <= start and stop <= b)
    index = (slice(start - first, stop - first), *(slice(*ends) for ends in others))
    return to_plain(own_copy(np.asarray(leaves[of_input.leaf][index], of_input.dtype)))
