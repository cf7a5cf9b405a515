"""A source of batches goes in; batches on the devices, laid out as the step reads them, come out.

A thread reads ahead. It does not refer to the loader, so that garbage collection of a loader ends it.
"""

from __future__ import annotations

import atexit
import copy
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import jax
import numpy as np

from minialpa.arrays import own_copy
from minialpa.errors import MinialpaError, ShardingError
from minialpa.field_types import Count, check_value
from minialpa.plan import PlacementSpec
from minialpa.samples import ReadSamples, SampleBatches, UnreadArray
from minialpa.session import has_workers
from minialpa.support.private_jax import api_boundaries

OnRagged = Literal["fewer", "error", "drop"]

#: Seconds that `close`, and the end of the process, wait for a source.
_CLOSE_S, _EXIT_S = 1.0, 5.0


class PlacesBatches(Protocol):
    def place_batch(self, batch: Any) -> Any: ...


@api_boundaries
class DataLoader(Iterator[Any]):
    """The batches of a source, in order, on the devices and in the shardings in which the step reads them.

        with DataLoader(lambda: iter(batches), step) as loader:
            for batch in loader:
                state, loss = step(state, batch)

    A loader reads its source once, for one thread. Batches are NumPy arrays until the step has compiled a program for
    their shapes, by a call or `get_executable`. Leaves that the step cuts into micro-batches are `MicroBatchedArray`s,
    which `np.asarray` reads. All leaves are copies, so the source may reuse its buffers.
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[], Iterable[Any]],
        step: PlacesBatches,
        prefetch_size: int = 2,
        *,
        on_ragged: OnRagged = "fewer",
    ) -> None:
        """Reads no batch before the first `next`.

        source: an iterator, an iterable, or a function that returns one. A batch is a pytree of arrays with examples
            along dimension 0, or a tuple of such pytrees, one for each of `batch_argnums`.
        step: the function that `parallelize` returned.
        prefetch_size: most batches in the queue, each of which takes memory of the devices.
        on_ragged: for a batch with fewer examples than the first one. "fewer" returns it, and the step plans and
            compiles for its size. "drop" leaves it out. "error" raises ShardingError. "error" and "drop" also raise
            ShardingError for a batch with more examples.

        Raises MinialpaError for other values.
        """
        _check_arguments(step, prefetch_size, on_ragged)
        self._batches = _Batches(_Source(source), step, on_ragged)
        self._prefetch_size = prefetch_size
        self._reader: _ReaderThread | None = None
        self._stop_reader: Callable[[], object] = lambda: None
        self._state: dict[str, Any] | None = None
        self._is_closed = self._has_ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next batch. Raises errors of the source or of laying out the batch, which end the loader."""
        if self._is_closed:
            raise MinialpaError(
                "The loader is closed. Make a new `DataLoader`. To continue after the last batch of the closed loader, "
                "call `new.set_state(closed.get_state())`."
            )
        if self._reader is None:
            self._start()
        assert self._reader is not None
        if self._has_ended:
            raise StopIteration

        outcome = self._reader.take()
        if outcome is None and self._is_closed:
            raise MinialpaError(
                "Another thread closed the loader during this call. Make another `DataLoader` to go on."
            )
        if isinstance(outcome, _ReadError):
            try:
                raise outcome.error
            finally:
                del outcome  # it refers to the error, and the traceback of the error refers to it
        if outcome is None:
            raise StopIteration
        self._state = outcome.state
        return outcome.batch

    def _start(self) -> None:
        self._state = self._batches.state()
        self._reader = _ReaderThread(self._batches, self._prefetch_size)
        self._stop_reader = weakref.finalize(self, self._reader.stop)
        self._reader.start()

    # ---- the state ------------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch that `next` returned, for `set_state`.

        It is the source's own state (`get_state` or `state_dict`), or else a count of batches; JSON if the source's
        state is.
        """
        return copy.deepcopy(self._batches.state() if self._state is None else self._state)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which this or another loader gave `state`.

        A source without a state is reopened, and its first batches are skipped. Raises MinialpaError for an iterator
        that is past them, and for a source that ends before them.
        """
        if self._is_closed:
            raise MinialpaError("The loader is closed. Make another `DataLoader`, and call its `set_state`.")
        self._end_reader()
        self._state, self._has_ended = None, False
        self._batches.restore(copy.deepcopy(state))

    # ---- the end --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the batches, even while `next` waits. Returns at once, so signal handlers may call it."""
        self._has_ended = True
        if self._reader is not None:
            self._reader.end()

    def close(self) -> None:
        """End the thread, at the latest when a blocking source returns. You may call it twice.

        The source stays open; do not read it further, since the loader has read ahead.
        """
        self._is_closed = True
        self._end_reader(_CLOSE_S)

    def _end_reader(self, timeout_s: float | None = None) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            self._stop_reader()
            reader.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@api_boundaries
