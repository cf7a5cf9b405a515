"""Where messages wait at the receiver until they are asked for, and how an error reaches everybody who waits."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Generic, TypeVar

from minialpa.errors import WorkerError
from minialpa.runtime.segments import Bytes

T = TypeVar("T")


class ProtocolError(Exception):
    """A peer does not keep to the protocol."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """The bytes of a message as they came, aligned, and the digest of what the sender says they are."""

    payload: Bytes
    digest: int


class Mailbox(Generic[T]):
    """What has arrived and was not asked for yet, by peer and tag; and the first error, for all who wait."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._changed = threading.Condition()
        self._messages: dict[tuple[int, int], T] = {}
        self._gone: set[int] = set()
        self._error: WorkerError | None = None

    def put(self, peer: int, tag: int, message: T) -> None:
        with self._changed:
            if (peer, tag) in self._messages:
                raise ProtocolError(f"it sent two messages {tag}")
            self._messages[peer, tag] = message
            self._changed.notify_all()

    def take(self, peer: int, tag: int, timeout_s: float | None) -> T:
        with self._changed:
            self._changed.wait_for(
                lambda: (peer, tag) in self._messages or self._error is not None or peer in self._gone, timeout_s
            )
            self.check()
            message = self._messages.pop((peer, tag), None)
            if message is not None:
                return message
            if peer in self._gone:
                why = "which has closed its transport"
            else:
                why = f"which did not come within {timeout_s:g} s"
            others = sorted(self._messages)
            raise WorkerError(
                f"Worker {self._number} awaited message {tag} of worker {peer}, {why}. There are "
                f"{len(others)} messages that nobody has asked for, as (worker, tag): {others[:8]}."
            )

    def leave(self, peer: int) -> None:
        """`peer` has said goodbye: what it has sent may still be taken."""
        with self._changed:
            self._gone.add(peer)
            self._changed.notify_all()

    def fail(self, error: WorkerError) -> None:
        with self._changed:
            self._error = self._error or error
            self._messages.clear()
            self._changed.notify_all()

    def check(self) -> None:
        if self._error is not None:
            raise WorkerError(str(self._error)) from self._error

    def wait_for_failure(self) -> WorkerError:
        """The first error, once there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None)
            assert self._error is not None
            return self._error

    @property
    def failed(self) -> bool:
        return self._error is not None

    def has_left(self, peer: int) -> bool:
        return peer in self._gone
