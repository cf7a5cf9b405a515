"""Loaders give the batches of their source in order, each once, laid out for the step, also after an interruption."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minialpa
from minialpa import AutoLayerOption, DataLoader, DataParallel, MeshDriverDataLoader, PipeshardParallel, ShardParallel
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.distributed_array import DistributedArray
from minialpa.session import running_session
from minialpa.testing import assert_allclose
from tests.runtime.cluster.in_process_session import in_process_session
from tests.two_layers import make_batch, make_params, train_step


def numbered(n_batches: int, last: int = 2) -> Callable[[], Iterator[Any]]:
    """A factory of `n_batches` batches of two examples, the last of which has `last`; each holds its number."""
    return lambda: (np.full((2 if i < n_batches - 1 else last, 1), i) for i in range(n_batches))


def numbers(batches: Any) -> list[int]:
    return [int(np.asarray(batch).flat[0]) for batch in batches]


def unused_step() -> Any:
    return minialpa.parallelize(lambda state, batch: (state, jnp.sum(batch)))


def n_reader_threads() -> int:
    return sum(thread.name == "minialpa data loader" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = n_reader_threads()
    yield
    wait_until(lambda: n_reader_threads() <= before)


def wait_until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.005)


# ---- training -------------------------------------------------------------------------------------------------------

METHODS = {
    "data": DataParallel(),
    "pipeline": PipeshardParallel(
        num_micro_batches=4, layer_option=AutoLayerOption(layer_num=2), stage_option="uniform"
    ),
}


def check_training(step: Any, n_batches: int = 5) -> list[Any]:
    """Training from a loader equals training from the batches themselves; returns the batches of the loader."""
    params = expected = make_params()
    step.get_executable(params, make_batch(0))
    received = []
    with DataLoader((make_batch(i) for i in range(n_batches)), step) as loader:
        for i, batch in enumerate(loader):
            received.append(batch)
            params, value = step(params, batch)
            expected, wanted = train_step(expected, make_batch(i))
            assert_allclose((params, value), (expected, wanted), rtol=1e-4, atol=1e-6)
    assert len(received) == n_batches
    return received


@pytest.mark.parametrize(("name", "on_workers"), [("data", False), ("pipeline", False), ("pipeline", True)])
def test_training_from_a_loader_is_training_from_the_batches(name: str, on_workers: bool) -> None:
    with in_process_session(2, 2) if on_workers else nullcontext():
        step = minialpa.parallelize(train_step, method=METHODS[name])
        received = check_training(step)
        specs = step.get_last_executable().get_input_placement_specs()[1]
        for i, batch in enumerate(received):
            assert_allclose(batch, make_batch(i), rtol=0, atol=0)
            for field, leaf in batch.items():
                parts = leaf.stored_as if name == "pipeline" else [leaf]
                assert len(parts) == (4 if name == "pipeline" else 1)
                if on_workers:
                    assert all(isinstance(part, DistributedArray) for part in parts)
                else:
                    assert all(part.sharding.spec == specs[field].partition_specs[0] for part in parts)


def test_steps_start_while_a_batch_is_on_its_way_to_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_process_session(1, 4) as runtime:
        step = minialpa.parallelize(train_step, method=ShardParallel())
        step(make_params(), make_batch(0))
        gather = ClusterRuntime.gather_noted

        def after_another_step(self: ClusterRuntime, calls: Any) -> Any:
            with ThreadPoolExecutor(1) as pool:  # another thread, which needs its turn
                pool.submit(step, make_params(), make_batch(1)).result(timeout=30)
            return gather(self, calls)

        monkeypatch.setattr(ClusterRuntime, "gather_noted", after_another_step)
        placed = step.place_batch(make_batch(2))
        monkeypatch.undo()
        assert not runtime._noted_calls
        assert_allclose(placed, make_batch(2), rtol=0, atol=0)


def test_after_a_session_a_new_loader_goes_on_in_the_next_session() -> None:
    step = minialpa.parallelize(train_step, method=ShardParallel())
    batches = [make_batch(i) for i in range(6)]
    with in_process_session(1, 4):
        step.get_executable(make_params(), make_batch(0))
        lost = DataLoader(batches, step)
        assert isinstance(next(lost)["x"], DistributedArray)
        wait_until(lambda: lost._reader is not None and len(lost._reader._queue) == 2)
    with pytest.raises(minialpa.WorkerError):
        step(make_params(), next(lost))
    lost.close()

    # That call has started a session. Without a session, batches stay in NumPy, and placing does not start one.
    minialpa.shutdown()
    assert isinstance(step.place_batch(make_batch(0))["x"], np.ndarray)
    assert running_session() is None

    with in_process_session(1, 2), DataLoader(batches, step) as loader:
        loader.set_state({**lost.get_state(), "batches": 1})
        params = expected = make_params()
        for i, batch in enumerate(loader, 1):
            params, _ = step(params, batch)
            expected, _ = train_step(expected, make_batch(i))
        assert_allclose(params, expected, rtol=1e-4, atol=1e-6)


def test_a_batch_may_be_the_parts_of_several_arguments() -> None:
    def step(labels: Any, params: Any, images: Any) -> Any:
        return params, jnp.mean((images @ params - labels) ** 2)

    parallel = minialpa.parallelize(step, method=DataParallel(), batch_argnums=(2, 0))
    images, labels, params = make_batch(0)["x"], make_batch(0)["y"], np.ones((8, 4), np.float32)
    parallel.get_executable(labels, params, images)
    (placed,) = DataLoader([(images, labels)], parallel)
    assert all(len(x.sharding.device_set) == 8 for x in placed)
    assert_allclose(placed, (images, labels), rtol=0, atol=0)
    with pytest.raises(minialpa.TraceError, match=r"A batch has 3 parts, and the step has 2 arguments with examples"):
        next(DataLoader([(images, labels, labels)], parallel))


def test_a_source_may_use_its_buffers_again() -> None:
    buffer = make_batch(0)

    def refilled() -> Iterator[Any]:
        for i in range(6):
            for name, value in make_batch(i).items():
                buffer[name][...] = value
            yield buffer

    step = minialpa.parallelize(train_step, method=METHODS["pipeline"])
    for _ in range(2):  # without a program for such batches, and with one
        for i, batch in enumerate(DataLoader(refilled(), step, prefetch_size=3)):
            assert_allclose(batch, make_batch(i), rtol=0, atol=0)
        step.get_executable(make_params(), buffer)


# ---- errors and ends ------------------------------------------------------------------------------------------------


def test_an_error_of_the_source_comes_in_its_place_with_its_traceback() -> None:
    def broken() -> Iterator[Any]:
        yield from numbered(3)()
        raise OSError("disk")

    loader = DataLoader(broken(), unused_step(), prefetch_size=8)
    assert numbers(next(loader) for _ in range(3)) == [0, 1, 2]
    with pytest.raises(OSError, match="disk") as caught:
        next(loader)
    assert "broken" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert loader.get_state()["batches"] == 3
    with pytest.raises(StopIteration):
        next(loader)


def test_closing_ends_the_thread_that_the_first_batch_starts() -> None:
    before = n_reader_threads()
    with DataLoader(numbered(100), unused_step()) as loader:
        assert n_reader_threads() == before
        next(loader)
        assert n_reader_threads() == before + 1
    assert n_reader_threads() == before
    loader.close()
    for use in (loader.__next__, lambda: loader.set_state({})):
        with pytest.raises(minialpa.MinialpaError, match="closed"):
            use()
    assert loader.get_state()["batches"] == 1


def test_a_loader_that_nobody_refers_to_ends_its_thread_and_frees_its_batches() -> None:
    before = n_reader_threads()
    made: list[weakref.ref[Any]] = []

    def source() -> Iterator[Any]:
        while True:
            batch = np.zeros((2, 1))
            made.append(weakref.ref(batch))
            yield batch

    loader = DataLoader(source(), unused_step(), prefetch_size=3)
    next(loader)
    assert n_reader_threads() == before + 1
    del loader
    wait_until(lambda: n_reader_threads() == before)
    wait_until(lambda: all(ref() is None for ref in made))


def test_a_loop_that_waits_for_a_source_can_be_interrupted() -> None:
    go_on = threading.Event()

    def blocked() -> Iterator[Any]:
        yield np.zeros((2, 1))
        go_on.wait(60)
        yield np.ones((2, 1))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start_s = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt), DataLoader(blocked, unused_step()) as loader:
            next(loader)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            next(loader)
    finally:
        signal.signal(signal.SIGINT, before)
        go_on.set()
    assert time.monotonic() - start_s < 10
    loader.close()


def test_a_process_ends_with_a_loader_that_is_open() -> None:
    code = (
        "import itertools, minialpa, numpy as np\n"
        "step = minialpa.parallelize(lambda s, b: (s, b.sum()))\n"
        "batch = np.ones((8, 4), np.float32)\n"
        "step(np.ones(3, np.float32), batch)\n"
        "loader = minialpa.DataLoader(itertools.repeat(batch), step)\n"
        "[next(loader) for _ in range(5)]\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def test_no_more_batches_are_read_than_the_queue_holds() -> None:
    read: list[int] = []
    source = (read.append(i) or np.full((2, 1), i) for i in range(100))
    loader = DataLoader(source, unused_step(), prefetch_size=3)
    assert read == []
    next(loader)
    wait_until(lambda: len(read) == 4)
    time.sleep(0.05)
    assert len(read) == 4
    loader.close()


def test_wrong_arguments_are_refused() -> None:
    wrong = {
        "`prefetch_size` must be an integer >= 1; got 0": {"prefetch_size": 0},
        "`on_ragged` must be 'fewer', 'error', or 'drop'; got 'drops'. Do you mean `drop`": {"on_ragged": "drops"},
        "Pass .* as `step`; got a function": {"step": train_step},
        "Pass .* as `source`; got a int": {"source": 3},
        "as `source`; got a dict, which looks like a single batch": {"source": {"x": np.ones(4)}},
    }
    for message, arguments in wrong.items():
        with pytest.raises(minialpa.MinialpaError, match=message):
            DataLoader(**{"source": [], "step": unused_step(), **arguments})


# ---- ragged batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_ragged", "last"), [("error", 1), ("error", 3), ("drop", 3)])
def test_a_ragged_batch_is_an_error_if_told_so_and_one_with_more_examples_is_never_dropped(
    on_ragged: Any, last: int
) -> None:
    loader = DataLoader(numbered(4, last), unused_step(), on_ragged=on_ragged)
    assert numbers(next(loader) for _ in range(3)) == [0, 1, 2]
    with pytest.raises(minialpa.ShardingError, match=f"Batch 4 has {last} examples, and the first one had 2"):
        next(loader)


# ---- going on -------------------------------------------------------------------------------------------------------


class Counting:
    """An iterator with a state, as grain's: its state is the number of the next batch. Its dict is its own."""

    def __init__(self, n_batches: int, last: int) -> None:
        self._batches, self._state = list(numbered(n_batches, last)()), {"next": 0}

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> Any:
        if self._state["next"] == len(self._batches):
            raise StopIteration
        self._state["next"] += 1
        return self._batches[self._state["next"] - 1]

    def get_state(self) -> dict[str, int]:
        return self._state

    def set_state(self, state: dict[str, int]) -> None:
        self._state = state


