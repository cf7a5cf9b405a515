"""Batches of a data set that a user's function reads, in the process that needs them.

`SampleBatches` counts through the samples, epoch by epoch. It reads a batch in this process, or returns `UnreadArray`s,
which know their shapes and samples, for other processes to read. Batch k of an epoch always has the samples from k *
batch_size on, so the function must return the same samples in every process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from minialpa.arrays import RemoteArray
from minialpa.errors import MinialpaError

ReadSamples = Callable[[int, int, int], Iterable[Any]]
"""(start, end, batch_size) -> the batches of the samples from `start` up to `end`."""


@dataclass(frozen=True, slots=True)
class BatchForm:
    """The common structure of all batches of a data set.

    Attributes:
        tree: their pytree, as text.
        shapes: the shape of each leaf, without the dimension of examples.
        dtypes: the dtype of each leaf, as the function returns it.
    """

    tree: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]


class SampleFunction:
    """A function that reads samples. Workers keep it while this object lives."""

    def __init__(self, read: ReadSamples) -> None:
        self.read = read


def read_samples(read: ReadSamples, start: int, stop: int, form: BatchForm) -> list[np.ndarray[Any, Any]]:
    """The leaves of the batch of samples from `start` up to `stop`.

    Raises MinialpaError if the function returns no such batch.
    """
    call = f"input_iter_func({start}, {stop}, {stop - start})"
    batch = next(iter(read(start, stop, stop - start)), None)
    if batch is None:
        raise MinialpaError(f"`{call}` returned no batch. It must return a batch of {stop - start} examples.")

    found, tree = jax.tree.flatten(batch)
    if str(tree) != form.tree:
        raise MinialpaError(
            f"`{call}` returned a batch with the structure {tree}. It must return the structure of the first batch, "
            f"{form.tree}."
        )
    leaves = [np.asarray(leaf) for leaf in found]
    for leaf, shape, dtype in zip(leaves, form.shapes, form.dtypes, strict=True):
        if leaf.shape != (stop - start, *shape) or leaf.dtype != dtype:
            raise MinialpaError(
                f"`{call}` returned an array of shape {leaf.shape} and dtype {leaf.dtype}. Examples of the first batch "
                f"have shape {shape} and dtype {dtype}: it must return {stop - start} of these."
            )
    return leaves


class UnreadBatch:
    """`size` samples from `first` on, not read yet."""

    def __init__(self, function: SampleFunction, first: int, size: int, form: BatchForm) -> None:
        self.function, self.first, self.size, self.form = function, first, size, form
        self._lock = threading.Lock()
        self._leaves: list[Any] | None = None

    def read(self) -> list[Any]:
        """The leaves, which this process reads once."""
        with self._lock:
            if self._leaves is None:
                self._leaves = read_samples(self.function.read, self.first, self.first + self.size, self.form)
            return self._leaves


class UnreadArray(RemoteArray):
    """Leaf number `leaf` of an unread batch. Asking for its value reads the batch in this process."""

    def __init__(self, batch: UnreadBatch, leaf: int, kind: Any) -> None:
        """kind: the aval of the leaf in jax."""
        self.batch, self.leaf = batch, leaf
        self.shape, self.dtype, self.weak_type = kind.shape, kind.dtype, kind.weak_type

    def _fetch(self) -> Any:
        return self.batch.read()[self.leaf]

    def block_until_ready(self) -> UnreadArray:
        return self

    def is_deleted(self) -> bool:
        return False


class SampleBatches(Iterator[Any]):
    """The batches of a data set, epoch after epoch."""

    def __init__(
        self,
        read: ReadSamples,
        *,
        n_samples: int,
        batch_size: int,
        repeats: bool,
        is_read_elsewhere: Callable[[], bool],
    ) -> None:
        """repeats: whether an epoch follows the last batch of an epoch.

        is_read_elsewhere: called before each batch; whether other processes read it, if they can.
        """
        self._function = SampleFunction(read)
        self._n_samples, self._batch_size, self._repeats = n_samples, batch_size, repeats
        self._is_read_elsewhere = is_read_elsewhere
        self._next = 0
        #: Pytree, form and leaf types of all batches, known from the first whole batch.
        self._form: tuple[Any, BatchForm, list[Any]] | None = None
        #: The first sample of the next batch, and its iterator.
        self._open: tuple[int, Iterator[Any]] | None = None

    def get_state(self) -> dict[str, int]:
        """The number of the next batch, counted through all epochs."""
        return {"next": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        self._next, self._open = state["next"], None

    def __next__(self) -> Any:
        n_batches = -(-self._n_samples // self._batch_size)
        epoch, k = divmod(self._next, n_batches)
        if epoch and not self._repeats:
            raise StopIteration
        first = k * self._batch_size
        size = min(self._batch_size, self._n_samples - first)

        if size == self._batch_size and self._form is not None and self._is_read_elsewhere():
            self._next += 1
            return self._unread_batch(first)
        batch = self._read_here(first, size)
        self._next += 1
        if batch is None:  # the function omits a smaller last batch of an epoch
            return next(self)
        if size == self._batch_size and self._form is None:
            self._form = _form_of(batch, size)
        return batch

    def _unread_batch(self, first: int) -> Any:
        assert self._form is not None
        tree, form, kinds = self._form
        batch = UnreadBatch(self._function, first, self._batch_size, form)
        return jax.tree.unflatten(tree, [UnreadArray(batch, i, kind) for i, kind in enumerate(kinds)])

    def _read_here(self, first: int, size: int) -> Any:
        """The batch from sample `first` on, from the iterator that returned the batch before it, or from a new
        iterator.

        None if the function ends before a last batch that is smaller than the others.
        """
        if self._open is None or self._open[0] != first:
            self._open = first, iter(self._function.read(first, self._n_samples, self._batch_size))
        batch = next(self._open[1], None)
        self._open = (first + size, self._open[1]) if batch is not None and first + size < self._n_samples else None
        if batch is None and size < self._batch_size:
            return None

        where = f"At sample {first} of {self._n_samples}, `input_iter_func`"
        if batch is None:
            raise MinialpaError(
                f"{where} has ended. Set `num_samples` to the number of samples that the function returns."
            )
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())}
        if len(sizes) == 1 and sizes != {size}:
            raise MinialpaError(
                f"{where} returned a batch of {sizes.pop()} examples; expected {size}. Every batch of an epoch except "
                "the last one must have `batch_size` examples."
            )
        return batch


def _form_of(batch: Any, size: int) -> tuple[Any, BatchForm, list[Any]] | None:
    """The pytree, form and leaf types of such batches; None if a leaf is no array of numbers with a row per example."""
    leaves, tree = jax.tree.flatten(batch)
    if not leaves or not all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves):
        return None
    if any(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended) or leaf.dtype.kind in "OSTUMm" for leaf in leaves):
        return None
    if any(leaf.shape[:1] != (size,) for leaf in leaves):
        return None
    form = BatchForm(str(tree), tuple(leaf.shape[1:] for leaf in leaves), tuple(leaf.dtype for leaf in leaves))
    return tree, form, [jax.typeof(leaf) for leaf in leaves]


def merged_ranges(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges (start, stop) in order; ranges that touch or overlap become one."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)
