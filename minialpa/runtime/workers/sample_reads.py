"""Reading samples on workers: each reads the rows of a batch that its devices hold, by the user's function.

A `ReadOrder` says which rows of a batch one worker reads and which shards of its inputs they make. It does not depend
on where in the data set the batch is, and holds no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minialpa.arrays import own_copy
from minialpa.programs.resharding import Box
from minialpa.runtime.workers.numpy_wire import to_plain
from minialpa.runtime.workers.worker_program import Given
from minialpa.samples import BatchForm, ReadSamples, read_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRead:
    """An input of a program that a worker reads.

    Attributes:
        input: its number.
        leaf: the number of the leaf of the batch.
        dtype: of the array that the program reads.
        boxes: the distinct shards of the worker, in the leaf.
        shard_of_device: which of them each of its devices has.
    """

    input: int
    leaf: int
    dtype: str
    boxes: tuple[Box, ...]
    shard_of_device: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """What one worker reads of a batch.

    Attributes:
        form: what a batch is made of.
        ranges: the rows (start, stop) to read, in order and apart from each other. The function is called for each.
        inputs: what is made of these rows.
    """

    form: BatchForm
    ranges: tuple[tuple[int, int], ...]
    inputs: tuple[InputRead, ...]


def read_inputs(read: ReadSamples, order: ReadOrder, first: int) -> list[Given]:
    """The shards of each input of an order, read from the batch whose first sample is `first`.

    They share no memory with what the function has returned.
    """
    rows = [(a, b, read_samples(read, first + a, first + b, order.form)) for a, b in order.ranges]
    return [
        Given(tuple(_shard(rows, of_input, box) for box in of_input.boxes), of_input.shard_of_device)
        for of_input in order.inputs
    ]


def _shard(
    rows: Sequence[tuple[int, int, list[np.ndarray[Any, Any]]]], of_input: InputRead, box: Box
) -> np.ndarray[Any, Any]:
    (start, stop), *others = box
    first, leaves = next((a, leaves) for a, b, leaves in rows if a <= start and stop <= b)
    index = (slice(start - first, stop - first), *(slice(*ends) for ends in others))
    return to_plain(own_copy(np.asarray(leaves[of_input.leaf][index], of_input.dtype)))
