"""Faults of a cluster: what the caller is told, and how fast; that nothing stays behind; that training goes on.

Each test makes one fault in a session and starts the next one in the same process, from a NumPy copy of the state.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray

import minialpa
from minialpa import AutoShardingOption, PipeshardParallel, ShardParallel, WorkerError
from minialpa.runtime import ray_cluster
from minialpa.runtime.worker import Worker
from minialpa.session import current_session
from minialpa.testing import assert_allclose
from tests.runtime.ray_cluster import WORKER_ENV, ray_nodes

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

#: Seconds within which an error has to come, once there are signs of it.
SOON_S = 10.0
#: A time-out for workers that hang; their first steps take less, on a busy machine too.
PATIENCE_S = 5.0
FOREVER = 2**31 - 1
AT_ONCE = np.zeros(3, np.int32)


def spin(w: jax.Array, n: jax.Array) -> jax.Array:
    """`w`, after `n` iterations of a loop."""
    spun = jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(x), jax.lax.stop_gradient(jnp.sum(w)))
    return w + 0.0 * spun


def train_step(value_and_grad: Any) -> Callable[[Any, Any, Any], Any]:
    """A step of two stages. spins: iterations in the first stage, in the second one, and in the update of the first."""

    def step(params: Any, batch: Any, spins: Any) -> Any:
        def loss_fn(params: Any, batch: Any) -> jax.Array:
            h = jax.nn.relu(batch["x"] @ spin(params["first"], spins[0]))
            minialpa.mark_pipeline_boundary()
            return jnp.mean((h @ spin(params["last"], spins[1]) - batch["y"]) ** 2)

        loss, grads = value_and_grad(loss_fn)(params, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return {**params, "first": spin(params["first"], spins[2])}, loss

    return step


def greedy_step(params: Any, batch: Any) -> jax.Array:
    """A step whose second stage needs more memory than any machine has."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        h = jax.nn.relu(batch["x"] @ params["first"])
        minialpa.mark_pipeline_boundary()
        big = jnp.sort(jnp.sin(jax.lax.iota(jnp.float32, 2**46) * jnp.sum(params["last"])))
        return jnp.mean((h @ params["last"] * big[-1] - batch["y"]) ** 2)

    return loss_fn(params, batch)


def make_params() -> Any:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(8, 8)).astype(np.float32) for name in ("first", "last")}


def make_batch(step: int) -> Any:
    rng = np.random.default_rng(100 + step)
    return {name: rng.normal(size=(8, 8)).astype(np.float32) for name in ("x", "y")}


PIPELINE = PipeshardParallel(num_micro_batches=2, layer_option="manual")
METHODS = {1: PIPELINE, 2: ShardParallel()}


@dataclass(eq=False)
class Training:
    """Training on sessions of one cluster, beside the serial run of the same steps."""

    address: str
    state: Any = field(default_factory=make_params)
    n_steps: int = 0
    hosts: int = 0
    steps: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.serial = jax.jit(train_step(jax.value_and_grad))

    def start(self, hosts: int, timeout_s: float = 300.0, env: Any = None) -> None:
        """A session of a pipeline of two meshes on one host, or of one mesh over two hosts."""
        self.hosts = hosts
        minialpa.init(
            cluster="ray", address=self.address, num_hosts=hosts, devices_per_host=2 // hosts,
            worker_timeout_s=timeout_s, worker_env={**WORKER_ENV, **(env or {})},
        )  # fmt: skip
        self.steps.setdefault(hosts, minialpa.parallelize(train_step(minialpa.value_and_grad), method=METHODS[hosts]))

    def run(self, spins: Any = AT_ONCE) -> tuple[Any, Any]:
        """Start a step on the NumPy state."""
        return self.steps[self.hosts](self.state, make_batch(self.n_steps), spins)

    def advance(self) -> tuple[Any, Any]:
        """A step that agrees with the serial run; its results, of which the state is a NumPy copy."""
        params, loss = self.run()
        self.state, expected = jax.tree.map(np.asarray, self.serial(self.state, make_batch(self.n_steps), AT_ONCE))
        self.n_steps += 1
        assert_allclose((params, loss), (self.state, expected), rtol=1e-5, atol=1e-6)
        return params, loss


