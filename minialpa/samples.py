"""Batches of the samples of a data set, which a function reads in whichever process needs them.

`SampleBatches` counts through the samples of a data set, epoch by epoch. Each batch is read in this process, or stands
for samples that other processes will read: then its leaves are `UnreadArray`s, which know their shapes and the samples.
What a sample holds may not depend on where it is read, so the order of samples is the same in both cases: batch k of an
epoch has the samples from k * batch_size on.
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
"""(start, end, batch_size) -> the batches of the samples from `start` to `end`."""


@dataclass(frozen=True, slots=True)
class BatchForm:
    """What all batches of a data set have in common.

    Attributes:
        tree: their pytree, as text.
        shapes: the shape of each leaf, without the dimension of examples.
        dtypes: the dtype of each leaf, as the function returns it.
    """

    tree: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]


class SampleFunction:
    """A function that reads samples. Workers keep it for as long as this object lives."""

    def __init__(self, read: ReadSamples) -> None:
        self.read = read


def read_samples(read: ReadSamples, start: int, stop: int, form: BatchForm) -> list[np.ndarray[Any, Any]]:
    """The leaves of one batch that holds the samples from `start` to `stop`.

    Raises MinialpaError if the function returns no such batch.
    """
    call = f"input_iter_func({start}, {stop}, {stop - start})"
    batch = next(iter(read(start, stop, stop - start)), None)
    if batch is None:
        raise MinialpaError(f"`{call}` returned no batch. It has to return one of {stop - start} examples.")

    found, tree = jax.tree.flatten(batch)
    if str(tree) != form.tree:
        raise MinialpaError(f"`{call}` returned a batch with the structure {tree}, and the first one had {form.tree}.")
    leaves = [np.asarray(leaf) for leaf in found]
    for leaf, shape, dtype in zip(leaves, form.shapes, form.dtypes, strict=True):
        if leaf.shape != (stop - start, *shape) or leaf.dtype != dtype:
            raise MinialpaError(
                f"`{call}` returned an array of shape {leaf.shape} and dtype {leaf.dtype}, where batches have examples "
                f"of shape {shape} and dtype {dtype}. It has to return {stop - start} of these."
            )
    return leaves


class UnreadBatch:
    """A batch that is still to be read.

    Attributes:
        function: reads it.
        first: its first sample.
        size: how many samples it has.
        form: what it is made of.
    """

    def __init__(self, function: SampleFunction, first: int, size: int, form: BatchForm) -> None:
        self.function, self.first, self.size, self.form = function, first, size, form
        self._lock = threading.Lock()
        self._leaves: list[Any] | None = None

    def read(self) -> list[Any]:
        """The leaves, read in this process, once."""
        with self._lock:
            if self._leaves is None:
                self._leaves = read_samples(self.function.read, self.first, self.first + self.size, self.form)
            return self._leaves


class UnreadArray(RemoteArray):
    """One leaf of a batch that is still to be read. Asking for its value reads the batch in this process.

    Attributes:
        batch: the batch.
        leaf: the number of the leaf in it.
    """

    def __init__(self, batch: UnreadBatch, leaf: int, kind: Any) -> None:
        """kind: the type that jax gives the leaf."""
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
        """read: as `ReadSamples`. repeats: whether another epoch begins where one ends.

        is_read_elsewhere: asked before each batch: whether other processes are to read it, if they can.
        """
        self._function = SampleFunction(read)
        self._n_samples, self._batch_size, self._repeats = n_samples, batch_size, repeats
        self._is_read_elsewhere = is_read_elsewhere
        self._next = 0
        self._form: tuple[Any, BatchForm, list[Any]] | None = None
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
            return self._unread(first)
        batch = self._read_here(first, size)
        self._next += 1
        if batch is None:  # the function leaves out a smaller batch at the end of an epoch
            return next(self)
        if size == self._batch_size and self._form is None:
            self._form = _form_of(batch, size)
        return batch

    def _unread(self, first: int) -> Any:
        assert self._form is not None
        tree, form, kinds = self._form
        batch = UnreadBatch(self._function, first, self._batch_size, form)
        return jax.tree.unflatten(tree, [UnreadArray(batch, i, kind) for i, kind in enumerate(kinds)])

    def _read_here(self, first: int, size: int) -> Any:
        """The batch from sample `first` on, read by the iterator that has read the one before it, or else by a new one.

        None if the function ends in place of a last batch that is smaller than the others.
        """
        if self._open is None or self._open[0] != first:
            self._open = first, iter(self._function.read(first, self._n_samples, self._batch_size))
        batch = next(self._open[1], None)
        self._open = (first + size, self._open[1]) if batch is not None and first + size < self._n_samples else None
        if batch is None and size < self._batch_size:
            return None

        where = f"At sample {first} of {self._n_samples}, `input_iter_func`"
        if batch is None:
            raise MinialpaError(f"{where} has ended. `num_samples` is the number of samples that it reads.")
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())}
        if len(sizes) == 1 and sizes != {size}:
            raise MinialpaError(
                f"{where} has returned a batch of {sizes.pop()} examples, and {size} were asked for. Batches have "
                "`batch_size` examples, but for the last one of an epoch."
            )
        return batch


def _form_of(batch: Any, size: int) -> tuple[Any, BatchForm, list[Any]] | None:
    """The pytree, form and leaf types of batches like this one; None if some leaf is no array of numbers by example."""
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
    """Ranges (start, stop) in order, those that touch or overlap as one."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)