class Stateful:
    """An iterable with the state of its last iteration, as torch's and Hugging Face's."""

    def __init__(self, n_batches: int, last: int) -> None:
        self._batches, self._next, self._first = list(numbered(n_batches, last)()), 0, 0

    def __iter__(self) -> Iterator[Any]:
        self._next, self._first = self._first, 0
        while self._next < len(self._batches):
            self._next += 1
            yield self._batches[self._next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._first = self._next = state["next"]


SOURCES: dict[str, Callable[[int, int], Any]] = {
    "factory": numbered,
    "iterable": lambda n, last: list(numbered(n, last)()),
    "iterator": lambda n, last: numbered(n, last)(),
    "with a state": Counting,
    "iterable with a state": Stateful,
}


@settings(max_examples=30, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", SOURCES)
def test_interrupted_anywhere_the_sequence_is_the_undisturbed_one(kind: str, data: st.DataObject) -> None:
    n_batches, last = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 2]))
    on_ragged = data.draw(st.sampled_from(["fewer", "drop"]))
    wanted = list(range(n_batches - (on_ragged == "drop" and last == 1 and n_batches > 1)))
    step = unused_step()
    found: list[int] = []
    state = None
    for n_more in (*data.draw(st.lists(st.integers(0, n_batches), max_size=3)), n_batches + 1):
        source = SOURCES[kind](n_batches, last)
        with DataLoader(source, step, data.draw(st.integers(1, 4)), on_ragged=on_ragged) as loader:
            if state is not None:
                loader.set_state(json.loads(json.dumps(state)))
            for _, batch in zip(range(n_more), loader, strict=False):
                found += numbers([batch])
            state = loader.get_state()
    assert found == wanted