@dataclass
class Traces:
    """What a session has on this machine: processes, ports on which they listen, its placement group."""

    pids: list[int]
    ports: list[int]
    group: Any
    memfds: frozenset[str]

    @staticmethod
    def of_session() -> Traces:
        runtime = current_session().runtime
        pids = [status.pid for status in runtime.ask(runtime.workers, "status")]
        return Traces(pids, [port for pid in pids for port in listening_ports(pid)], runtime.cluster._group, memfds())

    def assert_gone(self) -> None:
        """Within seconds: Ray gives a process that is stopped five of them."""
        wait_until(lambda: not any(lives(pid) for pid in self.pids))
        wait_until(lambda: not any(answers(port) for port in self.ports))
        assert ray.util.placement_group_table(self.group)["state"] == "REMOVED"
        assert not [thread for thread in threading.enumerate() if "minialpa" in thread.name]
        assert memfds() <= self.memfds


def memfds() -> frozenset[str]:
    """Shared memory of transports that this process has open."""
    return frozenset(fd for fd in os.listdir("/proc/self/fd") if "memfd:minialpa" in read_link(f"/proc/self/fd/{fd}"))


def read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def lives(pid: int) -> bool:
    try:
        return process_stat(pid)[0] != "Z"
    except OSError:
        return False


def cluster_ip() -> str:
    return str(ray.nodes()[0]["NodeManagerAddress"])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which a process listens, without those that it has from its parent."""
    own = sockets(pid) - sockets(int(process_stat(pid)[1]))
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def sockets(pid: int) -> set[str]:
    return {read_link(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}


def process_stat(pid: int) -> list[str]:
    """State, parent, and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def wait_until(is_true: Callable[[], bool], seconds: float = SOON_S) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not so within {seconds} s"
        time.sleep(0.05)


@dataclass
class Told:
    """What the caller was told of a fault, and how long that took."""

    error: WorkerError
    seconds: float


