"""Transport between GPUs: jax arrays from device to device by NCCL, through CuPy.

There is one communicator of two ranks for each way from a device of one worker to a device of another. NCCL matches
sends and receives by their order, and a kernel spins while one waits for the other. So nothing is posted before both
sides are there: a sender waits until its arrays are ready, announces the message over the host transport, and posts its
sends; a thread at the receiver reads the announcements in order and posts the receives. Hence tags may be asked for in
any order, both ends of a communicator see one order, and no kernel waits for a worker that is busy with other things.

Only addresses and bytes are given to NCCL, which is all the same for every dtype. What arrives is written into arrays
that jax has allocated: they come from jax's own pool, and may be donated like any other.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minialpa.errors import WorkerError
from minialpa.runtime.host_transport import HostTransport
from minialpa.runtime.mailbox import Mailbox
from minialpa.runtime.transport import Part, Piece
from minialpa.support.private_jax import memory_of

_SETUP_TIMEOUT_S = 120.0
_FLUSH_S = 2.0
# Tags of the host transport: numbers of links while communicators are made, then of announcements.
_ANNOUNCEMENT = 1 << 62


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """A way from device `source_device` of worker `source` to a device of `target`, as each worker numbers its own."""

    source: int
    source_device: int
    target: int
    target_device: int


class NcclTransport:
    """The transport between the GPUs of workers.

    control: connected; it is closed with this transport. devices: of this worker. links: all that are used between any
    workers, the same list everywhere; each costs time and memory of two GPUs. Making a transport blocks until the peers
    make theirs. Every worker makes communicators in the one order of all links, so no two wait for each other; that a
    peer dies meanwhile is the launcher's to notice.
    """

    def __init__(self, control: HostTransport, devices: Sequence[jax.Device], links: Sequence[Link]) -> None:
        self._control = control
        self._number = control.number
        self._devices = tuple(devices)
        self._mailbox = Mailbox[list[jax.Array]](control.number)
        self._ends: dict[Link, LinkEnd] = {}
        self._closing = False
        self._lock = threading.Lock()
        for i, link in enumerate(sorted(set(links))):
            if self._number in (link.source, link.target):
                self._ends[link] = self._make_end(i, link)
        self._outgoing: dict[int, SimpleQueue[_Outgoing | None]] = {
            peer: SimpleQueue() for peer in sorted({link.target for link in self._ends} - {self._number})
        }
        sources = sorted({link.source for link in self._ends} - {self._number})
        self._writers = [self._start(self._write_all, peer) for peer in self._outgoing]
        self._readers = [self._start(self._read_all, peer) for peer in sources]
        self._watcher = self._start(self._watch)

    def send(self, peer: int, tag: int, parts: Sequence[Part]) -> Future[None]:
        """See `Transport.send`. Parts that are cut from an array are copied on its device."""
        self._mailbox.check()
        if peer not in self._outgoing:
            raise WorkerError(f"Worker {self._number} has no link to {peer}, but to {sorted(self._outgoing)}.")
        arrays = tuple(jnp.asarray(part.array if part.index is None else part.array[part.index]) for part in parts)
        links = tuple(
            Link(self._number, self._device_of(array), peer, part.device)
            for array, part in zip(arrays, parts, strict=True)
        )
        if missing := sorted(set(links) - set(self._ends)):
            raise WorkerError(f"Message {tag} needs links that were not made: {missing}.")
        sent: Future[None] = Future()
        sent.set_running_or_notify_cancel()
        self._outgoing[peer].put(_Outgoing(tag, arrays, links, sent))
        return sent

    def receive(self, peer: int, tag: int, pieces: Sequence[Piece], timeout_s: float) -> list[jax.Array]:
        """See `Transport.receive`. The arrays lie on the devices that `pieces` say, complete."""
        arrays = self._mailbox.take(peer, tag, timeout_s)
        got = [(array.shape, str(array.dtype), self._device_of(array)) for array in arrays]
        wanted = [(piece.shape, str(piece.dtype), piece.device) for piece in pieces]
        if got != wanted:
            raise WorkerError(
                f"Worker {self._number} awaited {wanted} (shape, dtype, device) as message {tag} of worker {peer}, and "
                f"got {got}. The two run different programs."
            )
        return arrays

    def close(self) -> None:
        """See `Transport.close`. Waits a little for messages that are under way."""
        self._closing = True
        for queue in self._outgoing.values():
            queue.put(None)
        deadline = time.monotonic() + _FLUSH_S
        _join(self._writers, deadline)
        failed = self._mailbox.failed or self._control.mailbox.failed
        self._control.close()  # Ends the watcher, and the readers but one that a peer leaves waiting in NCCL.
        _join(self._readers, time.monotonic() if failed else deadline)
        busy = any(thread.is_alive() for thread in (*self._writers, *self._readers))
        self._end(WorkerError(f"Worker {self._number} has closed its transport."), abort=failed or busy)
        _join((*self._writers, *self._readers, self._watcher), time.monotonic() + _FLUSH_S)

    def _make_end(self, i: int, link: Link) -> LinkEnd:
        """One end of the communicator of link number `i`; it has carried a byte."""
        if link.source == link.target:
            raise WorkerError(f"{link} stays within a worker, where jax moves arrays itself.")
        if self._number == link.source:
            unique_id = new_id()
            self._control.send(link.target, i, [Part(np.frombuffer(unique_id, np.uint8))])
            end = LinkEnd(self._devices[link.source_device], unique_id, rank=0)
        else:
            unique_id = self._control.take(link.source, i, _SETUP_TIMEOUT_S).payload.tobytes()
            end = LinkEnd(self._devices[link.target_device], unique_id, rank=1)
        # NCCL sets up the way at first use, and waits for the peer meanwhile: better here, where all keep one order.
        probe = jnp.empty((1,), jnp.uint8, device=end.device).block_until_ready()
        exchange([(end, probe)], []) if self._number == link.source else exchange([], [(end, probe)])
        return end

    def _device_of(self, array: jax.Array) -> int:
        (device,) = array.devices()
        if device not in self._devices:
            raise WorkerError(f"An array lies on {device}, which is not one of worker {self._number}: {self._devices}.")
        return self._devices.index(device)

    def _start(self, run: Any, *args: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=args, name="minialpa-nccl", daemon=True)
        thread.start()
        return thread

    # Writing: a thread for each peer, one message at a time.

    def _write_all(self, peer: int) -> None:
        n_announced = 0
        while (job := self._outgoing[peer].get()) is not None:
            try:
                self._mailbox.check()
                jax.block_until_ready(job.arrays)
                text = json.dumps([job.tag, [_describe(*item) for item in zip(job.arrays, job.links, strict=True)]])
                announcement = np.frombuffer(text.encode(), np.uint8)
                self._control.send(peer, _ANNOUNCEMENT + n_announced, [Part(announcement)]).result()
                n_announced += 1
                exchange([(self._ends[link], array) for link, array in zip(job.links, job.arrays, strict=True)], [])
                self._mailbox.check()  # What was aborted seems to be done, too.
                job.sent.set_result(None)
            except Exception as error:
                failure = WorkerError(f"Message {job.tag} to worker {peer} was not sent: {str(error) or repr(error)}")
                failure.__cause__ = error
                job.sent.set_exception(failure)
                self._fail(failure)
            del job

    # Reading: a thread for each peer.

    def _read_all(self, peer: int) -> None:
        n_read = 0
        while True:
            try:
                announcement = self._control.take(peer, _ANNOUNCEMENT + n_read, None)
            except WorkerError as error:
                if self._control.mailbox.has_left(peer):
                    self._mailbox.leave(peer)
                else:
                    self._fail(error)
                return
            try:
                n_read += 1
                tag, entries = json.loads(announcement.payload.tobytes())
                self._mailbox.put(peer, int(tag), self._receive_all(peer, entries))
            except Exception as error:
                failure = WorkerError(f"A message of worker {peer} could not be received: {str(error) or repr(error)}")
                failure.__cause__ = error
                self._fail(failure)
                return

    def _receive_all(self, peer: int, entries: list[Any]) -> list[jax.Array]:
        links = [
            Link(peer, source_device, self._number, target_device) for source_device, target_device, _, _ in entries
        ]
        arrays = [
            jnp.empty(shape, jnp.dtype(dtype), device=self._devices[link.target_device])
            for link, (_, _, dtype, shape) in zip(links, entries, strict=True)
        ]
        # The fill that jax does must be over: it would overwrite what comes.
        jax.block_until_ready(arrays)
        exchange([], [(self._ends[link], array) for link, array in zip(links, arrays, strict=True)])
        return arrays

    # Ending

    def _watch(self) -> None:
        """A peer that dies leaves NCCL waiting for ever. The host transport notices, and this wakes everybody."""
        self._fail(self._control.mailbox.wait_for_failure())

    def _fail(self, error: WorkerError) -> None:
        if not self._closing:
            self._end(error, abort=True)
            self._control.mailbox.fail(error)  # So it will not say goodbye, and the peers notice.

    def _end(self, error: WorkerError, abort: bool) -> None:
        self._mailbox.fail(error)
        with self._lock:
            ends, self._ends = self._ends, {}
        for end in ends.values():
            end.close(abort)


@dataclass(frozen=True, slots=True, eq=False)
class _Outgoing:
    tag: int
    arrays: tuple[jax.Array, ...]
    links: tuple[Link, ...]
    sent: Future[None]


def new_id() -> bytes:
    """What the ranks of a new communicator know it by."""
    return bytes(_cuda().nccl.get_unique_id())


class LinkEnd:
    """One of the two ends of a communicator, with a stream of its own on `device`. With one rank, its own peer."""

    def __init__(self, device: jax.Device, unique_id: bytes, rank: int, n_ranks: int = 2) -> None:
        self.device = device
        self.peer = n_ranks - 1 - rank
        with self.current():
            # Not blocking: else it would wait for the default stream, and so for other kernels.
            self.stream = _cuda().Stream(non_blocking=True)
            self.communicator = _cuda().nccl.NcclCommunicator(n_ranks, unique_id, rank)

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Make the device that of this thread."""
        context: contextlib.AbstractContextManager[Any] = _cuda().Device(self.device.local_hardware_id)
        return context

    def close(self, abort: bool) -> None:
        """Free the communicator. With `abort`, kernels that still wait for the peer end, too."""
        with contextlib.suppress(Exception), self.current():
            if abort:
                self.communicator.abort()
            else:
                self.communicator.destroy()


