"""Messages between threads of one process: the smallest transport, and the one to copy for a new one.

A sender puts copies of arrays into the mailbox of its peer. Nothing crosses a border of processes, so there is no wire
format and no connection to lose but by `lose`, with which tests end a worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minialpa.errors import WorkerError
from minialpa.runtime.transports.mailbox import Mailbox
from minialpa.runtime.transports.transport import Part, Piece

#: Arrays of one message.
_Arrays = list[np.ndarray[Any, Any]]


@dataclass(slots=True)
class Hub:
    """Where transports of this process find each other: the mailbox at each address."""

    mailboxes: dict[int, Mailbox[_Arrays]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)


class InProcessTransport:
    """The transport of worker `number`: puts copies of arrays into the mailboxes of its peers. See `Transport`."""

    def __init__(self, hub: Hub, number: int) -> None:
        self.number, self.address = number, next(hub.numbers)
        self._hub = hub
        self._addresses: Sequence[int] = ()
        self._mailbox: Mailbox[_Arrays] = Mailbox(number)
        hub.mailboxes[self.address] = self._mailbox
        # One thread: messages leave in order, and a send waits for its arrays, not for those of others to be asked for.
        self._sender = ThreadPoolExecutor(1, f"minialpa-send-{number}")

    def connect(self, addresses: Sequence[int], timeout_s: float = 60.0) -> None:
        """`addresses[i]` is that of worker i."""
        self._addresses = addresses

    def send(self, peer: int, tag: int, parts: Sequence[Part]) -> Future[None]:
        self._mailbox.check()
        return self._sender.submit(self._deliver, peer, tag, parts)

    def receive(self, peer: int, tag: int, pieces: Sequence[Piece], timeout_s: float) -> _Arrays:
        arrays = self._mailbox.take(peer, tag, timeout_s)
        sent = [(array.shape, array.dtype) for array in arrays]
        if sent != [(piece.shape, piece.dtype) for piece in pieces]:
            raise WorkerError(
                f"Worker {self.number} awaited {pieces} as message {tag} of worker {peer} and got {sent}. The two run "
                "different programs."
            )
        return arrays

    def close(self) -> None:
        self._sender.shutdown()
        self._leave(lambda peer: peer.leave(self.number))

    def lose(self) -> None:
        """End as the transport of a process that dies: peers that wait for this worker get an error."""
        self._leave(lambda peer: peer.fail(WorkerError(f"Worker {self.number} is lost: its process has ended.")))

    def _leave(self, tell: Callable[[Mailbox[_Arrays]], None]) -> None:
        self._hub.mailboxes.pop(self.address, None)
        self._mailbox.fail(WorkerError(f"Worker {self.number} has closed its transport."))
        for address in self._addresses:
            if address in self._hub.mailboxes:
                tell(self._hub.mailboxes[address])

    def _deliver(self, peer: int, tag: int, parts: Sequence[Part]) -> None:
        arrays = []
        for part in parts:
            array = np.asarray(part.array)  # waits until it is computed
            arrays.append(np.array(array if part.index is None else array[part.index]))
        mailbox = self._hub.mailboxes.get(self._addresses[peer])
        if mailbox is None:
            raise WorkerError(f"Message {tag} to worker {peer} was not sent: it has closed its transport.")
        mailbox.put(self.number, tag, arrays)
