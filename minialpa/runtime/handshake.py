"""How two workers find each other and know that the other one has the secret: a socket for each pair of workers.

A worker listens at two doors: a Unix socket, which peers on the same machine reach, and TCP. Trying the first tells
whether memory can be shared: abstract Unix names are seen within a network namespace, so no list of machines is needed.
Both sides prove the secret with a MAC over numbers and nonces of both, before either believes a byte:

    connector -> listener   hello: magic, connector, listener, nonce
    listener -> connector   nonce, MAC(secret, "listener", hello, nonce)
    connector -> listener   MAC(secret, "connector", hello, nonce)
    listener -> connector   welcome
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue

from minialpa.errors import WorkerError

HANDSHAKE_S = 10.0
"""A guest that has not proven the secret after so long is dropped."""

_HELLO = struct.Struct("<8sII32s")
_MAGIC = b"minialp1"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_WELCOME = b"\x01"
_MAX_GUESTS = 64
_PATIENCE_S = 0.25
"""Where there are as many guests as there may be, one that has been there for so long goes when another one comes."""
_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens: TCP host and port, and the abstract name of its Unix socket (empty if it has none)."""

    host: str
    port: int
    local_name: str

    def only_tcp(self) -> Address:
        """The same without the Unix socket: peers come by TCP, and share no memory."""
        return replace(self, local_name="")


class Doors:
    """The sockets at which worker `number` listens on `host`, from now until `close`.

    arrivals: number and socket of each peer that has proven the secret. Who has not is dropped after HANDSHAKE_S, or
    sooner where many come, and keeps nobody else waiting.
    """

    def __init__(self, secret: bytes, number: int, host: str) -> None:
        if len(secret) < 16:
            raise WorkerError(f"The workers' secret has {len(secret)} bytes. Give them at least 16 random ones.")
        self.arrivals: SimpleQueue[tuple[int, socket.socket]] = SimpleQueue()
        self._secret, self._number = secret, number
        self._lock = threading.Lock()
        self._guests: dict[socket.socket, float] = {}  # and when they came, the first one first
        self._threads: set[threading.Thread] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listeners = [socket.create_server((host, 0), family=family)]
        local_name = ""
        if sys.platform == "linux":
            local_name = f"minialpa-{secrets.token_hex(16)}"
            self._listeners.append(listener := socket.socket(socket.AF_UNIX))
            listener.bind("\0" + local_name)
            listener.listen()
        self.address = Address(host, self._listeners[0].getsockname()[1], local_name)
        for listener in self._listeners:
            self._start(self._accept, listener)

    def close(self) -> None:
        """Stop listening, drop guests and end the threads."""
        with self._lock:
            self._closed = True
            threads = tuple(self._threads)
            for open_socket in (*self._listeners, *self._guests):
                shut(open_socket)
        for thread in threads:
            thread.join()
        for listener in self._listeners:
            listener.close()

    def _start(self, run: Callable[[socket.socket], None], sock: socket.socket) -> None:
        thread = threading.Thread(target=run, args=(sock,), name="minialpa-door", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                guest, _ = listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_RETRY_S)  # Out of descriptors, say. The peer tries again, too.
                continue
            with self._lock:
                if self._closed or not self._has_room():
                    guest.close()
                    continue
                self._guests[guest] = time.monotonic()
                self._start(self._welcome, guest)

    def _has_room(self) -> bool:
        """Whether another guest may come in, for whom the first one may have to go. A peer is through in no time."""
        if len(self._guests) < _MAX_GUESTS:
            return True
        first, came = next(iter(self._guests.items()))
        if time.monotonic() - came < _PATIENCE_S:
            return False
        shut(first)  # which wakes its thread
        del self._guests[first]
        return True

    def _welcome(self, guest: socket.socket) -> None:
        peer = None
        try:
            with contextlib.suppress(OSError, EOFError):
                peer = _answer(guest, self._secret, self._number, time.monotonic() + HANDSHAKE_S)
        finally:
            with self._lock:
                self._guests.pop(guest, None)
                self._threads.discard(threading.current_thread())
                if peer is None or self._closed:
                    guest.close()
                else:
                    self.arrivals.put((peer, guest))


def knock(address: Address, secret: bytes, number: int, peer: int, deadline: float) -> socket.socket:
    """Connect worker `number` to `peer`. Tries until `deadline` (of `time.monotonic`), unless the secrets differ."""
    while True:
        sock = None
        try:
            sock = _reach(address, deadline)
            _prove(sock, secret, number, peer, min(deadline, time.monotonic() + HANDSHAKE_S))
            return sock
        except (OSError, EOFError) as error:
            if sock is not None:
                sock.close()
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"Worker {number} cannot connect to worker {peer} at {address.host}, port {address.port}: "
                    f"{error}. Is it running, and is there a firewall between the two?"
                ) from error
            time.sleep(_RETRY_S)
        except BaseException:
            if sock is not None:
                sock.close()
            raise


def receive_exactly(sock: socket.socket, n_bytes: int, deadline: float | None = None) -> bytes:
    """The next `n_bytes` of a socket. Raises EOFError where it ends before, TimeoutError after `deadline`."""
    data = bytearray()
    while len(data) < n_bytes:
        if deadline is not None:
            sock.settimeout(max(1e-3, deadline - time.monotonic()))
        received = sock.recv(n_bytes - len(data))
        if not received:
            raise EOFError("the connection was closed")
        data += received
    return bytes(data)


def _reach(address: Address, deadline: float) -> socket.socket:
    timeout_s = max(1e-3, deadline - time.monotonic())
    if address.local_name and sys.platform == "linux":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + address.local_name)
            return sock
        except ConnectionRefusedError:  # Nobody has this name here: it is another machine, or another namespace.
            sock.close()
        except BaseException:
            sock.close()
            raise
    return socket.create_connection((address.host, address.port), timeout=timeout_s)


def _prove(sock: socket.socket, secret: bytes, number: int, peer: int, deadline: float) -> None:
    """The connector's side. Raises WorkerError if the listener has another secret, or is not `peer`."""
    hello = _HELLO.pack(_MAGIC, number, peer, secrets.token_bytes(_NONCE_BYTES))
    sock.settimeout(max(1e-3, deadline - time.monotonic()))
    sock.sendall(hello)
    answer = receive_exactly(sock, _NONCE_BYTES + _MAC_BYTES, deadline)
    nonce, mac = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, b"listener", hello, nonce)):
        raise WorkerError(f"What answers at the address of worker {peer} does not know the workers' secret.")
    sock.sendall(_mac(secret, b"connector", hello, nonce))
    receive_exactly(sock, len(_WELCOME), deadline)
    sock.settimeout(None)


def _answer(sock: socket.socket, secret: bytes, number: int, deadline: float) -> int | None:
    """The listener's side: the number of the peer, or None if it is none of ours."""
    hello = receive_exactly(sock, _HELLO.size, deadline)
    magic, peer, wanted, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or wanted != number:
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
    """Wake the threads that wait at a socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