class MeshDriverDataLoader(DataLoader):
    """A `DataLoader` with Alpa's arguments, over the samples 0 to `num_samples` of a data set.

    Batch k of an epoch has the samples from k * batch_size on, in order. On a cluster, each worker reads the samples of
    its devices. The calling process reads the others: batches without a program, a smaller last batch of an epoch, and
    batches with leaves other than arrays of numbers with examples along dimension 0.

    An error in a worker makes `next` raise a WorkerError with the worker's traceback.
    """

    def __init__(
        self,
        batch_size: int,
        num_samples: int,
        input_iter_func: ReadSamples,
        step: PlacesBatches,
        prefetch_size: int = 1,
        repeat: bool = False,
        *,
        on_ragged: OnRagged = "fewer",
    ) -> None:
        """batch_size: examples of a batch, of all hosts together.

        num_samples: examples of an epoch.
        input_iter_func: called with (start, end, batch_size), returns an iterator over the batches of the samples from
            `start` to `end`. A sample must not depend on this range. The calling process calls it for the rest of an
            epoch, workers for parts of one batch: keep files that open slowly, for example by `functools.cache`. It is
            pickled for the workers.
        step, prefetch_size, on_ragged: as in `DataLoader`. In Alpa, placement specs take the place of the step.
        repeat: whether epochs repeat.
        """
        check_value("batch_size", batch_size, Count, MinialpaError)
        check_value("num_samples", num_samples, Count, MinialpaError)
        check_value("repeat", repeat, bool, MinialpaError)
        check_value("input_iter_func", input_iter_func, ReadSamples, MinialpaError)
        batches = SampleBatches(
            input_iter_func,
            n_samples=num_samples,
            batch_size=batch_size,
            repeats=repeat,
            is_read_elsewhere=has_workers,
        )
        super().__init__(batches, step, prefetch_size, on_ragged=on_ragged)


def _check_arguments(step: Any, prefetch_size: Any, on_ragged: Any) -> None:
    if any(isinstance(x, PlacementSpec) for x in jax.tree.leaves(step, is_leaf=lambda x: isinstance(x, PlacementSpec))):
        raise MinialpaError(
            "`step` has placement specs of Alpa. Pass the function that `parallelize` returned, whose program knows "
            "the devices."
        )
    if not hasattr(step, "place_batch"):
        raise MinialpaError(f"Pass the function that `parallelize` returned as `step`; got a {type(step).__name__}.")
    check_value("prefetch_size", prefetch_size, Count, MinialpaError)
    check_value("on_ragged", on_ragged, OnRagged, MinialpaError)


# ---- the source -----------------------------------------------------------------------------------------------------


