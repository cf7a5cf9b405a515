"""The transport through host memory, between real processes."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minialpa.errors import WorkerError
from minialpa.runtime.transports import handshake, host_transport
from minialpa.runtime.transports.channel import QUICK_BYTES
from minialpa.runtime.transports.host_transport import HostTransport
from minialpa.runtime.transports.transport import ALIGNMENT, ExpectedPart, Part, Transport
from tests.runtime.threads import Threads, at_once, run_threads
from tests.runtime.transports.peers import (
    SECRET,
    TIMEOUT_S,
    Peer,
    open_descriptors,
    peer_process,
)

DTYPES = [np.dtype(d) for d in (bool, "i1", "u2", "i4", "f2", "f4", "f8", "c8", "c16", ml_dtypes.bfloat16)]
DTYPES += [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.int4)]
BYTES = np.dtype(np.uint8)
BIG = QUICK_BYTES * 2


def group(*secrets: bytes) -> list[HostTransport]:
    return [HostTransport(secret, i) for i, secret in enumerate(secrets)]


def connect_all(transports: list[HostTransport], timeout_s: float = TIMEOUT_S) -> dict[int, BaseException]:
    """Connect transports of this process, all at the same time; the errors."""
    addresses = [transport.address for transport in transports]
    return run_threads(len(transports), lambda i: transports[i].connect(addresses, timeout_s)).errors


def connected(n: int) -> list[HostTransport]:
    transports = group(*[SECRET] * n)
    assert not connect_all(transports)
    return transports


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """One process for all tests that leave it alive."""
    with peer_process() as peer:
        yield peer


_tags = iter(range(1 << 32, 1 << 62))


def expected_parts(arrays: list[np.ndarray[Any, Any]]) -> list[ExpectedPart]:
    return [ExpectedPart(array.shape, array.dtype) for array in arrays]


def send_back(transport: Transport, tag: int, expected_parts: list[ExpectedPart]) -> None:
    """Receive a message at the peer, and return its parts with the same tag."""
    transport.send(0, tag, [Part(array) for array in transport.receive(0, tag, expected_parts, TIMEOUT_S)])


# What arrives


@st.composite
def slices(draw: st.DrawFn, n: int) -> slice:
    start, stop = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
    return slice(start, stop, draw(st.sampled_from([None, 1, 2, 3])))


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Any dtype, shape and slices. Some are jax arrays, and some are larger than what follows a header."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.one_of(st.lists(st.integers(0, 7), max_size=4).map(tuple), st.just((200, 300))))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    array: Any = rng.integers(0, 2, size=shape).astype(dtype)
    if dtype.itemsize < 8 and draw(st.booleans()):
        array = jax.device_put(array, draw(st.sampled_from(jax.devices())))
    index = tuple(draw(slices(n)) for n in shape) if draw(st.booleans()) else None
    return Part(array, index)


@hypothesis.settings(max_examples=25)
@given(sent=st.lists(parts(), max_size=5))
def test_every_part_arrives_bit_by_bit(peer: Peer, sent: list[Part]) -> None:
    expected = [np.asarray(part.array)[() if part.index is None else part.index] for part in sent]
    expected = [np.asarray(array) for array in expected]
    tag = next(_tags)
    peer.start(send_back, tag, expected_parts(expected))
    peer.mine.send(1, tag, sent).result(TIMEOUT_S)
    received = peer.mine.receive(1, tag, expected_parts(expected), TIMEOUT_S)
    peer.result()
    for array, other in zip(received, expected, strict=True):
        assert (array.shape, array.dtype, array.tobytes()) == (other.shape, other.dtype, other.tobytes())
        assert array.size == 0 or array.ctypes.data % ALIGNMENT == 0


def test_messages_can_be_received_in_any_order(peer: Peer) -> None:
    tags = [next(_tags) for _ in range(40)]
    arrays = {tag: np.full(BIG if i % 3 == 0 else i, i, np.uint8) for i, tag in enumerate(tags)}
    for tag in tags:
        peer.mine.send(1, tag, [Part(arrays[tag])])
    shuffled = random.Random(0).sample(tags, len(tags))
    for tag in shuffled:
        peer.call(send_back, tag, expected_parts([arrays[tag]]))
    for tag in reversed(shuffled):
        (array,) = peer.mine.receive(1, tag, expected_parts([arrays[tag]]), TIMEOUT_S)
        assert np.array_equal(array, arrays[tag])


def test_messages_from_several_threads_that_no_socket_holds_arrive_whole(peer: Peer) -> None:
    # Sizes around the largest that the caller writes itself. The peer reads only after all have been sent.
    sizes = [30_000, 100, BIG, 7, 2 << 20, QUICK_BYTES, QUICK_BYTES + 1, 3]
    arrays = {next(_tags): np.full(sizes[i % len(sizes)], i % 251, np.uint8) for i in range(96)}

    def send(tags: list[int]) -> None:
        for tag in tags:
            peer.mine.send(1, tag, [Part(arrays[tag])])

    os.kill(peer.process.pid, signal.SIGSTOP)
    try:
        at_once([functools.partial(send, list(arrays)[i::3]) for i in range(3)])
    finally:
        os.kill(peer.process.pid, signal.SIGCONT)
    for tag, array in arrays.items():
        peer.call(send_back, tag, expected_parts([array]))
        (back,) = peer.mine.receive(1, tag, expected_parts([array]), TIMEOUT_S)
        assert np.array_equal(back, array)


def test_another_layout_than_was_sent_is_an_error(peer: Peer) -> None:
    tag = next(_tags)
    peer.mine.send(1, tag, [Part(np.zeros((2, 3), np.float32))])
    with pytest.raises(
        WorkerError, match=rf"expected 24 bytes from worker 0 \(tag {tag}\).*another layout. This is a bug in"
    ):
        peer.call(send_back, tag, [ExpectedPart((3, 2), np.dtype(np.float32))])


# Memory


def ping_pong(peer: Peer, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    tag = next(_tags)
    peer.start(send_back, tag, expected_parts([array]))
    peer.mine.send(1, tag, [Part(array)])
    (back,) = peer.mine.receive(1, tag, expected_parts([array]), TIMEOUT_S)
    peer.result()
    return back


def test_an_array_may_be_donated_when_it_is_sent(peer: Peer) -> None:
    add = jax.jit(lambda x: x + jnp.float32(1), donate_argnums=0)
    x = jnp.zeros(BIG, jnp.float32)
    tags = [next(_tags) for _ in range(8)]
    for tag in tags:
        peer.mine.send(1, tag, [Part(x)]).result(TIMEOUT_S)
        x = add(x)
    for i, tag in enumerate(tags):
        peer.call(send_back, tag, [ExpectedPart(x.shape, x.dtype)])
        (back,) = peer.mine.receive(1, tag, [ExpectedPart(x.shape, x.dtype)], TIMEOUT_S)
        assert np.all(back == i)


def test_neither_end_keeps_what_was_sent(peer: Peer) -> None:
    array = np.ones(BIG, np.float32)
    back = ping_pong(peer, array)
    kept = [weakref.ref(array), weakref.ref(back.base)]
    del array, back
    deadline = time.monotonic() + TIMEOUT_S
    while any(ref() is not None for ref in kept):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# What goes wrong


def test_a_message_that_does_not_come_is_an_error_that_says_what_did(peer: Peer) -> None:
    tag = next(_tags)
    peer.mine.send(1, tag, [Part(np.zeros(3))])
    peer.call(send_back, tag, [ExpectedPart((3,), np.dtype(np.float64))])
    peer.mine.take(1, tag, TIMEOUT_S)
    peer.mine.send(1, tag, [Part(np.zeros(3))])
    peer.call(send_back, tag, [ExpectedPart((3,), np.dtype(np.float64))])
    with pytest.raises(
        WorkerError, match=r"worker 1 \(tag 17\), which did not come within 0\.2 s.*`worker_timeout_s`.* 1 other "
    ):
        peer.mine.receive(1, 17, [], timeout_s=0.2)
    peer.mine.take(1, tag, TIMEOUT_S)
    with pytest.raises(WorkerError, match=r"Worker 0 is not connected to worker 5, but to workers \[1\]"):
        peer.mine.receive(5, 17, [], timeout_s=0.2)


def hold_still(transport: Transport) -> None:
    threading.Event().wait()


def test_a_killed_peer_ends_every_wait() -> None:
    with peer_process() as peer:
        peer.start(hold_still)
        threads = Threads().start(3, lambda tag: peer.mine.receive(1, tag, [], TIMEOUT_S))
        os.kill(peer.process.pid, signal.SIGKILL)
        errors = threads.join(TIMEOUT_S).errors
        assert len(errors) == 3 and all(str(e).startswith("Worker 1 is lost: ") for e in errors.values())
        with pytest.raises(WorkerError, match="Worker 1 is lost"):
            peer.mine.send(1, 9, [])


def test_a_peer_that_stops_reading_does_not_hold_up_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_transport, "_FLUSH_S", 0.1)
    before = set(threading.enumerate())
    with peer_process() as peer:
        os.kill(peer.process.pid, signal.SIGSTOP)
        try:
            messages = [peer.mine.send(1, tag, [Part(np.zeros(32 << 10, np.uint8))]) for tag in range(500)]
            peer.mine.close()
            assert not futures.wait(messages, TIMEOUT_S).not_done
            assert any(message.exception() for message in messages)
            for thread in set(threading.enumerate()) - before:
                thread.join(TIMEOUT_S)
                assert not thread.is_alive()
        finally:
            os.kill(peer.process.pid, signal.SIGKILL)


def test_what_cannot_be_computed_is_an_error_of_the_transport() -> None:
    transports = connected(2)
    x = jnp.zeros(4)
    x.delete()
    with pytest.raises(WorkerError, match=r"Arrays for worker 1 were not sent \(tag 5\)\. .*deleted"):
        transports[0].send(1, 5, [Part(x)]).result(TIMEOUT_S)
    with pytest.raises(WorkerError, match=r"Arrays for worker 1 were not sent \(tag 5\)"):
        transports[0].receive(1, 6, [], TIMEOUT_S)
    transports[0].close()
    with pytest.raises(WorkerError, match="Worker 0 is lost"):
        transports[1].receive(0, 5, [], TIMEOUT_S)
    transports[1].close()


# Who may connect


def test_close_leaves_no_thread_and_no_descriptor() -> None:
    gc.collect()
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    transports, kept = connected(3), []
    pairs = list(itertools.permutations(range(3), 2))
    for i, j in pairs:
        transports[i].send(j, i, [Part(np.full(1 << 20, i, np.uint8))])
    for i, j in pairs:
        kept += transports[i].receive(j, j, [ExpectedPart((1 << 20,), BYTES)], TIMEOUT_S)
    for transport in transports:
        transport.close()
    assert set(threading.enumerate()) == threads and open_descriptors() == descriptors
    # Arrays outlive their transport.
    assert [int(a[0]) for a in kept] == [int(a[-1]) for a in kept] == [j for _, j in pairs]
    with pytest.raises(WorkerError, match="closed its connections"):
        transports[0].send(1, 50, [])
    with pytest.raises(WorkerError, match="has 3 bytes"):
        HostTransport(b"abc", 0)


def test_what_was_sent_before_goodbye_can_be_received() -> None:
    a, b = connected(2)
    a.send(1, 3, [Part(np.arange(9))])
    a.close()
    (array,) = b.receive(0, 3, [ExpectedPart((9,), np.dtype(int))], TIMEOUT_S)
    assert np.array_equal(array, np.arange(9))
    with pytest.raises(WorkerError, match=r"worker 0 \(tag 4\), but worker 0 has closed its connections"):
        b.receive(0, 4, [], TIMEOUT_S)
    b.close()


def test_another_secret_is_refused() -> None:
    transports = group(SECRET, SECRET + b"?")
    errors = connect_all(transports, timeout_s=0.5)
    for transport in transports:
        transport.close()
    assert "does not know the workers' secret" in str(errors[0])
    assert "waited 0.5 s for connections from workers [0]" in str(errors[1])


def test_a_peer_that_cannot_prove_the_secret_is_dropped() -> None:
    transport = HostTransport(SECRET, 1)
    try:
        hello = handshake._HELLO.pack(b"minialp1", 0, 1, bytes(32))
        with socket.create_connection((transport.address.host, transport.address.port)) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.sendall(hello + bytes(32))
            answer = b""
            while received := connection.recv(1000):
                answer += received
        # A nonce and a MAC, and no welcome.
        assert len(answer) == 64
        assert transport._listener.authenticated.empty()
    finally:
        transport.close()


def test_strangers_do_no_harm_and_keep_nobody_waiting() -> None:
    transports, strangers = group(SECRET, SECRET), []
    begun_s = time.monotonic()
    for transport in transports:
        for _ in range(20):
            strangers.append(socket.create_connection((transport.address.host, transport.address.port)))  # Silent.
            strangers.append(socket.create_connection((transport.address.host, transport.address.port)))
            strangers[-1].sendall(np.random.default_rng(0).bytes(5000))
    assert not connect_all(transports)
    assert time.monotonic() - begun_s < handshake.HANDSHAKE_S / 2
    transports[0].send(1, 0, [Part(np.arange(3))])
    assert transports[1].receive(0, 0, [ExpectedPart((3,), np.dtype(int))], TIMEOUT_S)[0].tolist() == [0, 1, 2]
    for open_socket in (*transports, *strangers):
        open_socket.close()


def test_a_silent_connection_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.1)
    transport = HostTransport(SECRET, 0)
    with socket.create_connection((transport.address.host, transport.address.port)) as connection:
        connection.settimeout(TIMEOUT_S)
        assert connection.recv(1) == b""
    transport.close()


def test_only_the_given_address_is_listened_on() -> None:
    transport = HostTransport(SECRET, 0, "127.0.0.2")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", transport.address.port), timeout=TIMEOUT_S)
    transport.close()


def test_a_worker_that_is_missing_is_named() -> None:
    transport, missing = group(SECRET, SECRET)
    missing.close()
    with pytest.raises(WorkerError, match=r"Worker 0 cannot connect to worker 1 at 127\.0\.0\.1, port \d+: .*refused"):
        transport.connect([transport.address, missing.address], timeout_s=0.2)
    transport.close()