Ends = Sequence[tuple[LinkEnd, jax.Array]]


def exchange(sends: Ends, receives: Ends) -> None:
    """Send and receive whole arrays that are ready; returns when all is done.

    What receives is written to in place, so nobody else may hold those arrays yet.
    """
    posts = [(end, end.communicator.send, array) for end, array in sends if array.size]
    posts += [(end, end.communicator.recv, array) for end, array in receives if array.size]
    with _group():
        for end, post, array in posts:
            pointer, n_bytes = memory_of(array)
            with end.current():
                post(pointer, n_bytes, _cuda().nccl.NCCL_UINT8, end.peer, end.stream.ptr)
    # The host waits, so what was written is seen by every later kernel of jax, and what was read may be freed.
    for end in dict.fromkeys(end for end, _, _ in posts):
        end.stream.synchronize()


def _join(threads: Iterable[threading.Thread], deadline: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _group() -> Iterator[None]:
    """All sends and receives within start together, at the end."""
    nccl = _cuda().nccl
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


def _describe(array: jax.Array, link: Link) -> tuple[int, int, str, tuple[int, ...]]:
    return link.source_device, link.target_device, str(array.dtype), array.shape


def _cuda() -> Any:
    """`cupy.cuda`, which only workers with GPUs have."""
    try:
        import cupy.cuda
        import cupy.cuda.nccl  # noqa: F401 - `cupy.cuda` does not import it
    except ImportError as error:
        raise WorkerError("Workers with GPUs need CuPy and NCCL: pip install 'minialpa[gpu]'.") from error
    return cupy.cuda
