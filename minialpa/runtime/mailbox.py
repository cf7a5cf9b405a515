"""Where messages wait at the receiver until they are asked for, and how an error reaches everybody who waits."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from minialpa.errors import WorkerError
from minialpa.runtime.shared_memory import Bytes

T = TypeVar("T")


class ProtocolError(Exception):
    """A peer does not keep to the protocol."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """The bytes of a message as they came, aligned, and the digest of what the sender says they are."""

    payload: Bytes
    digest: int


class Mailbox(Generic[T]):
    """What has arrived and was not asked for yet, by peer and tag; and the first error, for all who wait.

    Who waits has a lock of their own, so a message wakes only the thread that asked for it, and at once.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()
        self._messages: dict[tuple[int, int], T] = {}
        self._waiting: dict[tuple[int, int], threading.Lock] = {}
        self._gone: set[int] = set()
        self._error: WorkerError | None = None
        self._has_failed = threading.Event()

    def put(self, peer: int, tag: int, message: T) -> None:
        with self._lock:
            if (peer, tag) in self._messages:
                raise ProtocolError(f"it sent two messages {tag}")
            self._messages[peer, tag] = message
            waiter = self._waiting.pop((peer, tag), None)
        if waiter is not None:
            waiter.release()

    def take(self, peer: int, tag: int, timeout_s: float | None) -> T:
        key = peer, tag
        with self._lock:
            message = self._messages.pop(key, None)
            if comes_later := message is None and self._error is None and peer not in self._gone:
                self._waiting[key] = woken = threading.Lock()
                woken.acquire()
        if comes_later:
            try:
                woken.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            finally:
                with self._lock:
                    self._waiting.pop(key, None)
                    message = self._messages.pop(key, None)
        self.check()
        if message is None:
            raise self._missing(peer, tag, timeout_s)
        return message

    def _missing(self, peer: int, tag: int, timeout_s: float | None) -> WorkerError:
        with self._lock:
            others = sorted(self._messages)
        why = "which has closed its transport" if peer in self._gone else f"which did not come within {timeout_s:g} s"
        return WorkerError(
            f"Worker {self._number} awaited message {tag} of worker {peer}, {why}. There are "
            f"{len(others)} messages that nobody has asked for, as (worker, tag): {others[:8]}."
        )

    def leave(self, peer: int) -> None:
        """`peer` has said goodbye: what it has sent may still be taken."""
        with self._lock:
            self._gone.add(peer)
            self._wake(key for key in self._waiting if key[0] == peer)

    def fail(self, error: WorkerError) -> None:
        with self._lock:
            self._error = self._error or error
            self._messages.clear()
            self._wake(self._waiting)
        self._has_failed.set()

    def _wake(self, keys: Iterable[tuple[int, int]]) -> None:
        for key in list(keys):
            self._waiting.pop(key).release()

    def check(self) -> None:
        if self._error is not None:
            raise WorkerError(str(self._error)) from self._error

    def wait_for_failure(self) -> WorkerError:
        """The first error, once there is one."""
        self._has_failed.wait()
        assert self._error is not None
        return self._error

    @property
    def failed(self) -> bool:
        return self._error is not None

    def has_left(self, peer: int) -> bool:
        return peer in self._gone