class _Source:
    """`n_read` counts batches before a restored state, too."""

    def __init__(self, given: Any) -> None:
        is_factory = callable(given) and not isinstance(given, Iterable)
        is_single = isinstance(given, Mapping | str | bytes)
        if is_single or not (is_factory or isinstance(given, Iterable)):
            looks = ", which looks like a single batch" if is_single else ""
            raise MinialpaError(
                "Pass an iterator over batches, an iterable of batches, or a function that returns one as `source`; "
                f"got a {type(given).__name__}{looks}."
            )
        self._given, self._open = given, given if is_factory else lambda: given
        self._is_one_shot = isinstance(given, Iterator)
        self._iterator: Iterator[Any] | None = None
        self.n_read = 0

    def read(self) -> Any:
        batch = next(self._opened_iterator())
        self.n_read += 1
        return batch

    def state(self) -> Any:
        """The source's own state, if any."""
        for holder in (self._opened_iterator(), self._given):
            if methods := state_methods(holder):
                get, _ = methods
                return copy.deepcopy(get())
        return None

    def restore(self, n_read: int, state: Any) -> None:
        if state is None:
            self._skip_to(n_read)
            return
        opened = self._opened_iterator()
        for holder in (opened, self._given):
            if methods := state_methods(holder):
                _, set_ = methods
                try:
                    set_(state)
                except Exception as error:
                    raise MinialpaError(
                        f"`{set_.__name__}` of the source, a {type(holder).__name__}, raised {type(error).__name__} "
                        f"for the state {_short_text(state)}: {error}. Pass a state that a loader with this kind of "
                        "source returned."
                    ) from error
                # The state of an iterable is the state of the next iteration over it.
                self._iterator = opened if holder is opened else iter(self._given)
                self.n_read = n_read
                return
        raise MinialpaError(
            "The state comes from a source with `get_state` or `state_dict`, and this source has neither. Make the "
            "loader with the same source."
        )

    def _skip_to(self, n_read: int) -> None:
        """Open the source anew if possible, and drop `n_read` batches."""
        if self._is_one_shot and n_read < self.n_read:
            raise MinialpaError(
                f"The iterator has given {self.n_read} batches, and the state is from after batch {n_read}. Make the "
                "loader from a function that returns a new iterator, or from a new iterator."
            )
        if not self._is_one_shot:
            self._iterator, self.n_read = None, 0
        while self.n_read < n_read:
            try:
                self.read()
            except StopIteration:
                raise MinialpaError(
                    f"The state is from after batch {n_read}, and the source ends after {self.n_read} batches. Make "
                    "the loader with a source that gives the same batches as before."
                ) from None

    def _opened_iterator(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._open())
        return self._iterator


def state_methods(source: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """The methods that read and set a source's state, as named by grain, torch or Hugging Face."""
    for getter, setter in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(source, getter) and hasattr(source, setter):
            return getattr(source, getter), getattr(source, setter)
    return None


@dataclass(frozen=True, slots=True)
class _ReadBatch:
    batch: Any
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _ReadError:
    error: BaseException


#: None is the end of the source.
_Outcome = _ReadBatch | _ReadError | None


class _Batches:
    """Without dropped batches. For one thread at a time."""

    def __init__(self, source: _Source, step: PlacesBatches, on_ragged: OnRagged) -> None:
        self._source, self._step, self._on_ragged = source, step, on_ragged
        self._first_sizes: list[int] | None = None

    def read(self) -> _Outcome:
        """An error of the source is a value."""
        try:
            batch = self._source.read()
            while not self._is_accepted(batch):
                batch = self._source.read()
        except StopIteration:
            return None
        except BaseException as error:
            return _ReadError(error)

        # Separate from the block above: a StopIteration of `state` is an error.
        try:
            return _ReadBatch(batch, self.state())
        except BaseException as error:
            return _ReadError(error)

    def lay_out(self, outcome: _Outcome) -> _Outcome:
        if not isinstance(outcome, _ReadBatch):
            return outcome
        try:
            return _ReadBatch(self._laid_out_batch(outcome.batch), outcome.state)
        except BaseException as error:
            return _ReadError(error)

    def state(self) -> dict[str, Any]:
        return {"batches": self._source.n_read, "sizes": self._first_sizes, "source": self._source.state()}

    def restore(self, state: Any) -> None:
        if not _is_state(state):
            raise MinialpaError(f"Pass a state that `get_state` of a loader returned; got {_short_text(state)}.")
        self._source.restore(state["batches"], state["source"])
        self._first_sizes = state["sizes"]

    def _laid_out_batch(self, batch: Any) -> Any:
        """The placed batch, in memory that the source does not share."""
        placed = self._step.place_batch(batch)
        leaves = jax.tree.leaves(placed)
        if leaves and all(isinstance(leaf, UnreadArray) for leaf in leaves):
            # No program exists yet: with one, workers leave only leaves unread that no stage reads.
            placed = jax.tree.map(np.asarray, placed)
        return jax.tree.map(_owned_leaf, placed)

    def _is_accepted(self, batch: Any) -> bool:
        if self._on_ragged == "fewer":
            return True
        sizes = [leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())]
        if self._first_sizes is None:
            self._first_sizes = sizes
        if sizes == self._first_sizes:
            return True

        has_more = len(sizes) != len(self._first_sizes) or any(map(int.__gt__, sizes, self._first_sizes))
        if self._on_ragged == "error" or has_more:
            hint = "" if has_more else ', or "drop" to leave it out'
            raise ShardingError(
                f"Batch {self._source.n_read} has {_sizes_text(sizes)} examples, and the first one had "
                f'{_sizes_text(self._first_sizes)} (`on_ragged="{self._on_ragged}"`). Use `on_ragged="fewer"` to plan '
                f"and run this size{hint}."
            )
        return False