@pytest.mark.parametrize("kind", ["factory", "with a state"])
def test_a_loader_goes_back_to_its_own_state(kind: str) -> None:
    with DataLoader(SOURCES[kind](6, 2), unused_step()) as loader:
        states = []
        for _ in range(7):
            states.append(loader.get_state())
            next(loader, None)
        for i, state in reversed(list(enumerate(states))):
            loader.set_state(state)
            assert numbers(loader) == list(range(i, 6))


def test_states_that_do_not_fit_are_refused() -> None:
    step = unused_step()
    with DataLoader(numbered(4)(), step) as loader:
        start = loader.get_state()
        next(loader)
        with pytest.raises(
            minialpa.MinialpaError, match=r"The iterator has given .* and the state is from after batch 0"
        ):
            loader.set_state(start)
    with DataLoader(Counting(4, 2), step) as with_state:
        next(with_state)
        state = with_state.get_state()
    other = DataLoader(numbered(4), step)
    with pytest.raises(minialpa.MinialpaError, match="this source has neither"):
        other.set_state(state)
    with pytest.raises(minialpa.MinialpaError, match="after batch 9, and the source ends after 4 batches"):
        other.set_state({**start, "batches": 9})
    for nonsense in ({"batches": -1}, {"batches": True}, {"batches": None}, {"sizes": 3}, {"sizes": [""]}):
        with pytest.raises(minialpa.MinialpaError, match="Pass a state that `get_state` of a loader returned"):
            other.set_state({**start, **nonsense})


