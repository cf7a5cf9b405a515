"""Batches for training steps, read ahead and laid out as the step reads them.

A `DataLoader` takes batches from any iterator, in a thread of its own, and asks the parallelized step to lay them out
(`ParallelizedFunc.place_batch`), while the step works on earlier ones. Its state says which batches the loop has
received, so that training which was interrupted goes on with the next one.

The thread knows the source and the queue, not the loader. So a loader that nobody refers to is collected, and this
ends its thread.
"""

from __future__ import annotations

import atexit
import copy
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import jax
import numpy as np

from minialpa.arrays import own_copy
from minialpa.errors import MinialpaError, ShardingError
from minialpa.plan import PlacementSpec
from minialpa.samples import ReadSamples, SampleBatches, UnreadArray
from minialpa.session import running_session

OnRagged = Literal["fewer", "error", "drop"]

#: Seconds that closing a loader waits for a source to return, and that the end of the process does.
_CLOSE_S, _EXIT_S = 1.0, 5.0


class PlacesBatches(Protocol):
    """What a loader needs of a step, see `ParallelizedFunc`."""

    def place_batch(self, batch: Any) -> Any: ...


class DataLoader(Iterator[Any]):
    """The batches of a source, in its order, each on the devices and in the shardings in which the step reads it.

    It goes through the source once and is read by one thread. The first batches, until the step has compiled a program
    for their shapes (by a call or `get_executable`), are NumPy arrays: the step lays these out itself. Leaves that the
    step cuts into micro-batches are `MicroBatchedArray`s, which `np.asarray` reads. All of them are copies, so the
    source may use its buffers again.

    A loader is also a context manager, which closes it.
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[], Iterable[Any]],
        step: PlacesBatches,
        prefetch_size: int = 2,
        *,
        on_ragged: OnRagged = "fewer",
    ) -> None:
        """Nothing is read before the first `next`.

        source: an iterator, an iterable, or a function without arguments that returns one. Its items are batches:
            pytrees of arrays with examples along dimension 0, or tuples of these, one for each of the step's
            `batch_argnums`.
        step: the function that `parallelize` returned, which the batches are for.
        prefetch_size: how many batches wait in the queue at most; each takes memory of the devices.
        on_ragged: what to do with a batch that has fewer examples than the first one. "fewer": hand it over; the step
            plans and compiles for its size. "error": raise ShardingError, which names the sizes. "drop": leave it out.
            The latter two raise ShardingError for a batch with more examples.
        """
        _check_arguments(step, prefetch_size, on_ragged)
        self._batches = _Batches(_Source(source), step, on_ragged)
        self._prefetch_size = prefetch_size
        self._reader: _Reader | None = None
        self._stop_reader: Callable[[], object] = lambda: None
        self._state: dict[str, Any] | None = None
        self._is_closed = self._has_ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next batch. Raises what the source, or laying the batch out, raised; the loader has ended then."""
        if self._is_closed:
            raise MinialpaError("The loader is closed. Make another one, and give it the state of this one to go on.")
        if self._reader is None:
            self._start()
        assert self._reader is not None
        if self._has_ended:
            raise StopIteration

        outcome = self._reader.take()
        if outcome is None and self._is_closed:
            raise MinialpaError("The loader was closed by another thread.")
        if isinstance(outcome, _Failed):
            try:
                raise outcome.error
            finally:
                del outcome  # which the error would else keep alive by its traceback, and be kept alive by
        if outcome is None:
            raise StopIteration
        self._state = outcome.state
        return outcome.batch

    def _start(self) -> None:
        self._state = self._batches.state()
        self._reader = _Reader(self._batches, self._prefetch_size)
        self._stop_reader = weakref.finalize(self, self._reader.stop)
        self._reader.start()

    # ---- the state ------------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Which batches `next` has returned: those that only wait in the queue are read again by who goes on from here.

        It holds the source's own state, if the source has one (`get_state` or `state_dict`), and else counts batches.
        It is a value, and JSON if the source's state is.
        """
        return copy.deepcopy(self._batches.state() if self._state is None else self._state)

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that was received last when `state` was taken, from this or another loader.

        A source without a state of its own is opened again, and its first batches are read and left out. Raises
        MinialpaError if that cannot be: an iterator that is already behind them, or a source that ends before.
        """
        if self._is_closed:
            raise MinialpaError("The loader is closed. Make another one and set its state.")
        self._end_reader()
        self._state, self._has_ended = None, False
        self._batches.restore(copy.deepcopy(state))

    # ---- the end --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Have `next` say that there are no more batches, also where it is waiting for the source.

        It waits for nothing, so that the handler of a signal may call it.
        """
        self._has_ended = True
        if self._reader is not None:
            self._reader.end()

    def close(self) -> None:
        """End the thread, or have it end when the source returns, if that blocks. Calling it twice is fine.

        The source itself is not closed. It has been read ahead, so nothing else should read on from it.
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


