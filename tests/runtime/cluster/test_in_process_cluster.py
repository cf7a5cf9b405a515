"""What the runtime of a cluster does, on workers that are threads: the same programs, messages, arrays and failures."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import models
from minialpa.errors import WorkerError
from minialpa.inter.lower.mesh_programs import array_type
from minialpa.programs.program import InputSlot, MeshShape, OutputSlot, Program, Transfer
from minialpa.runtime.cluster.cluster_executable import ClusterExecutable
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.in_process import ThreadActor
from minialpa.runtime.cluster.launcher import WorkerHandle
from minialpa.runtime.cluster.watch import Watch
from minialpa.runtime.transports.in_process_transport import InProcessTransport
from minialpa.runtime.workers.failures import Status
from minialpa.runtime.workers.worker import Worker
from minialpa.sharding import specs_of
from minialpa.testing import assert_allclose
from tests.runtime.cluster.in_process_session import in_process_session
from tests.test_numeric_matrix import N_MICRO_BATCHES, SIZES, pipeline, serial_run


@pytest.fixture
def runtime() -> Iterator[ClusterRuntime]:
    """A host of four devices: a mesh of all of them, or two of two."""
    with in_process_session(1, 4) as found:
        yield found


#: What always runs.
SHORT = {("mlp", 4)}


@pytest.mark.parametrize(
    ("name", "n_hosts"),
    [pytest.param(name, n, marks=() if (name, n) in SHORT else pytest.mark.slow) for name in SIZES for n in (2, 4)],
)
def test_three_steps_equal_the_serial_run(name: str, n_hosts: int) -> None:
    per_host = 4 // n_hosts
    run = serial_run(name, N_MICRO_BATCHES if name == "resnet" else 1)
    with in_process_session(n_hosts, per_host):
        method = pipeline(n_hosts, "gpipe" if per_host == 1 else "1f1b")
        step = minialpa.parallelize(run.case.train_step(minialpa.value_and_grad), method=method)
        state = run.initial
        for i, expected in enumerate(run.metrics):
            state, metrics = step(state, run.case.make_batch(i, run.case.batch_size))
            assert_allclose(metrics, expected, rtol=2e-4, atol=1e-6)
        assert_allclose(state.params, run.final.params, rtol=2e-4, atol=1e-5)


class Training:
    """A step of the mlp in two stages, with its state and the run of plain jax beside it."""

    def __init__(self, n_stages: int = 2) -> None:
        self.case = models.build("mlp", batch_size=4 * N_MICRO_BATCHES, hidden=8)
        self.step = minialpa.parallelize(
            self.case.train_step(minialpa.value_and_grad), method=pipeline(n_stages, "1f1b")
        )
        self.plain = jax.jit(self.case.train_step(jax.value_and_grad))
        self.batch = self.case.make_batch(0, self.case.batch_size)
        self.state = self.expected = self.case.init(jax.random.key(0))

    def advance(self) -> None:
        self.state, metrics = self.step(self.state, self.batch)
        self.expected, wanted = self.plain(self.expected, self.batch)
        assert_allclose(metrics, wanted, rtol=1e-4, atol=1e-6)
        assert_allclose(self.state, self.expected, rtol=1e-4, atol=1e-6)


def _calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The calls of workers from now on, by method; those of the watch are left out."""
    calls: Counter[str] = Counter()
    call = ThreadActor.call

    def counted(self: ThreadActor, method: str, *args: Any) -> Any:
        if method != "status":  # asked by the watch, whenever its interval is over
            calls[method] += 1
        return call(self, method, *args)

    monkeypatch.setattr(ThreadActor, "call", counted)
    return calls


