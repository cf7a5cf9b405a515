"""The runtime of a cluster on workers that are threads: the same programs, messages, arrays and failures as on Ray."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import time
from collections import Counter
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa.errors import WorkerError
from minialpa.inter.lower.mesh_programs import array_type
from minialpa.programs.program import MeshShape
from minialpa.runtime.cluster import cluster_runtime
from minialpa.runtime.cluster.cluster_executable import ClusterExecutable
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.in_process import InProcessLauncher, InProcessTransport, ThreadActor
from minialpa.runtime.cluster.launcher import WorkerHandle
from minialpa.runtime.cluster.watch import Watch
from minialpa.runtime.workers.arguments import from_plain, to_plain
from minialpa.runtime.workers.failures import Status
from minialpa.runtime.workers.worker import Worker
from minialpa.sharding import specs_of
from minialpa.testing import assert_allclose
from tests.dtypes import DTYPES, KEYS, N, as_argument, as_result, as_state, described, values
from tests.helpers import METHODS, descent_step
from tests.runtime.cluster.in_process_session import Training, in_process_session
from tests.runtime.move_programs import moving
from tests.test_numeric_matrix import pipeline, serial_run


@pytest.mark.parametrize(("n_stages", "schedule"), [(4, "gpipe"), (2, "zb-v")])
def test_three_steps_of_several_stages_equal_the_serial_run(n_stages: int, schedule: str) -> None:
    case, state, expected_metrics, final = serial_run("mlp")
    with in_process_session(n_stages, 1):
        step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=pipeline(n_stages, schedule))
        for i, expected in enumerate(expected_metrics):
            state, metrics = step(state, case.make_batch(i, case.batch_size))
            assert_allclose(metrics, expected, rtol=2e-4, atol=1e-6)
        assert_allclose(state.params, final.params, rtol=2e-4, atol=1e-5)


def _calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The calls of workers from now on, by method; without the calls of the watch."""
    calls: Counter[str] = Counter()
    call = ThreadActor.call

    def counted(self: ThreadActor, method: str, *args: Any) -> Any:
        if method != "status":  # asked by the watch, whenever its interval is over
            calls[method] += 1
        return call(self, method, *args)

    monkeypatch.setattr(ThreadActor, "call", counted)
    return calls


@pytest.mark.usefixtures("runtime")
def test_a_step_is_one_call_of_each_worker_and_a_fetch_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    state, batch = training.step.preshard_dynamic_args(training.state, training.batch)
    calls = _calls(monkeypatch)
    for _ in range(3):
        state, loss = training.step(state, batch)
    assert calls == {"step": 6}
    float(loss)
    float(loss)  # it is here now
    assert calls == {"step": 6, "fetch": 1}
    for _ in range(3):
        training.expected, _ = training.plain(training.expected, training.batch)
    assert_allclose(state, training.expected, rtol=1e-4, atol=1e-6)