class MeshDriverDataLoader(DataLoader):
    """A `DataLoader` with Alpa's arguments, over the samples 0 to `num_samples` of a data set.

    Batch k of an epoch has the samples from k * batch_size on, in order, wherever they are read. In a session on a
    cluster, each worker reads the samples that its devices hold, and no sample passes through the calling process,
    except for the first batches, until the step has compiled a program for them, and the last batch of an epoch if it
    is smaller. In one process, and for batches with leaves that are no arrays of numbers with examples along dimension
    0, the calling process reads all.

    What the function raises in a worker is raised by `next` as a WorkerError, with the traceback of the worker.
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
            `start` to `end`. A sample may not depend on the range that it is read in. The calling process calls it for
            the rest of an epoch, workers call it for the rows of one batch at a time: what takes long to open should be
            kept, by `functools.cache` for example. It is pickled for the workers.
        step, prefetch_size, on_ragged: as in `DataLoader`. Alpa has placement specs in place of the step.
        repeat: whether another epoch begins where one ends.
        """
        for name, value in (("batch_size", batch_size), ("num_samples", num_samples)):
            if not isinstance(value, int) or value < 1:
                raise MinialpaError(f"`{name}` is a positive number; got {value!r}.")
        batches = SampleBatches(
            input_iter_func,
            n_samples=num_samples,
            batch_size=batch_size,
            repeats=repeat,
            is_read_elsewhere=_has_workers,
        )
        super().__init__(batches, step, prefetch_size, on_ragged=on_ragged)


def _has_workers() -> bool:
    session = running_session()
    return session is not None and session.runtime is not None


def _check_arguments(step: Any, prefetch_size: Any, on_ragged: Any) -> None:
    if any(isinstance(x, PlacementSpec) for x in jax.tree.leaves(step, is_leaf=lambda x: isinstance(x, PlacementSpec))):
        raise MinialpaError(
            "A loader takes the parallelized step in place of Alpa's placement specs: its program also knows the "
            "devices. Pass the function that `parallelize` returned."
        )
    if not hasattr(step, "place_batch"):
        raise MinialpaError(f"`step` is the function that `parallelize` returned; got a {type(step).__name__}.")
    if not isinstance(prefetch_size, int) or prefetch_size < 1:
        raise MinialpaError(f"`prefetch_size` is the number of batches to hold, 1 or more; got {prefetch_size!r}.")
    if on_ragged not in ("fewer", "error", "drop"):
        raise MinialpaError(f'`on_ragged` is "fewer", "error" or "drop"; got {on_ragged!r}.')


# ---- the source -----------------------------------------------------------------------------------------------------