def test_a_step_is_one_call_of_each_worker_and_a_fetch_one_more(
    runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    state, metrics = training.step(training.state, training.batch)
    calls = _calls(monkeypatch)
    for _ in range(3):
        state, metrics = training.step(state, training.batch)
    assert calls == {"step": 6}
    loss = jax.tree.leaves(metrics)[0]
    float(loss)
    float(loss)  # it is here now
    assert calls == {"step": 6, "fetch": 1}


def test_arrays_move_between_workers_in_all_layouts(runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    meshes = (MeshShape(0, (2,)), MeshShape(2, (2,)))
    layouts = [spec.partition_spec() for spec in specs_of((4, 6), (2,))]
    pairs = list(itertools.product(layouts, layouts))
    n = len(pairs)
    program = Program(
        meshes=meshes,
        functions=(),
        inputs=tuple(InputSlot(buffer=i, leaf=i, rows=None, mesh=0, spec=s) for i, (s, _) in enumerate(pairs)),
        constants=(),
        instructions=tuple(Transfer(i, n + i, 1, t) for i, (_, t) in enumerate(pairs)),
        outputs=tuple(OutputSlot((n + i,), (1,)) for i in range(n)),
        donated_leaves=frozenset(),
        n_buffers=2 * n,
    )
    arrays = [np.arange(24, dtype=np.float32).reshape(4, 6) + i for i in range(n)]
    there = ClusterExecutable(runtime, program, {i: array_type(x) for i, x in enumerate(arrays)})
    moved = there(arrays)

    # The results are on the second mesh and the program reads its arguments on the first one.
    calls = _calls(monkeypatch)
    again = there(moved)
    assert "fetch" not in calls and "put" not in calls and calls["load"] == 2 and calls["step"] == 4
    for x, a, b, (_, spec) in zip(arrays, moved, again, pairs, strict=True):
        np.testing.assert_array_equal(np.asarray(a), x)
        np.testing.assert_array_equal(np.asarray(b), x)
        assert b.specs == (spec,) and len(a.copies) == 2


def test_donated_arrays_are_freed_on_workers_and_refused_later(runtime: ClusterRuntime) -> None:
    training = Training()
    training.advance()
    old = training.state
    training.advance()
    with pytest.raises(WorkerError, match="was donated to an earlier call"):
        training.step(old, training.batch)
    training.advance()
    del old
    gc.collect()
    training.advance()
    held = runtime.ask(runtime.workers, "counts")
    n_leaves = len(jax.tree.leaves(training.state))
    assert sum(counts["arrays"] for counts in held) <= 2 * n_leaves + 4


def test_presharded_state_is_used_as_it_is(runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    state, batch = training.step.preshard_dynamic_args(training.state, training.batch)
    calls = _calls(monkeypatch)
    state, _ = training.step(state, batch)
    assert calls == {"step": 2}
    training.expected, _ = training.plain(training.expected, training.batch)
    assert_allclose(state, training.expected, rtol=1e-4, atol=1e-6)


def test_meshes_of_another_shape_end_those_before_and_keep_their_arrays(runtime: ClusterRuntime) -> None:
    training = Training()
    training.advance()
    whole = minialpa.parallelize(lambda x: x * 2, donate_argnums=(), batch_argnums=())
    assert_allclose(whole(jnp.arange(8.0)), np.arange(8.0) * 2)
    assert len(runtime.workers) in (1, 2)
    training.advance()


def test_threads_take_turns(runtime: ClusterRuntime) -> None:
    training = Training()
    training.advance()
    scale = minialpa.parallelize(lambda x, y: x * y, donate_argnums=(), batch_argnums=())
    found: list[Any] = []

    def work(number: int) -> None:
        x = np.full(8, number, np.float32)
        for i in range(5):
            found.append(bool((np.asarray(scale(x, np.float32(i))) == x * i).all()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        training.advance()
    for thread in threads:
        thread.join()
    assert found == [True] * 20


def test_a_worker_that_ends_ends_the_session_with_its_place(runtime: ClusterRuntime) -> None:
    training = Training()
    training.advance()
    lost = runtime.workers[1]
    runtime.launcher.end([lost])
    with pytest.raises(WorkerError, match=r"stage 1 on host 0.*its process died") as caught:
        for _ in range(3):
            training.advance()
    assert (caught.value.worker, caught.value.stage) == (lost.number, 1)
    with pytest.raises(WorkerError, match="The session has ended"):
        training.step(training.case.init(jax.random.key(0)), training.batch)


def test_an_error_in_a_step_names_worker_stage_and_instruction(
    runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    training.advance()
    send = InProcessTransport.send

    def broken(self: InProcessTransport, *args: Any) -> Any:
        if self.number == 0:
            raise ValueError("a cable is loose")
        return send(self, *args)

    monkeypatch.setattr(InProcessTransport, "send", broken)
    with pytest.raises(WorkerError, match=r"stage 0 on host 0.*a cable is loose") as caught:
        training.advance()
    assert "Send to stage 1" in str(caught.value) and "Traceback of the worker" in str(caught.value)


def test_a_worker_that_hangs_is_named_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_process_session(2, 2, timeout_s=1.5):
        training = Training()
        training.advance()
        hang = threading.Event()
        step = Worker.step

        def stuck(self: Worker, *args: Any) -> Any:
            if self.settings.number == 0:
                hang.wait(30)
            return step(self, *args)

        monkeypatch.setattr(Worker, "step", stuck)
        begun_s = time.monotonic()
        with pytest.raises(WorkerError, match=r"stage|no worker has made progress"):
            training.advance()
        hang.set()
        assert time.monotonic() - begun_s < 20


def test_an_interrupt_between_the_calls_of_a_step_ends_the_session(
    runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    training.advance()
    call, called = ThreadActor.call, []

    def interrupted(self: ThreadActor, method: str, *args: Any) -> Any:
        called.append(method)
        if called.count("step") == 2:
            raise KeyboardInterrupt
        return call(self, method, *args)

    monkeypatch.setattr(ThreadActor, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.advance()
    monkeypatch.undo()
    with pytest.raises(WorkerError, match=r"The session has ended.*only some workers had been told"):
        training.advance()


def test_fetched_values_outlive_the_session() -> None:
    with in_process_session(2, 2):
        training = Training()
        training.advance()
        state = training.state
        fetched = np.asarray(jax.tree.leaves(state)[0])
        unfetched = minialpa.parallelize(lambda x: x + 1, donate_argnums=(), batch_argnums=())(np.zeros(3, np.float32))
    np.testing.assert_array_equal(np.asarray(jax.tree.leaves(state)[0]), fetched)
    with pytest.raises(WorkerError, match="has ended"):
        np.asarray(unfetched)


def test_a_value_that_another_thread_has_fetched_needs_no_mesh(runtime: ClusterRuntime) -> None:
    training = Training()
    training.advance()
    array = next(x for x in jax.tree.leaves(training.step(training.state, training.batch)[0]) if x.ndim == 2)
    # Another thread's program with a mesh of all devices: this one has found before that the array is not here.
    with runtime.turn():
        runtime.meshes([(0, 4)])
    assert array.held_here and not any(copy.mesh.alive for copy in array.copies)
    np.testing.assert_array_equal(runtime.fetch([array])[0], np.asarray(array))


def test_arrays_on_workers_have_methods_of_numpy_and_say_what_to_do_for_those_of_jax() -> None:
    with in_process_session(1, 2):
        doubled = minialpa.parallelize(lambda x: x * 2, method=minialpa.ShardParallel())(np.ones((4, 3), np.float32))
        assert doubled.mean() == 2 and doubled.T.shape == (3, 4) and doubled.astype(np.int32).sum() == 24
        with pytest.raises(AttributeError, match=r"no attribute `at`: .*`jax\.device_get\(x\)`"):
            doubled.at[0].set(1)


def test_keys_that_a_step_returns_are_keys_for_jax_and_are_fetched_when_it_reads_them(
    runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_step(state: Any, batch: Any) -> Any:
        key, drawn = jax.random.split(state["key"])
        loss = jnp.mean((batch["x"] * jax.random.uniform(drawn, batch["x"].shape)) @ state["w"])
        return {"key": key, "keys": jax.random.split(key, 3), "w": state["w"] - loss}, loss

    start = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(0), 3), "w": jnp.ones((4, 2))}
    batch = {"x": jnp.ones((8, 4))}
    step = minialpa.parallelize(train_step, method=minialpa.ShardParallel(), batch_argnums=(1,), donate_argnums=())
    state, _ = step(start, batch)
    expected, _ = jax.jit(train_step)(start, batch)
    calls = _calls(monkeypatch)
    second, _ = step(state, batch)
    assert calls == {"step": 1}

    wanted, _ = jax.jit(train_step)(expected, batch)
    for use in (
        jax.random.key_data,
        lambda key: jax.random.key_data(jax.random.split(key)[1]),
        lambda key: jax.random.key_data(jax.random.fold_in(key, 7)),
        jax.random.normal,
        jax.jit(jax.random.uniform),
        lambda key: jax.random.key_data(pickle.loads(pickle.dumps(key))),
        lambda key: jax.random.key_data(copy.deepcopy(key)),
        lambda key: jax.random.key_data(jax.device_get(key)),
        lambda key: key == key,
    ):
        np.testing.assert_array_equal(use(second["key"]), use(wanted["key"]))
    for one, other in zip(second["keys"], wanted["keys"], strict=True):
        assert jax.random.uniform(one) == jax.random.uniform(other)
    np.testing.assert_array_equal(
        jax.vmap(jax.random.uniform)(second["keys"]), jax.vmap(jax.random.uniform)(wanted["keys"])
    )
    assert calls["fetch"] == 2
    assert isinstance(second["key"], jax.Array) and second["keys"].shape == (3,)


# ---- the cluster as a whole ------------------------------------------------------------------------------------------


def summing(state: Any, batch: Any) -> Any:
    return state + batch.sum(), batch.mean()


def test_a_cluster_that_is_lost_is_noticed_while_steps_are_short(
    runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wait is as long as the interval between two looks, so steps alone would never look."""
    step = minialpa.parallelize(summing, method=minialpa.DataParallel())
    state, batch = jnp.zeros(()), np.ones((8, 4), np.float32)
    state, mean = step(state, batch)
    assert float(mean) == 1.0

    monkeypatch.setattr(runtime.launcher, "fault", lambda: "The head is gone.")
    end_s = time.monotonic() + 20
    with pytest.raises(WorkerError, match="The head is gone"):
        while time.monotonic() < end_s:
            state, mean = step(state, batch)
            float(mean)


def test_arrays_for_which_there_is_no_room_are_refused_and_cost_nothing(
    runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = minialpa.parallelize(summing, method=minialpa.DataParallel())
    batch = np.ones((512, 1024), np.float32)
    state, _ = step(jnp.zeros(()), batch)

    def refuse(n_bytes: int) -> None:
        assert n_bytes == batch.nbytes
        raise minialpa.MinialpaError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(runtime.launcher, "check_room", refuse)
        for big in (batch, batch + 1):
            with pytest.raises(minialpa.MinialpaError, match="no room"):
                step(state, big)
    state, _ = step(state, batch)
    assert float(state) == 2 * batch.size


def test_a_worker_is_silent_since_the_first_call_that_it_has_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("minialpa.runtime.cluster.watch.time.monotonic", lambda: now[0])
    launcher = Mock(timeout_s=300.0, ready=lambda replies: [])
    worker = WorkerHandle(number=1, host=0, first_device=0, n_devices=1, actor=Mock())
    watch = Watch(launcher)
    watch.add([worker])
    now[0] = 62.0
    assert watch.heartbeat(is_stepping=True) is None
    assert watch.unanswered_s(worker, 2.0) == 62.0

    launcher.ready, launcher.answer.return_value = list, Status(worker=1, host=0)
    assert watch.unanswered_s(worker, 2.0) == 2.0
