"""Bytes and a file descriptor arrive as they were sent; descriptors that nobody asked for are closed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from minialpa.runtime.transports.mailbox import ProtocolError
from minialpa.runtime.transports.wire import Unsent, receive_with_descriptor
from tests.runtime.transports.peers import open_descriptors

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_a_descriptor_goes_with_the_first_byte_and_is_closed_here(pair: Pair) -> None:
    reading, writing = os.pipe()
    unsent = Unsent([memoryview(b"ab"), memoryview(b"cd")], writing)
    assert unsent.write(pair[0]) and unsent.descriptor is None and not unsent.buffers

    data, got = receive_with_descriptor(pair[1], 4)
    assert data == b"abcd" and got is not None
    os.write(got, b"x")
    os.close(got)
    assert os.read(reading, 2) == b"x" and os.read(reading, 1) == b""
    os.close(reading)


def test_bytes_that_come_one_by_one_are_joined_and_no_more_are_read(pair: Pair) -> None:
    reading, writing = os.pipe()
    socket.send_fds(pair[0], [b"a"], [reading])
    for byte in (b"b", b"c", b"d"):
        pair[0].sendall(byte)
    data, got = receive_with_descriptor(pair[1], 3)
    assert data == b"abc" and got is not None
    assert receive_with_descriptor(pair[1], 1) == (b"d", None)
    for descriptor in (reading, writing, got):
        os.close(descriptor)


def test_a_second_descriptor_is_refused_and_both_are_closed(pair: Pair) -> None:
    reading, writing = os.pipe()
    before = open_descriptors()
    for byte in (b"a", b"b"):
        socket.send_fds(pair[0], [byte], [reading])
    with pytest.raises(ProtocolError, match="2 file descriptors at once"):
        receive_with_descriptor(pair[1], 2)
    assert open_descriptors() == before

    # Of several in one message the kernel hands over the first one, and closes the others.
    socket.send_fds(pair[0], [b"a"], [reading, writing, reading, writing])
    _, got = receive_with_descriptor(pair[1], 1)
    assert got is not None
    for descriptor in (reading, writing, got):
        os.close(descriptor)
    assert open_descriptors() == before - 2


def test_a_socket_that_ends_early_leaves_no_descriptor(pair: Pair) -> None:
    reading, writing = os.pipe()
    before = open_descriptors()
    socket.send_fds(pair[0], [b"a"], [reading])
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError, match="closed"):
        receive_with_descriptor(pair[1], 2)
    assert open_descriptors() == before
    os.close(reading)
    os.close(writing)