class _Source:
    """Batches as they come, and the state behind the last of them.

    Attributes:
        n_read: how many were read, by this source or the one whose state it has taken over.
    """

    def __init__(self, given: Any) -> None:
        is_factory = callable(given) and not isinstance(given, Iterable)
        if not is_factory and not isinstance(given, Iterable):
            raise MinialpaError(
                f"`source` is an iterator, an iterable or a function that returns one; got a {type(given).__name__}."
            )
        self._given, self._open = given, given if is_factory else lambda: given
        self._is_one_shot = isinstance(given, Iterator)
        self._iterator: Iterator[Any] | None = None
        self.n_read = 0

    def read(self) -> Any:
        batch = next(self._opened())
        self.n_read += 1
        return batch

    def state(self) -> Any:
        """That of the source, as it is now; None if it has none, or none yet."""
        for holder in (self._opened(), self._given):
            if methods := state_methods(holder):
                get, _ = methods
                return copy.deepcopy(get())
        return None

    def restore(self, n_read: int, state: Any) -> None:
        """Go on behind the first `n_read` batches, where the source has the state `state`."""
        if state is None:
            self._skip_to(n_read)
            return
        opened = self._opened()
        for holder in (opened, self._given):
            if methods := state_methods(holder):
                _, set_ = methods
                try:
                    set_(state)
                except Exception as error:
                    raise MinialpaError(
                        f"`{set_.__name__}` of the source, a {type(holder).__name__}, raised {type(error).__name__} "
                        f"for the state {_shortened(state)}: {error}. Pass a state of this kind of source."
                    ) from error
                # The state of an iterable is that of the next iteration over it.
                self._iterator = opened if holder is opened else iter(self._given)
                self.n_read = n_read
                return
        raise MinialpaError(
            "The state holds that of a source with `get_state` or `state_dict`, and this source has neither. Make the "
            "loader with the source that the state was taken of."
        )

    def _skip_to(self, n_read: int) -> None:
        """Read and leave out batches until `n_read` were read."""
        if self._is_one_shot and n_read < self.n_read:
            raise MinialpaError(
                f"The iterator has given {self.n_read} batches, and the state is that behind batch {n_read}. Make the "
                "loader with a function that returns a new iterator, or with a new iterator."
            )
        if not self._is_one_shot:
            self._iterator, self.n_read = None, 0
        while self.n_read < n_read:
            try:
                self.read()
            except StopIteration:
                raise MinialpaError(
                    f"The state is that behind batch {n_read}, and the source ends after {self.n_read} batches. It "
                    "has to give the batches that it gave when the state was taken."
                ) from None

    def _opened(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._open())
        return self._iterator


def state_methods(source: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """The methods that read and set the state of a source: those of grain, or those of torch and Hugging Face.

    None if it has neither pair.
    """
    for getter, setter in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(source, getter) and hasattr(source, setter):
            return getattr(source, getter), getattr(source, setter)
    return None


@dataclass(frozen=True, slots=True)
class _Read:
    """A batch, and the loader's state once somebody has received it."""

    batch: Any
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Failed:
    """What was raised in place of a batch."""

    error: BaseException


#: None is the end of the source.
_Outcome = _Read | _Failed | None


class _Batches:
    """The batches of a source that are handed over, laid out for a step. One thread at a time uses it."""

    def __init__(self, source: _Source, step: PlacesBatches, on_ragged: OnRagged) -> None:
        self._source, self._step, self._on_ragged = source, step, on_ragged
        self._first_sizes: list[int] | None = None

    def read(self) -> _Outcome:
        """The next one as the source has it, or what was raised in its place. Raises nothing."""
        try:
            batch = self._source.read()
            while not self._is_wanted(batch):
                batch = self._source.read()
        except StopIteration:
            return None
        except BaseException as error:
            return _Failed(error)

        # Apart from the above: a StopIteration of this is an error, and no end.
        try:
            return _Read(batch, self.state())
        except BaseException as error:
            return _Failed(error)

    def lay_out(self, outcome: _Outcome) -> _Outcome:
        """A batch that was read as the step reads it, or what was raised in its place. Raises nothing."""
        if not isinstance(outcome, _Read):
            return outcome
        try:
            return _Read(self._laid_out(outcome.batch), outcome.state)
        except BaseException as error:
            return _Failed(error)

    def state(self) -> dict[str, Any]:
        """The loader's state behind the last batch that was read."""
        return {"batches": self._source.n_read, "sizes": self._first_sizes, "source": self._source.state()}

    def restore(self, state: Any) -> None:
        """Go on behind the batch of a state."""
        if not _is_state(state):
            raise MinialpaError(f"This is no state of a loader, as `get_state` returns it: {_shortened(state)}.")
        self._source.restore(state["batches"], state["source"])
        self._first_sizes = state["sizes"]

    def _laid_out(self, batch: Any) -> Any:
        """The batch as the step reads it. It shares no memory with that of the source."""
        placed = self._step.place_batch(batch)
        leaves = jax.tree.leaves(placed)
        if leaves and all(isinstance(leaf, UnreadArray) for leaf in leaves):
            # No program takes it yet. Workers leave some leaves unread if no stage reads them; those stay so.
            placed = jax.tree.map(np.asarray, placed)
        return jax.tree.map(_owned, placed)

    def _is_wanted(self, batch: Any) -> bool:
        """Whether to hand the batch over. Raises ShardingError for a size that `on_ragged` refuses."""
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
                f"Batch {self._source.n_read} has {_text(sizes)} examples, and the first one had "
                f'{_text(self._first_sizes)} (`on_ragged="{self._on_ragged}"`). Use `on_ragged="fewer"` to plan and '
                f"run it as it is{hint}."
            )
        return False


