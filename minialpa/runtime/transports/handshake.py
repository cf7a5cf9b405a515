"""Connections of workers that prove to each other that they know the session's secret.

Each side sends a MAC over the numbers and nonces of both, and reads no other data before it has checked the peer's MAC:

    connector -> listener   hello: magic, connector, listener, nonce
    listener -> connector   nonce, MAC(secret, "listener", hello, nonce)
    connector -> listener   MAC(secret, "connector", hello, nonce)
    listener -> connector   welcome

Until then, a peer is *pending*. The listener drops failed ones without an answer.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from minialpa.errors import WorkerError

HANDSHAKE_S = 10.0
"""Seconds after which a pending peer is dropped."""

_HELLO = struct.Struct("<8sII32s")
_MAGIC = b"minialp1"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_WELCOME = b"\x01"
_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


class Listener:
    """The socket at which worker `number` listens on `host`, until `close`. Pending peers do not delay each other.

    Attributes:
        authenticated: number and socket of each peer that has proven the secret. The thread that takes a socket owns
            it.
    """

    def __init__(self, secret: bytes, number: int, host: str) -> None:
        if len(secret) < 16:
            raise WorkerError(
                f"The workers' secret has {len(secret)} bytes instead of at least 16. This is a bug in minialpa: "
                "report it with this message."
            )
        self.authenticated: SimpleQueue[tuple[int, socket.socket]] = SimpleQueue()
        self._secret, self._number = secret, number

        self._lock = threading.Lock()
        self._pending: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server_socket = socket.create_server((host, 0), family=family)
        self.address = Address(host, self._server_socket.getsockname()[1])
        self._start(self._accept, self._server_socket)

    def close(self) -> None:
        """Authenticated peers stay connected."""
        with self._lock:
            self._closed = True
            threads = tuple(self._threads)
            for open_socket in (self._server_socket, *self._pending):
                shut(open_socket)
        for thread in threads:
            thread.join()
        self._server_socket.close()

    def _start(self, run: Callable[[socket.socket], None], sock: socket.socket) -> None:
        thread = threading.Thread(target=run, args=(sock,), name="minialpa-listener", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self, server_socket: socket.socket) -> None:
        """A thread of its own authenticates each connection."""
        while True:
            try:
                pending, _ = server_socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_RETRY_S)  # The process may be out of file descriptors. The connector retries, too.
                continue

            with self._lock:
                if self._closed:
                    pending.close()
                    continue
                self._pending.add(pending)
                self._start(self._authenticate, pending)

    def _authenticate(self, pending: socket.socket) -> None:
        peer = None
        try:
            with contextlib.suppress(OSError, EOFError):
                peer = _answer(pending, self._secret, self._number, time.monotonic() + HANDSHAKE_S)
        finally:
            with self._lock:
                self._pending.discard(pending)
                self._threads.discard(threading.current_thread())
                if peer is None or self._closed:
                    pending.close()
                else:
                    self.authenticated.put((peer, pending))


def connect(address: Address, *, secret: bytes, number: int, peer: int, deadline: float) -> socket.socket:
    """Connect worker `number` to worker `peer`, which listens at `address`.

    Retries until `deadline` (of `time.monotonic`), then raises WorkerError; at once if the listener has another secret.
    """
    while True:
        sock = None
        try:
            timeout_s = max(1e-3, deadline - time.monotonic())
            sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
            _prove(
                sock, secret=secret, number=number, peer=peer, deadline=min(deadline, time.monotonic() + HANDSHAKE_S)
            )
            return sock
        except (OSError, EOFError) as error:
            if sock is not None:
                sock.close()
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"Worker {number} cannot connect to worker {peer} at {address.host}, port {address.port}: "
                    f"{error}. Check that it runs, and that no firewall between the two hosts blocks TCP."
                ) from error
            time.sleep(_RETRY_S)
        except BaseException:
            if sock is not None:
                sock.close()
            raise


def receive_exactly(sock: socket.socket, n_bytes: int, deadline: float | None = None) -> bytes:
    """Raises EOFError if the connection closes before, TimeoutError after `deadline`."""
    data = bytearray()
    while len(data) < n_bytes:
        if deadline is not None:
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
        received = sock.recv(n_bytes - len(data))
        if not received:
            raise EOFError("the connection was closed")
        data += received
    return bytes(data)


def _prove(sock: socket.socket, *, secret: bytes, number: int, peer: int, deadline: float) -> None:
    """The connector's side. Raises WorkerError if the listener has another secret."""
    hello = _HELLO.pack(_MAGIC, number, peer, secrets.token_bytes(_NONCE_BYTES))
    sock.settimeout(max(1e-3, deadline - time.monotonic()))
    sock.sendall(hello)

    answer = receive_exactly(sock, _NONCE_BYTES + _MAC_BYTES, deadline)
    nonce, mac = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, b"listener", hello, nonce)):
        raise WorkerError(
            f"The process at the address of worker {peer} does not know the workers' secret, so it is of another "
            f"session. Worker {peer} was probably lost: `minialpa.restart()` starts new workers."
        )

    sock.sendall(_mac(secret, b"connector", hello, nonce))
    # Without the welcome, the listener may have dropped this connection.
    receive_exactly(sock, len(_WELCOME), deadline)
    sock.settimeout(None)


def _answer(sock: socket.socket, secret: bytes, number: int, deadline: float) -> int | None:
    """The listener's side: the number of the peer, or None if it does not prove the secret."""
    hello = receive_exactly(sock, _HELLO.size, deadline)
    magic, peer, addressee, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or addressee != number:
        return None

    nonce = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(nonce + _mac(secret, b"listener", hello, nonce))
    mac = receive_exactly(sock, _MAC_BYTES, deadline)
    if not hmac.compare_digest(mac, _mac(secret, b"connector", hello, nonce)):
        return None

    sock.sendall(_WELCOME)
    sock.settimeout(None)
    return int(peer)


def _mac(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + hello + nonce, "sha256")


def shut(sock: socket.socket) -> None:
    """Wakes the threads that block on the socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