def _owned_leaf(leaf: Any) -> Any:
    """Arrays of Python objects are for the loop, not for the step."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    return leaf.copy() if leaf.dtype.hasobject else own_copy(leaf)


def _is_state(state: Any) -> bool:
    if not isinstance(state, dict) or state.keys() != {"batches", "sizes", "source"}:
        return False
    sizes = [] if state["sizes"] is None else state["sizes"]
    return isinstance(sizes, list) and all(type(count) is int and count >= 0 for count in (state["batches"], *sizes))


def _short_text(state: Any) -> str:
    text = repr(state)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _sizes_text(sizes: list[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else str(sizes)


# ---- the thread -----------------------------------------------------------------------------------------------------


class _ReaderThread:
    """At most `max_queued` batches wait in its queue."""

    def __init__(self, batches: _Batches, max_queued: int) -> None:
        self._batches, self._max_queued = batches, max_queued
        self._changed = threading.Condition()
        self._queue: deque[_Outcome] = deque()
        self._has_ended = self._is_stopped = False
        # A daemon, so that the process can end although a source blocks.
        self._thread = threading.Thread(target=self._run, name="minialpa data loader", daemon=True)

    def start(self) -> None:
        # A thread inside jax aborts the process when the interpreter ends.
        atexit.register(self._end_with_process)
        self._thread.start()

    def take(self) -> _Outcome:
        """None at the end, after an error, and after `stop` or `end`."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._has_ended or self._is_stopped)
            if self._is_stopped or not self._queue:
                return None
            outcome = self._queue.popleft()
            self._changed.notify_all()
            return outcome

    def stop(self) -> None:
        """Clear the queue, too, without waiting, for garbage collection."""
        with self._changed:
            self.end()
            self._queue.clear()

    def end(self) -> None:
        """Keep the queue: a signal may come while the main thread takes a batch."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def join(self, timeout_s: float | None) -> None:
        self._thread.join(timeout_s)

    def _end_with_process(self) -> None:
        self.stop()
        self._thread.join(_EXIT_S)

    def _run(self) -> None:
        try:
            self._fill_queue()
        finally:
            atexit.unregister(self._end_with_process)

    def _fill_queue(self) -> None:
        while not self._has_ended and self._wait_for_space():
            outcome = self._batches.read()
            # After `stop`, no loop waits for the batch.
            if not self._is_stopped:
                outcome = self._batches.lay_out(outcome)
            with self._changed:
                if not self._is_stopped:
                    self._queue.append(outcome)
                    self._has_ended = not isinstance(outcome, _ReadBatch)
                    self._changed.notify_all()
            # This name would keep a used batch alive until the next batch.
            del outcome

    def _wait_for_space(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or len(self._queue) < self._max_queued)
            return not self._is_stopped
