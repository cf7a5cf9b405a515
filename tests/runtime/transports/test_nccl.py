"""The NCCL transport around NCCL: order, devices, errors. NCCL itself runs in `benchmarks/gpu_nccl.py`."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.errors import WorkerError
from minialpa.runtime.transports import nccl
from minialpa.runtime.transports.host_transport import HostTransport
from minialpa.runtime.transports.nccl import DeviceLink, NcclTransport
from minialpa.runtime.transports.transport import ExpectedPart, Part
from tests.runtime.threads import at_once
from tests.runtime.transports import one_process_nccl
from tests.runtime.transports.peers import SECRET, TIMEOUT_S

N_DEVICES = 2


def make(n_workers: int, links: list[DeviceLink]) -> list[NcclTransport]:
    """Workers with two devices each."""
    hosts = [HostTransport(SECRET, i) for i in range(n_workers)]
    addresses = [host.address for host in hosts]
    at_once([lambda host=host: host.connect(addresses, TIMEOUT_S) for host in hosts])
    devices = [jax.devices()[i * N_DEVICES : (i + 1) * N_DEVICES] for i in range(n_workers)]
    return at_once([lambda i=i: NcclTransport(hosts[i], devices[i], links) for i in range(n_workers)])


def all_links(n_workers: int) -> list[DeviceLink]:
    pairs = [(i, j) for i in range(n_workers) for j in range(n_workers) if i != j]
    return [DeviceLink(i, a, j, b) for i, j in pairs for a in range(N_DEVICES) for b in range(N_DEVICES)]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NcclTransport]]:
    for name, module in one_process_nccl.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    before = set(threading.enumerate())
    transports = make(3, random.Random(0).sample(all_links(3), len(all_links(3))))
    yield transports
    for transport in transports:
        transport.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()


def place(array: Any, worker: int, device: int) -> jax.Array:
    return jax.device_put(array, jax.devices()[worker * N_DEVICES + device])


def test_parts_arrive_bit_by_bit_on_their_devices(workers: list[NcclTransport]) -> None:
    rng = np.random.default_rng(0)
    x = place(rng.normal(size=(6, 5)).astype(jnp.bfloat16), 0, 0)
    y = place(rng.normal(size=(4,)) > 0, 0, 1)
    empty = place(np.zeros((0, 3), np.int8), 0, 1)
    cut = (slice(1, 5), slice(0, 5, 2))
    parts = [Part(x, device=1), Part(x, cut, device=0), Part(y, device=1), Part(empty), Part(x[0, 0], device=1)]
    workers[0].send(1, 7, parts).result(TIMEOUT_S)
    expected = [np.asarray(part.array if part.index is None else part.array[part.index]) for part in parts]
    expected_parts = [ExpectedPart(e.shape, e.dtype, part.device) for e, part in zip(expected, parts, strict=True)]
    for array, other, part in zip(workers[1].receive(0, 7, expected_parts, TIMEOUT_S), expected, parts, strict=True):
        assert array.devices() == {jax.devices()[N_DEVICES + part.device]}
        assert (array.shape, array.dtype) == (other.shape, other.dtype)
        assert np.asarray(array).tobytes() == other.tobytes()


def test_everybody_may_send_to_everybody_first_and_receive_in_any_order(workers: list[NcclTransport]) -> None:
    rng = random.Random(0)
    n_messages = 20

    def work(me: int) -> None:
        messages = [(peer, tag) for peer in range(3) if peer != me for tag in range(n_messages)]
        for peer, tag in rng.sample(messages, len(messages)):
            array = place(np.full(100 + tag, me * 1000 + tag, np.float32), me, tag % 2)
            workers[me].send(peer, tag, [Part(array, device=tag // 2 % 2)])
        for peer, tag in rng.sample(messages, len(messages)):
            one = ExpectedPart((100 + tag,), np.dtype(np.float32), tag // 2 % 2)
            (array,) = workers[me].receive(peer, tag, [one], TIMEOUT_S)
            assert np.all(np.asarray(array) == peer * 1000 + tag)

    at_once([lambda me=me: work(me) for me in range(3)])


def test_what_arrives_may_be_donated(workers: list[NcclTransport]) -> None:
    workers[2].send(0, 1, [Part(place(np.arange(5000.0, dtype=np.float32), 2, 0))])
    (array,) = workers[0].receive(2, 1, [ExpectedPart((5000,), np.dtype(np.float32))], TIMEOUT_S)
    pointer = array.unsafe_buffer_pointer()
    result = jax.jit(lambda x: x + jnp.float32(1), donate_argnums=0)(array)
    assert result.unsafe_buffer_pointer() == pointer and float(result[-1]) == 5000


def test_another_shape_dtype_or_device_is_an_error(workers: list[NcclTransport]) -> None:
    wrong = [
        ExpectedPart((3,), np.dtype("f4")),
        ExpectedPart((2,), np.dtype("i4")),
        ExpectedPart((2,), np.dtype("f4"), 1),
    ]
    for tag, one in enumerate(wrong):
        workers[0].send(1, tag, [Part(place(np.zeros(2, np.float32), 0, 0))])
        with pytest.raises(WorkerError, match=rf"from worker 0 \(tag {tag}\), and got \[\(\(2,\), 'float32', 0\)\]"):
            workers[1].receive(0, tag, [one], TIMEOUT_S)


def test_a_link_that_was_not_made_is_an_error(workers: list[NcclTransport]) -> None:
    with pytest.raises(
        WorkerError, match=r"no NCCL links to worker \d from device \d to device \d, which .* \(tag 4\)"
    ):
        workers[0].send(1, 4, [Part(place(np.zeros(2), 0, 0), device=5)])
    with pytest.raises(WorkerError, match="and worker 0 has the devices"):
        workers[0].send(1, 4, [Part(place(np.zeros(2), 1, 0))])
    with pytest.raises(WorkerError, match=r"Worker 0 has no NCCL link to worker 9, but to workers \[1, 2\]"):
        workers[0].send(9, 4, [])


def test_a_peer_that_is_lost_in_the_middle_of_a_transfer_ends_every_wait(workers: list[NcclTransport]) -> None:
    # Worker 1 dies when worker 0 has announced a message: NCCL at worker 0 would wait for ever.
    taken = threading.Event()
    workers[1]._receive_all = lambda peer, entries: taken.set() or threading.Event().wait(0.5)  # type: ignore[method-assign, assignment]
    message = workers[0].send(1, 3, [Part(place(np.zeros(10, np.float32), 0, 0))])
    assert taken.wait(TIMEOUT_S)
    for channel in workers[1]._control._channels.values():
        channel._socket.shutdown(2)
    with pytest.raises(WorkerError, match="Worker 1 is lost"):
        workers[0].receive(2, 9, [], TIMEOUT_S)
    with pytest.raises(WorkerError, match=r"Arrays for worker 1 were not sent \(tag 3\)"):
        message.result(TIMEOUT_S)


def test_a_message_that_cannot_be_sent_leaves_no_worker_waiting(
    workers: list[NcclTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver has its announcement, and closes; the sender closes with a failure."""
    monkeypatch.setattr(nccl, "_FLUSH_S", 0.2)
    link = DeviceLink(0, 0, 1, 0)
    workers[0]._ends[link].communicator.abort()
    waiting = workers[1]._ends[link].stream
    with pytest.raises(WorkerError, match=r"Arrays for worker 1 were not sent \(tag 1\)\. NCCL_ERROR"):
        workers[0].send(1, 1, [Part(place(np.zeros(2, np.float32), 0, 0))]).result(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while not waiting.n_pending:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workers[1].close()
    assert not any(thread.is_alive() for thread in workers[1]._readers)
    workers[0].close()
    with pytest.raises(WorkerError, match="Worker 0 is lost"):
        workers[2].receive(0, 1, [], TIMEOUT_S)


def test_a_peer_that_leaves_is_named(workers: list[NcclTransport]) -> None:
    workers[1].close()
    with pytest.raises(WorkerError, match=r"worker 1 \(tag 9\), but worker 1 has closed its connections"):
        workers[0].receive(1, 9, [], TIMEOUT_S)
    workers[0].send(2, 1, [Part(place(np.ones(2, np.float32), 0, 0))])
    assert workers[2].receive(0, 1, [ExpectedPart((2,), np.dtype(np.float32))], TIMEOUT_S)[0].sum() == 2