# ---- Alpa's loader over samples --------------------------------------------------------------------------------------


def samples(start: int, end: int, batch_size: int) -> Iterator[Any]:
    for i in range(start, end, batch_size):
        yield np.arange(i, min(i + batch_size, end))[:, None]


def test_a_mesh_driver_data_loader_reads_all_samples_and_repeats() -> None:
    step = unused_step()
    assert numbers(MeshDriverDataLoader(4, 10, samples, step)) == [0, 4, 8]
    with MeshDriverDataLoader(4, 10, samples, step, 2, True, on_ragged="drop") as loader:
        assert numbers(next(loader) for _ in range(5)) == [0, 4, 0, 4, 0]
        state = loader.get_state()
    with MeshDriverDataLoader(4, 10, samples, step, repeat=True, on_ragged="drop") as loader:
        loader.set_state(state)
        assert numbers(next(loader) for _ in range(3)) == [4, 0, 4]
    with pytest.raises(minialpa.MinialpaError, match="`batch_size` must be an integer >= 1; got 0"):
        MeshDriverDataLoader(0, 10, samples, step)


def examples(start: int, end: int, batch_size: int) -> Iterator[Any]:
    """Batches for `train_step`, out of 64 samples, by way of one buffer."""
    buffer = {"x": np.empty((batch_size, 8), np.float32), "y": np.empty((batch_size, 4), np.float64)}
    all_samples = make_batch(0, 64)
    for i in range(start, end, batch_size):
        stop = min(i + batch_size, end)
        READ.append((threading.current_thread().name, i, stop))
        for name, values in all_samples.items():
            buffer[name][: stop - i] = values[i:stop]
        yield {name: values[: stop - i] for name, values in buffer.items()}


#: (thread, first, last) of each read of samples.
READ: list[tuple[str, int, int]] = []