def told_of(fault: Callable[[], None], call: Callable[[], Any], after_s: float = 0.0) -> Told:
    """The error of `call`, in which `fault` happens after some seconds; before it if that is 0."""
    at = [0.0]

    def make_fault() -> None:
        time.sleep(after_s)
        at[0] = time.monotonic()
        fault()

    thread = threading.Thread(target=make_fault)
    thread.start()
    if not after_s:
        thread.join()
    with pytest.raises(WorkerError) as caught:
        call()
    thread.join()
    return Told(caught.value, time.monotonic() - at[0])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two Ray nodes on this machine, with two devices each. Sessions find Ray connected, and leave it so."""
    with ray_nodes(2, 2) as cluster:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster


@pytest.fixture(scope="module")
def whole_training(cluster: Any) -> Training:
    return Training(cluster.address)


@pytest.fixture
def training(whole_training: Training, request: pytest.FixtureRequest) -> Iterator[Training]:
    """The training that all tests go on with. A session that a failed test leaves ends, whatever it is doing."""
    n_failed = request.session.testsfailed
    yield whole_training
    if request.session.testsfailed > n_failed:
        minialpa.shutdown()


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's own handler for SIGINT: a shell has what it starts in the background ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def worker_pid(place: int) -> int:
    """The process of the worker at a place: the first stage or host, or the second one."""
    runtime = current_session().runtime
    workers = sorted(runtime.workers, key=lambda worker: worker.first_device)
    return int(runtime.ask([workers[place]], "status")[0].pid)


def kill(pid: int) -> Callable[[], None]:
    return lambda: os.kill(pid, signal.SIGKILL)


def long_step(training: Training, where: int) -> Callable[[], Any]:
    """A step that never ends: in the first stage, in the second one, or in the update of the first."""
    spins = AT_ONCE.copy()
    spins[where] = FOREVER
    return lambda: np.asarray(training.run(spins)[0]["first"])


def test_worker_killed_while_it_compiles(training: Training) -> None:
    training.start(hosts=1)
    runtime = current_session().runtime

    def fault() -> None:
        wait_until(lambda: len(runtime.workers) == 2, 60)
        killed.append(ray.get(runtime.workers[0].actor.status.options(concurrency_group="control").remote()).pid)
        traces.append(Traces(killed, [], runtime.cluster._group, memfds()))
        os.kill(killed[0], signal.SIGKILL)
        at.append(time.monotonic())

    killed: list[int] = []
    traces: list[Traces] = []
    at: list[float] = []
    told = told_of(fault, lambda: np.asarray(training.run()[1]), after_s=0.01)
    assert time.monotonic() - at[0] < SOON_S
    assert (told.error.host, told.error.stage) == (0, 0)
    assert "its process died" in str(told.error)
    traces[0].assert_gone()
    training.start(hosts=1)
    training.advance()


def test_worker_killed_between_steps(training: Training) -> None:
    training.start(hosts=1)
    params, loss = training.advance()
    traces = Traces.of_session()
    value = float(loss)
    told = told_of(kill(worker_pid(1)), lambda: np.asarray(training.run()[1]))
    assert told.seconds < SOON_S
    assert (told.error.host, told.error.stage) == (0, 1)
    assert "its process died" in str(told.error) and "restore the state" in str(told.error)
    traces.assert_gone()

    # What was fetched stays; everything else says why it is gone, until there is a new session.
    assert float(loss) == value
    with pytest.raises(WorkerError, match="The session has ended"):
        training.run()
    minialpa.shutdown()
    minialpa.shutdown()
    training.start(hosts=1)
    lost = jax.tree.map(lambda x: x, params)
    for leaf in jax.tree.leaves(lost):
        leaf._host = None
    with pytest.raises(WorkerError, match="The session has ended"):
        np.asarray(lost["first"])
    with pytest.raises(WorkerError, match="The session has ended"):
        training.steps[1](lost, make_batch(0), AT_ONCE)
    training.advance()


@pytest.mark.parametrize(
    "where, place", [(1, 1), pytest.param(2, 0, marks=pytest.mark.slow)], ids=["last-stage", "update"]
)
def test_worker_killed_inside_a_step(training: Training, where: int, place: int) -> None:
    training.start(hosts=1)
    training.advance()
    traces = Traces.of_session()
    pid = worker_pid(place)
    told = told_of(kill(pid), long_step(training, where), after_s=3.0)
    assert told.seconds < SOON_S
    assert (told.error.host, told.error.stage) == (0, place)
    assert f"process {pid}" in str(told.error)
    # It had said where it was; and the other one still does.
    assert told.error.instruction is not None and "no instruction" not in told.error.instruction
    assert told.error.recent
    assert f"stage {1 - place} on host 0, was in step" in str(told.error)
    traces.assert_gone()
    training.start(hosts=1)
    training.advance()


def test_stage_that_raises(training: Training) -> None:
    training.start(hosts=1)
    training.advance()
    traces = Traces.of_session()
    limit = AutoShardingOption(memory_limit_bytes=2**60)
    method = dataclasses.replace(PIPELINE, default_auto_sharding_option=limit)
    greedy = minialpa.parallelize(greedy_step, method=method)
    told = told_of(lambda: None, lambda: np.asarray(greedy(training.state, make_batch(0))))
    assert (told.error.host, told.error.stage) == (0, 1)
    assert told.error.instruction is not None and "Run" in told.error.instruction
    assert told.error.recent
    assert told.error.remote_traceback is not None and "Out of memory" in told.error.remote_traceback
    assert told.error.remote_traceback in str(told.error)
    traces.assert_gone()
    training.start(hosts=1)
    training.advance()


@pytest.mark.parametrize("is_stopped", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["stopped", "busy"])
def test_worker_that_hangs(training: Training, is_stopped: bool) -> None:
    """Its process is stopped and answers nobody; or it answers, and never ends the update."""
    minialpa.shutdown()
    training.start(hosts=1, timeout_s=PATIENCE_S)
    training.advance()
    traces = Traces.of_session()
    pid = worker_pid(0)
    if is_stopped:
        told = told_of(lambda: os.kill(pid, signal.SIGSTOP), lambda: np.asarray(training.run()[1]))
    else:
        told = told_of(lambda: None, long_step(training, 2))
    assert told.seconds < PATIENCE_S + SOON_S
    assert (told.error.host, told.error.stage) == (0, 0)
    assert ("it has not answered for" if is_stopped else "no worker has got on for 5 s") in str(told.error)
    traces.assert_gone()


@pytest.mark.usefixtures("interrupts")
def test_interrupt_of_the_caller(training: Training) -> None:
    training.start(hosts=1)
    training.advance()
    traces = Traces.of_session()
    heard = threading.Event()

    def interrupt() -> None:
        # As a user does. Python drops one that comes while it collects garbage: it arises in a callback of jax then.
        time.sleep(2.0)
        while not heard.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            heard.wait(SOON_S)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            long_step(training, 0)()
        finally:
            heard.set()
    thread.join()
    minialpa.shutdown()
    traces.assert_gone()


@pytest.mark.usefixtures("interrupts")
def test_interrupt_when_only_some_workers_have_their_call(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.start(hosts=1)
    training.advance()
    traces = Traces.of_session()
    invoke = ray.actor.ActorHandle._actor_method_call

    def interrupted(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        called.append(method)
        if called.count("step") == 2:
            signal.raise_signal(signal.SIGINT)
        return invoke(self, method, *args, **kwargs)

    called: list[str] = []
    monkeypatch.setattr(ray.actor.ActorHandle, "_actor_method_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.run()
    monkeypatch.undo()
    traces.assert_gone()
    with pytest.raises(WorkerError, match=r"The session has ended.*only some workers had been told"):
        training.run()
    training.start(hosts=1)
    training.advance()
    minialpa.shutdown()


class UnluckyWorker(Worker):
    """Proposes a port that another process has taken, the first time."""

    def reserve_port(self) -> tuple[str, int]:
        taken = Path(os.environ["TAKEN_PORT"])
        ip, port = super().reserve_port()
        if taken.exists():
            port = int(taken.read_text())
            taken.unlink()
        return ip, port


@pytest.mark.slow
def test_port_taken_then_coordinator_killed(training: Training, tmp_path: Path, monkeypatch: Any) -> None:
    minialpa.shutdown()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    unlucky = ray.remote(concurrency_groups={"control": 1, "life": 1})(UnluckyWorker)
    monkeypatch.setattr(ray_cluster, "_ACTOR", unlucky)
    taken = tmp_path / "port"
    with socket.create_server((cluster_ip(), 0)) as holder:
        taken.write_text(str(holder.getsockname()[1]))
        training.start(hosts=2, env={"TAKEN_PORT": str(taken)})
        training.advance()
    assert not taken.exists()
    traces = Traces.of_session()
    told = told_of(kill(worker_pid(0)), long_step(training, 0), after_s=2.0)
    assert told.seconds < SOON_S
    assert (told.error.host, told.error.stage) == (0, 0)
    traces.assert_gone()


def test_one_host_of_a_mesh_killed(training: Training) -> None:
    training.start(hosts=2)
    training.advance()
    traces = Traces.of_session()
    told = told_of(kill(worker_pid(1)), lambda: np.asarray(training.run()[1]))
    assert told.seconds < SOON_S
    assert (told.error.host, told.error.stage) == (1, 0)
    assert "its process died" in str(told.error)
    traces.assert_gone()


def test_node_lost(training: Training, cluster: Any) -> None:
    training.start(hosts=2)
    training.advance()
    traces = Traces.of_session()
    node = max(cluster.worker_nodes)
    told = told_of(lambda: cluster.remove_node(node, allow_graceful=False), long_step(training, 0), after_s=1.0)
    assert told.seconds < SOON_S
    assert told.error.host == 1 and "its process died" in str(told.error)
    traces.assert_gone()


@pytest.mark.slow
def test_head_killed(training: Training, cluster: Any) -> None:
    minialpa.shutdown()
    training.start(hosts=1)
    training.advance()
    pids = Traces.of_session().pids
    servers = [process.pid for name, process in cluster.head_node.live_processes() if name == "gcs_server"]
    told = told_of(kill(servers[0]), long_step(training, 0), after_s=1.0)
    assert told.seconds < SOON_S
    assert "The head of the Ray cluster" in str(told.error)
    wait_until(lambda: not any(lives(pid) for pid in pids))
    ray.shutdown()  # Ray ends a process that has lost its head.
    # A cluster that is started for the session ends with it.
    training.address = "local"
    training.start(hosts=1)
    training.advance()
    minialpa.shutdown()
    assert not ray.is_initialized()