def _owned(leaf: Any) -> Any:
    """A leaf of a batch, if it is a NumPy array as a copy. Steps take no Python objects, but loops may."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    return leaf.copy() if leaf.dtype.hasobject else own_copy(leaf)


def _is_state(state: Any) -> bool:
    if not isinstance(state, dict) or state.keys() != {"batches", "sizes", "source"}:
        return False
    sizes = [] if state["sizes"] is None else state["sizes"]
    return isinstance(sizes, list) and all(type(count) is int and count >= 0 for count in (state["batches"], *sizes))


def _shortened(state: Any) -> str:
    text = repr(state)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _text(sizes: list[int]) -> str:
    """The numbers of examples of the leaves: one number if they agree."""
    return str(sizes[0]) if len(set(sizes)) == 1 else str(sizes)


# ---- the thread -----------------------------------------------------------------------------------------------------


class _Reader:
    """A thread that reads batches into a queue, as far as there is room, until it is stopped or they end."""

    def __init__(self, batches: _Batches, room: int) -> None:
        self._batches, self._room = batches, room
        self._changed = threading.Condition()
        self._queue: deque[_Outcome] = deque()
        self._has_ended = self._is_stopped = False
        # A daemon, because a source may block for ever, and the process should end nevertheless.
        self._thread = threading.Thread(target=self._run, name="minialpa data loader", daemon=True)

    def start(self) -> None:
        # A thread that is inside of jax when the interpreter ends would abort the process.
        atexit.register(self._end_with_process)
        self._thread.start()

    def take(self) -> _Outcome:
        """The next outcome, once it is there; None from the end on, after an error, and when the reader is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._has_ended or self._is_stopped)
            if self._is_stopped or not self._queue:
                return None
            outcome = self._queue.popleft()
            self._changed.notify_all()
            return outcome

    def stop(self) -> None:
        """Have the thread end, and forget the queue. Garbage collection calls this, so it does not wait."""
        with self._changed:
            self.end()
            self._queue.clear()

    def end(self) -> None:
        """As `stop`, but the queue stays: a signal may come while this very thread takes a batch from it."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def join(self, timeout_s: float | None) -> None:
        """Wait until the thread has ended, for as long as that."""
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
        while not self._has_ended and self._wait_for_room():
            outcome = self._batches.read()
            # Nobody may be left to wait until a batch is laid out, if the source has returned late.
            if not self._is_stopped:
                outcome = self._batches.lay_out(outcome)
            with self._changed:
                if not self._is_stopped:
                    self._queue.append(outcome)
                    self._has_ended = not isinstance(outcome, _Read)
                    self._changed.notify_all()
            # Else this would keep a batch that the loop has done with, until the next one is there.
            del outcome

    def _wait_for_room(self) -> bool:
        """Whether to read on, once there is room."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or len(self._queue) < self._room)
            return not self._is_stopped
