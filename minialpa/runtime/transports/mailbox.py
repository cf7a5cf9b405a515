"""The mailbox of a transport keeps messages until they are taken, in any order; an error ends all waits."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Generic, TypeVar

from minialpa.errors import WorkerError
from minialpa.runtime.transports.transport import Bytes

T = TypeVar("T")


class ProtocolError(Exception):
    """The message ends a sentence, as in "it sent two messages 3"."""


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedBytes:
    """Bytes aligned to ALIGNMENT, and the sender's `Layout.digest`."""

    payload: Bytes
    digest: int


class Mailbox(Generic[T]):
    """Messages at worker `number` that are not taken yet, by peer and tag."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._changed = threading.Condition()
        self._messages: dict[tuple[int, int], T] = {}
        self._departed: set[int] = set()
        self._error: WorkerError | None = None
        # Apart from the condition: no message wakes the threads that wait for a failure.
        self._has_failed = threading.Event()

    def put(self, peer: int, tag: int, message: T) -> None:
        """Raises ProtocolError if a message with this tag is there."""
        with self._changed:
            if (peer, tag) in self._messages:
                raise ProtocolError(f"it sent two messages with tag {tag}")
            self._messages[peer, tag] = message
            self._changed.notify_all()

    def take(self, peer: int, tag: int, timeout_s: float | None) -> T:
        """Wait for a message and remove it. With `timeout_s` None, wait for ever.

        Raises WorkerError after this time, if `peer` has closed its transport, or after `fail`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (peer, tag) in self._messages or self._error is not None or peer in self._departed, timeout_s
            )
            self.check()
            if (peer, tag) not in self._messages:
                raise self._missing_error(peer, tag, timeout_s)
            return self._messages.pop((peer, tag))

    def _missing_error(self, peer: int, tag: int, timeout_s: float | None) -> WorkerError:
        others = sorted(self._messages)
        why = (
            f"but worker {peer} has closed its connections"
            if peer in self._departed
            else f"which did not come within {timeout_s:g} s. If the step is slow, raise `worker_timeout_s` of "
            "`minialpa.init`"
        )
        return WorkerError(
            f"Worker {self._number} waited for arrays of worker {peer} (tag {tag}), {why}. {len(others)} other "
            f"messages have arrived, as (worker, tag): {others[:8]}."
        )

    def leave(self, peer: int) -> None:
        """`peer` has closed its transport. Its earlier messages can still be taken."""
        with self._changed:
            self._departed.add(peer)
            self._changed.notify_all()

    def fail(self, error: WorkerError) -> None:
        """Drop all messages. From now on, every call raises the first error."""
        with self._changed:
            self._error = self._error or error
            self._messages.clear()
            self._changed.notify_all()
        self._has_failed.set()

    def check(self) -> None:
        if self._error is not None:
            # A new error for each caller: a shared one would collect all their tracebacks.
            raise WorkerError(str(self._error)) from self._error

    def wait_for_failure(self) -> WorkerError:
        self._has_failed.wait()
        assert self._error is not None
        return self._error

    @property
    def failed(self) -> bool:
        return self._error is not None

    def has_left(self, peer: int) -> bool:
        return peer in self._departed
