"""The mailbox of a transport: it keeps messages until they are asked for, and ends all waits when there is an error.

Threads that read from peers `put` messages; threads of the program `take` them, in any order. Everything in a mailbox
changes under its lock. The first `fail` ends all waiting calls, and every later call raises that error as a
WorkerError.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from minialpa.errors import WorkerError
from minialpa.runtime.transports.transport import Bytes

T = TypeVar("T")


class ProtocolError(Exception):
    """A peer does not keep to the protocol. The message says what it did, as in "it sent two messages 3"."""


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedBytes:
    """A message as it arrived.

    Attributes:
        payload: Its bytes, aligned to ALIGNMENT.
        digest: The sender's `Layout.digest`, by which the receiver checks that both expect the same arrays.
    """

    payload: Bytes
    digest: int


class Mailbox(Generic[T]):
    """Messages of type T that have arrived at worker `number` and that nobody has taken yet, by peer and tag.

    Each waiter has its own lock, so that a message wakes the one thread that asked for it, and immediately.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()
        self._messages: dict[tuple[int, int], T] = {}
        self._waiters: dict[tuple[int, int], threading.Lock] = {}
        self._departed: set[int] = set()
        self._error: WorkerError | None = None
        self._has_failed = threading.Event()

    def put(self, peer: int, tag: int, message: T) -> None:
        """Keep a message of `peer`. Raises ProtocolError if there is one with that tag already."""
        with self._lock:
            if (peer, tag) in self._messages:
                raise ProtocolError(f"it sent two messages {tag}")
            self._messages[peer, tag] = message
            waiter = self._waiters.pop((peer, tag), None)
        if waiter is not None:
            waiter.release()

    def take(self, peer: int, tag: int, timeout_s: float | None) -> T:
        """Wait for a message and remove it from the mailbox. Without a timeout, wait for ever.

        Raises WorkerError if it does not come in time, if `peer` has closed its transport, or after `fail`.
        """
        key = peer, tag
        with self._lock:
            message = self._messages.pop(key, None)
            if must_wait := message is None and self._error is None and peer not in self._departed:
                self._waiters[key] = waiter = threading.Lock()
                waiter.acquire()

        if must_wait:
            try:
                # The lock is held already, so this blocks until `put`, `leave` or `fail` releases it.
                waiter.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            finally:
                with self._lock:
                    self._waiters.pop(key, None)
                    message = self._messages.pop(key, None)

        self.check()
        if message is None:
            raise self._missing(peer, tag, timeout_s)
        return message

    def _missing(self, peer: int, tag: int, timeout_s: float | None) -> WorkerError:
        with self._lock:
            others = sorted(self._messages)
        why = (
            "which has closed its transport" if peer in self._departed else f"which did not come within {timeout_s:g} s"
        )
        return WorkerError(
            f"Worker {self._number} awaited message {tag} of worker {peer}, {why}. There are "
            f"{len(others)} messages that nobody has asked for, as (worker, tag): {others[:8]}."
        )

    def leave(self, peer: int) -> None:
        """Note that `peer` has closed its transport. Messages that it sent before can still be taken."""
        with self._lock:
            self._departed.add(peer)
            self._wake(key for key in self._waiters if key[0] == peer)

    def fail(self, error: WorkerError) -> None:
        """Drop all messages and have every call raise `error`, or the earlier error if there was one."""
        with self._lock:
            self._error = self._error or error
            self._messages.clear()
            self._wake(self._waiters)
        self._has_failed.set()

    def _wake(self, keys: Iterable[tuple[int, int]]) -> None:
        for key in list(keys):
            self._waiters.pop(key).release()

    def check(self) -> None:
        """Raise the error of the mailbox, if there is one."""
        if self._error is not None:
            # An error of its own for each caller: a shared one would collect the tracebacks of all of them.
            raise WorkerError(str(self._error)) from self._error

    def wait_for_failure(self) -> WorkerError:
        """Block until `fail` is called; the first error."""
        self._has_failed.wait()
        assert self._error is not None
        return self._error

    @property
    def failed(self) -> bool:
        """Whether `fail` was called."""
        return self._error is not None

    def has_left(self, peer: int) -> bool:
        """Whether `peer` has closed its transport."""
        return peer in self._departed