def batches_of(step: Any, n: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """The batches that a loader over `examples` gives, and their values."""
    with MeshDriverDataLoader(16, n, examples, step, **options) as loader:
        received = list(loader)
    return received, jax.device_get(received)


@pytest.mark.parametrize(("n_micro_batches", "n_hosts"), [(4, 1), (1, 2)])
def test_the_batches_that_workers_read_are_those_of_one_process(n_micro_batches: int, n_hosts: int) -> None:
    method: Any = ShardParallel(num_micro_batches=n_micro_batches)
    if n_hosts == 2:
        method = PipeshardParallel(
            num_micro_batches=n_micro_batches, layer_option=AutoLayerOption(layer_num=2), stage_option="uniform"
        )
    wanted = [{name: make_batch(0, 64)[name][16 * k : min(16 * k + 16, 56)] for name in "xy"} for k in range(4)]
    step = minialpa.parallelize(train_step, method=method)
    with in_process_session(n_hosts, 4 // n_hosts):
        step.get_executable(make_params(), make_batch(0))
        READ.clear()
        received, values = batches_of(step, 56)
        assert_allclose(values, wanted, rtol=0, atol=0)
        # No program takes the last batch, so it is as the function returns it.
        assert [value["y"].dtype for value in values] == [np.float32, np.float32, np.float32, np.float64]
        for batch in received[1:3]:
            assert all(isinstance(part, DistributedArray) for leaf in jax.tree.leaves(batch) for part in leaf.stored_as)

        # This process has read the first batch, to see its form, and the smaller one. The meshes have read the others.
        here = [(a, b) for thread, a, b in READ if thread == "minialpa data loader"]
        assert here == [(0, 16), (48, 56)]
        assert len(READ) == 2 + 2 * n_hosts

        params = expected = make_params()
        for batch, own in zip(received, wanted, strict=True):
            params, _ = step(params, batch)
            expected, _ = train_step(expected, own)
        assert_allclose(params, expected, rtol=1e-4, atol=1e-6)


def test_workers_go_on_where_another_loader_stopped() -> None:
    step = minialpa.parallelize(train_step, method=ShardParallel())
    with in_process_session(1, 4):
        step.get_executable(make_params(), make_batch(0))
        with MeshDriverDataLoader(16, 64, examples, step, repeat=True) as undisturbed:
            wanted = [jax.device_get(next(undisturbed)) for _ in range(7)]
        found, state = [], None
        for n_more in (2, 0, 4, 1):
            with MeshDriverDataLoader(16, 64, examples, step, 3, repeat=True) as loader:
                if state is not None:
                    loader.set_state(json.loads(json.dumps(state)))
                found += [jax.device_get(next(loader)) for _ in range(n_more)]
                state = loader.get_state()
        assert_allclose(found, wanted, rtol=0, atol=0)


def broken_in_workers(start: int, end: int, batch_size: int) -> Iterator[Any]:
    if threading.current_thread().name != "minialpa data loader" and start >= 32:
        raise OSError(f"no disk at {start}")
    return examples(start, end, batch_size)


def too_few_in_workers(start: int, end: int, batch_size: int) -> Iterator[Any]:
    if threading.current_thread().name == "minialpa data loader":
        return examples(start, end, batch_size)
    return examples(start, end - 1, batch_size)


def test_errors_in_workers_come_out_of_next_and_leave_the_session() -> None:
    step = minialpa.parallelize(train_step, method=ShardParallel())
    broken: dict[str, Any] = {
        r"no disk at 32(.|\n)*in broken_in_workers": broken_in_workers,
        r"input_iter_func\(16, 32, 16\)` returned an array of shape \(15, 8\)": too_few_in_workers,
    }
    with in_process_session(1, 4) as runtime:
        step.get_executable(make_params(), make_batch(0))
        for message, source in broken.items():
            with MeshDriverDataLoader(16, 64, source, step) as loader:
                with pytest.raises(minialpa.WorkerError, match=message):
                    list(loader)
                assert list(loader) == []

        # The session goes on, and the failed batches leave no array.
        gc.collect()
        step(make_params(), make_batch(0))
        runtime.sync()
        (counts,) = runtime.ask(runtime.workers, "counts")
        assert counts["arrays"] <= 6


def test_a_worker_that_is_lost_while_it_reads_is_a_worker_error() -> None:
    step = minialpa.parallelize(train_step, method=ShardParallel())
    with in_process_session(1, 4) as runtime:
        step.get_executable(make_params(), make_batch(0))
        with MeshDriverDataLoader(16, 64, waits_in_workers, step) as loader:
            next(loader)
            wait_until(lambda: bool(WAITING))
            runtime.launcher.end(runtime.workers)
            with pytest.raises(minialpa.WorkerError, match="killed"):
                next(loader)
        GO_ON.set()


WAITING: list[int] = []
GO_ON = threading.Event()


def waits_in_workers(start: int, end: int, batch_size: int) -> Iterator[Any]:
    if threading.current_thread().name != "minialpa data loader":
        WAITING.append(start)
        GO_ON.wait(20)
    return examples(start, end, batch_size)


def test_functions_that_read_other_samples_than_asked_are_refused() -> None:
    step = unused_step()
    with pytest.raises(minialpa.MinialpaError, match=r"At sample 8 of 20, `input_iter_func` has ended"):
        list(MeshDriverDataLoader(4, 20, lambda start, end, n: samples(start, 8, n), step))
    with pytest.raises(minialpa.MinialpaError, match="a batch of 3 examples; expected 4"):
        list(MeshDriverDataLoader(4, 20, lambda start, end, n: samples(start, end, 3), step))
    # One that leaves out a smaller last batch is fine.
    assert numbers(MeshDriverDataLoader(4, 10, lambda start, end, n: samples(start, end - end % n, n), step)) == [0, 4]