def test_arrays_move_between_workers_in_all_layouts(runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [spec.partition_spec() for spec in specs_of((4, 6), (2,))]
    ways = [(0, s, 1, t) for s, t in itertools.product(layouts, layouts)]
    arrays = [np.arange(24, dtype=np.float32).reshape(4, 6) + i for i in range(len(ways))]
    program = moving((MeshShape(0, (2,)), MeshShape(2, (2,))), ways)
    there = ClusterExecutable(runtime, program, {i: array_type(x) for i, x in enumerate(arrays)})
    moved = there(arrays)

    # The results are on the second mesh and the program reads its arguments on the first one.
    calls = _calls(monkeypatch)
    again = there(moved)
    assert "fetch" not in calls and "put" not in calls and calls["load"] == 2 and calls["step"] == 4
    for x, a, b, (*_, spec) in zip(arrays, moved, again, ways, strict=True):
        np.testing.assert_array_equal(np.asarray(a), x)
        np.testing.assert_array_equal(np.asarray(b), x)
        assert b.specs == (spec,) and len(a.copies) == 2


def test_donated_arrays_are_freed_on_workers_and_refused_later(runtime: ClusterRuntime) -> None:
    gc.collect()
    before = sum(counts["arrays"] for counts in runtime.ask(runtime.workers, "counts"))
    training = Training()
    training.advance()
    old = training.state
    training.advance()
    with pytest.raises(WorkerError, match="donated"):
        training.step(old, training.batch)
    with pytest.raises(WorkerError, match="donated"):
        np.asarray(old["first"])
    for _ in range(3):
        training.advance()
    del old
    gc.collect()
    training.advance()
    after = sum(counts["arrays"] for counts in runtime.ask(runtime.workers, "counts"))
    # The state, and the arrays that the next call frees.
    assert after - before <= 2 * len(training.state) + 4


@pytest.mark.usefixtures("runtime")
def test_an_array_given_twice_is_copied_and_arrays_that_a_step_hands_on_stay() -> None:
    step = minialpa.parallelize(
        lambda s, a, b: ({**s, "w": s["w"] + a}, b * 2.0, s["n"]), donate_argnums=(0, 1, 2), batch_argnums=()
    )
    n, x = np.arange(6, dtype=np.int32), np.ones((8, 4), np.float32)
    state: Any = {"w": x, "n": n, "key": jax.random.key(3)}
    a: Any = x
    for i in range(3):
        state, a, same = step(state, a, a)
        np.testing.assert_array_equal(same, n)
        np.testing.assert_array_equal(a, x * 2 ** (i + 1))
    np.testing.assert_array_equal(state["w"], x * 8)
    np.testing.assert_array_equal(jax.random.key_data(state["key"][...]), jax.random.key_data(jax.random.key(3)))


@pytest.mark.usefixtures("runtime")
def test_large_shards_that_both_meshes_read_arrive_at_both(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """They go beside the arguments, once to each host."""
    shared: list[Any] = []

    def share(_: InProcessLauncher, value: Any) -> Any:
        shared.append(value)
        return value

    def train_step(value_and_grad: Any) -> Any:
        def loss(p: Any, x: Any) -> jax.Array:
            h = jnp.tanh(x @ p["u"])
            minialpa.mark_pipeline_boundary()
            return jnp.mean((h @ p["v"] - x) ** 2)

        return descent_step(loss, value_and_grad)

    monkeypatch.setattr(InProcessLauncher, "share", share)
    x = np.random.default_rng(seed).standard_normal((1 << 15, 64), np.float32)
    params = {name: np.eye(64, dtype=np.float32) for name in "uv"}
    step = minialpa.parallelize(train_step(minialpa.value_and_grad), method=METHODS["pipeline"])
    plain = jax.jit(train_step(jax.value_and_grad))
    found, expected = step(params, x), plain(params, x)
    assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    shards = [value.nbytes for value in shared if isinstance(value, np.ndarray)]
    assert shards and sum(shards) == x.nbytes

    # Without memory for them, the step is refused and its arguments stay valid.
    def refuse(_: InProcessLauncher, n_bytes: int) -> None:
        assert n_bytes == x.nbytes
        raise minialpa.MinialpaError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(InProcessLauncher, "check_memory", refuse)
        with pytest.raises(minialpa.MinialpaError, match="no room"):
            step(found[0], x)
    assert_allclose(step(found[0], x), plain(expected[0], x), rtol=1e-4, atol=1e-6)


def test_meshes_of_another_shape_end_those_before_and_keep_their_arrays(runtime: ClusterRuntime) -> None:
    training = Training()
    training.advance()
    whole = minialpa.parallelize(lambda x: x * 2, donate_argnums=(), batch_argnums=())
    assert_allclose(whole(jnp.arange(8.0)), np.arange(8.0) * 2)
    assert len(runtime.workers) in (1, 2)
    training.advance()

    # Another thread's program with a mesh of all devices: this one has found before that the array is not here.
    array = training.step(training.state, training.batch)[0]["first"]
    assert not array.held_here
    with runtime.turn():
        runtime.meshes([(0, 4)])
    assert array.held_here and not any(copy.mesh.alive for copy in array.copies)
    np.testing.assert_array_equal(runtime.fetch([array])[0], np.asarray(array))


def test_programs_that_nothing_uses_leave_nothing_on_the_workers(runtime: ClusterRuntime) -> None:
    held = []
    for i in range(4):
        step = minialpa.parallelize(lambda x: (x * 2.0).sum(), donate_argnums=(), batch_argnums=())
        float(step(np.ones((8 + i, 2), np.float32)))
        del step
        gc.collect()
        held.append(runtime.ask(runtime.workers, "counts"))
    assert held[1] == held[3]


# ---- failures --------------------------------------------------------------------------------------------------------


def test_fetched_values_outlive_the_session(runtime: ClusterRuntime) -> None:
    double = minialpa.parallelize(lambda x: x * 2, donate_argnums=(), batch_argnums=())
    fetched, unfetched = double(np.ones(3, np.float32)), double(np.ones(3, np.float32))
    minialpa.prefetch(fetched)
    minialpa.shutdown()
    np.testing.assert_array_equal(fetched, np.full(3, 2.0))
    with pytest.raises(WorkerError, match="has ended"):
        np.asarray(unfetched)
    # In the session of this process: fetched values are arguments, lost ones are refused.
    np.testing.assert_array_equal(double(fetched), np.full(3, 4.0))
    with pytest.raises(WorkerError, match="has ended"):
        double(unfetched)
    assert not runtime.workers


@pytest.mark.usefixtures("runtime")
def test_an_error_in_a_step_names_worker_stage_and_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with in_process_session(2, 2) as runtime:
        training = Training()
        training.advance()
        hang = threading.Event()
        step = Worker.step
        runtime._watch.timeout_s, runtime._watch.interval_s = 0.3, 0.1
        monkeypatch.setattr(cluster_runtime, "_GRACE_S", 0.3)

        def stuck(self: Worker, *args: Any) -> Any:
            if self.settings.number == 0:
                hang.wait(30)
            return step(self, *args)

        monkeypatch.setattr(Worker, "step", stuck)
        begun_s = time.monotonic()
        with pytest.raises(WorkerError, match=r"no worker has made progress"):
            training.advance()
        hang.set()
        assert time.monotonic() - begun_s < 20


@pytest.mark.usefixtures("runtime")
def test_an_interrupt_between_the_calls_of_a_step_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(
        WorkerError, match=r"The session has ended\. .*only some workers had begun it\. Call `minialpa\.restart"
    ):
        training.advance()


def test_a_cluster_that_is_lost_is_noticed_while_steps_are_short(
    runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All waits are shorter than the interval between two checks, so waits alone would never check."""
    training = Training()
    training.advance()
    monkeypatch.setattr(runtime.launcher, "fault", lambda: "The head is gone.")
    monkeypatch.setattr(runtime._watch, "interval_s", 0.2)
    end_s = time.monotonic() + 20
    with pytest.raises(WorkerError, match="The head is gone"):
        while time.monotonic() < end_s:
            training.advance()


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


@pytest.mark.usefixtures("runtime")
def test_a_step_that_calls_back_into_python_is_refused() -> None:
    def step(x: Any) -> Any:
        jax.debug.print("{}", x[0])
        return x + 1.0

    with pytest.raises(minialpa.TraceError, match="Remove callbacks into Python"):
        minialpa.parallelize(step, batch_argnums=())(np.ones(8, np.float32))


# ---- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("runtime")
def test_results_are_arrays_to_users() -> None:
    @minialpa.parallelize(batch_argnums=())
    def make(x: Any) -> Any:
        return {"x": x + 1.0, "n": jnp.sum(x), "i": jnp.int32(3), "flag": jnp.any(x > 0)}

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    out = make(x)
    made = out["x"]
    assert isinstance(made, minialpa.arrays.RemoteArray) and made.shape == (8, 4) and made.dtype == np.float32
    minialpa.prefetch(out)
    np.testing.assert_array_equal(made, x + 1)
    np.testing.assert_array_equal(jnp.sin(jnp.asarray(made)), jnp.sin(x + 1))
    np.testing.assert_array_equal(made * 2 + x, (x + 1) * 2 + x)
    np.testing.assert_array_equal(made[2:, 1], (x + 1)[2:, 1])
    assert float(out["n"]) == x.sum() and f"{out['n']:.1f}" == "496.0" and int(out["i"]) == 3 and bool(out["flag"])
    assert len(made) == 8 and list(range(5))[out["i"]] == 3
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(made)), x + 1)
    np.testing.assert_array_equal(copy.deepcopy(made), x + 1)
    assert made.mean() == 16.5 and made.T.shape == (4, 8) and made.astype(np.int32).sum() == 528
    with pytest.raises(AttributeError, match=r"no attribute `at`: .*`jax\.device_get\(x\)`"):
        made.at[0].set(1)
    np.testing.assert_array_equal(make(made)["x"], x + 2)


@pytest.mark.usefixtures("runtime")
def test_keys_that_a_step_returns_are_keys_for_jax_and_are_fetched_when_it_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def split(state: Any) -> Any:
        key, drawn = jax.random.split(state["key"])
        return {"key": key, "keys": jax.random.split(key, 3), "x": jax.random.uniform(drawn, (4,))}

    step = minialpa.parallelize(split, batch_argnums=(), donate_argnums=())
    state = step({"key": jax.random.key(3)})
    wanted = jax.jit(split)(jax.jit(split)({"key": jax.random.key(3)}))
    calls = _calls(monkeypatch)
    second = step({"key": state["key"]})
    assert calls == {"step": 1}

    for use in (
        jax.random.key_data,
        lambda key: jax.random.key_data(jax.random.split(key)[1]),
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
    with pytest.raises((TypeError, ValueError)):
        np.asarray(second["keys"])
    with pytest.raises(TypeError, match="key_data"):
        np.asarray(second["keys"], np.uint32)


@pytest.mark.usefixtures("runtime")
def test_all_dtypes_are_arguments_state_and_results_as_jit_has_them() -> None:
    names, x = (*DTYPES, *KEYS), np.arange(N, dtype=np.float32)
    with jax.enable_x64(True):
        given = {name: values(name) for name in names}
        turn = minialpa.parallelize(as_state)
        turned, _ = turn(given, x)
        assert described(turned) == described(jax.jit(as_state)(given, x)[0])
        assert described(turn(turned, x)[0]) == described(jax.jit(lambda x: x)(given))  # straight from the workers
        for step, args in ((as_result(names), (np.uint32(3), x)), (as_argument, (np.float32(1), given))):
            assert described(minialpa.parallelize(step)(*args)) == described(jax.jit(step)(*args))


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float8_e4m3fn", "complex64"])
def test_bytes_of_arrays_go_beside_the_pickle(dtype: str) -> None:
    array = np.ones((64, 64), dtype)
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(to_plain(array), protocol=5, buffer_callback=buffers.append)
    assert len(text) < array.nbytes / 8
    back = from_plain(pickle.loads(text, buffers=buffers), dtype)
    assert back.dtype == array.dtype and back.tobytes() == array.tobytes()
