"""The transport between GPUs: jax arrays by NCCL, through CuPy.

Each *device link*, from a device of one worker to a device of another, has a communicator of two ranks. NCCL matches
sends and receives by their order, and its kernels occupy the GPU while they wait for the other rank. So neither rank
posts a transfer before both are ready:

    sender      waits until its arrays are ready, announces the message over the host transport, posts its sends
    receiver    reads announcements in order, posts the receives of each

Hence a program may receive tags in any order, both ranks of a communicator see one order, and no kernel waits for a
busy worker.

A failure aborts all communicators, which ends waiting kernels; then every call raises a WorkerError. NCCL gets
addresses and numbers of bytes, so every dtype works. Received arrays are in jax's memory pool, and may be donated.
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
from minialpa.runtime.transports.host_transport import HostTransport
from minialpa.runtime.transports.mailbox import Mailbox
from minialpa.runtime.transports.transport import ExpectedPart, Part
from minialpa.support.private_jax import memory_of

#: Seconds to wait for the id of a communicator.
_SETUP_TIMEOUT_S = 120.0
_FLUSH_S = 2.0
#: Tag of the first announcement to a peer on the host transport; later tags count up. Smaller tags are numbers of
#: links.
_FIRST_ANNOUNCEMENT = 1 << 62


@dataclass(frozen=True, slots=True, order=True)
class DeviceLink:
    """From a device of worker `source` to a device of worker `target`. Each worker numbers its own devices."""

    source: int
    source_device: int
    target: int
    target_device: int


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedSend:
    """`sent` is done when NCCL has sent the arrays or has failed to."""

    tag: int
    arrays: tuple[jax.Array, ...]
    links: tuple[DeviceLink, ...]
    sent: Future[None]


class NcclTransport:
    """The transport between the GPUs `devices` of this worker and the GPUs of its peers.

    Making one blocks until the peers make theirs, in the sorted order of the links, without deadlock. The launcher has
    to detect a peer that dies meanwhile.

    Args:
        control: a connected host transport, which this transport closes.
        links: all links between any workers. Each takes time to set up, and memory of two GPUs.
    """

    def __init__(self, control: HostTransport, devices: Sequence[jax.Device], links: Sequence[DeviceLink]) -> None:
        self._control = control
        self._number = control.number
        self._devices = tuple(devices)
        self._mailbox = Mailbox[list[jax.Array]](control.number)
        self._closing = False

        self._lock = threading.Lock()
        self._ends: dict[DeviceLink, Endpoint] = {}
        for i, link in enumerate(sorted(set(links))):
            if self._number in (link.source, link.target):
                self._ends[link] = self._make_end(i, link)

        targets = sorted({link.target for link in self._ends} - {self._number})
        sources = sorted({link.source for link in self._ends} - {self._number})
        self._queues: dict[int, SimpleQueue[_QueuedSend | None]] = {peer: SimpleQueue() for peer in targets}
        self._writers = [self._start(self._write_all, peer) for peer in targets]
        self._readers = [self._start(self._read_all, peer) for peer in sources]
        self._watcher = self._start(self._watch)

    def send(self, peer: int, tag: int, parts: Sequence[Part]) -> Future[None]:
        """Slices are copied on the device of their array."""
        self._mailbox.check()
        if peer not in self._queues:
            raise WorkerError(
                f"Worker {self._number} has no NCCL link to worker {peer}, but to workers {sorted(self._queues)}. This "
                "is a bug in minialpa: report it with this message."
            )

        arrays = tuple(jnp.asarray(part.array if part.index is None else part.array[part.index]) for part in parts)
        links = tuple(
            DeviceLink(self._number, self._device_of(array), peer, part.device)
            for array, part in zip(arrays, parts, strict=True)
        )
        if missing := sorted(set(links) - set(self._ends)):
            pairs = (f"device {link.source_device} to device {link.target_device}" for link in missing)
            raise WorkerError(
                f"Worker {self._number} has no NCCL links to worker {peer} from {', '.join(pairs)}, which it needs to "
                f"send arrays (tag {tag}). This is a bug in minialpa: report it with this message."
            )

        sent: Future[None] = Future()
        sent.set_running_or_notify_cancel()
        self._queues[peer].put(_QueuedSend(tag, arrays, links, sent))
        return sent

    def receive(self, peer: int, tag: int, expected: Sequence[ExpectedPart], timeout_s: float) -> list[jax.Array]:
        """The values have arrived on the devices of `expected`."""
        arrays = self._mailbox.take(peer, tag, timeout_s)
        got = [(array.shape, str(array.dtype), self._device_of(array)) for array in arrays]
        asked = [(part.shape, str(part.dtype), part.device) for part in expected]
        if got != asked:
            raise WorkerError(
                f"Worker {self._number} expected arrays {asked} (shape, dtype, device) from worker {peer} (tag {tag}), "
                f"and got {got}. This is a bug in minialpa: report it with this message."
            )
        return arrays

    def close(self) -> None:
        """Waits up to `_FLUSH_S` seconds for messages under way."""
        self._closing = True

        # Writers end when their queues are empty, unless NCCL waits for the peer.
        for queue in self._queues.values():
            queue.put(None)
        deadline = time.monotonic() + _FLUSH_S
        _join(self._writers, deadline)

        # Closing the host transport ends the watcher and the readers, unless NCCL waits for the peer.
        failed = self._mailbox.failed or self._control.mailbox.failed
        self._control.close()
        _join(self._readers, time.monotonic() if failed else deadline)

        # Aborting the communicators ends these waits.
        busy = any(thread.is_alive() for thread in (*self._writers, *self._readers))
        closed = WorkerError(f"Worker {self._number} has closed its connections to other workers.")
        self._end(closed, abort=failed or busy)
        _join((*self._writers, *self._readers, self._watcher), time.monotonic() + _FLUSH_S)

    def _make_end(self, i: int, link: DeviceLink) -> Endpoint:
        """This worker's end of link number `i`, after a first byte went over it."""
        if link.source == link.target:
            raise WorkerError(
                f"An NCCL link was requested from device {link.source_device} to device {link.target_device} of one "
                f"worker, {link.source}, where jax moves arrays itself. This is a bug in minialpa: report it with this "
                "message."
            )

        # The sender makes the id of the communicator, and is rank 0.
        if self._number == link.source:
            unique_id = new_id()
            self._control.send(link.target, i, [Part(np.frombuffer(unique_id, np.uint8))])
            end = Endpoint(self._devices[link.source_device], unique_id, rank=0)
        else:
            unique_id = self._control.take(link.source, i, _SETUP_TIMEOUT_S).payload.tobytes()
            end = Endpoint(self._devices[link.target_device], unique_id, rank=1)

        # NCCL connects the ranks at first use, and waits: here, in the order of links.
        probe = jnp.empty((1,), jnp.uint8, device=end.device).block_until_ready()
        exchange([(end, probe)], []) if self._number == link.source else exchange([], [(end, probe)])
        return end

    def _device_of(self, array: jax.Array) -> int:
        (device,) = array.devices()
        if device not in self._devices:
            raise WorkerError(
                f"An array is on {device}, and worker {self._number} has the devices {self._devices}. This is a bug in "
                "minialpa: report it with this message."
            )
        return self._devices.index(device)

    def _start(self, run: Any, *args: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=args, name="minialpa-nccl", daemon=True)
        thread.start()
        return thread

    # Writing: a thread for each peer.

    def _write_all(self, peer: int) -> None:
        n_announced = 0
        while (send := self._queues[peer].get()) is not None:
            try:
                self._mailbox.check()
                self._announce(peer, n_announced, send)
                n_announced += 1
                exchange([(self._ends[link], array) for link, array in zip(send.links, send.arrays, strict=True)], [])
                # An aborted communicator makes `exchange` return as if it had sent.
                self._mailbox.check()
                send.sent.set_result(None)
            except Exception as error:
                failure = WorkerError(
                    f"Arrays for worker {peer} were not sent (tag {send.tag}). {str(error) or repr(error)}"
                )
                failure.__cause__ = error
                send.sent.set_exception(failure)
                self._fail(failure)
            del send  # Otherwise its arrays would live until the next message.

    def _announce(self, peer: int, n_announced: int, send: _QueuedSend) -> None:
        jax.block_until_ready(send.arrays)
        entries = [_describe(array, link) for array, link in zip(send.arrays, send.links, strict=True)]
        text = json.dumps([send.tag, entries])
        announcement = Part(np.frombuffer(text.encode(), np.uint8))
        self._control.send(peer, _FIRST_ANNOUNCEMENT + n_announced, [announcement]).result()

    # Reading: a thread for each peer.

    def _read_all(self, peer: int) -> None:
        n_read = 0
        while True:
            try:
                announcement = self._control.take(peer, _FIRST_ANNOUNCEMENT + n_read, None)
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
                failure = WorkerError(f"Arrays of worker {peer} could not be received. {str(error) or repr(error)}")
                failure.__cause__ = error
                self._fail(failure)
                return

    def _receive_all(self, peer: int, entries: list[Any]) -> list[jax.Array]:
        """entries: of `_describe`, one for each array."""
        links = [
            DeviceLink(peer, source_device, self._number, target_device)
            for source_device, target_device, _, _ in entries
        ]
        arrays = [
            jnp.empty(shape, jnp.dtype(dtype), device=self._devices[link.target_device])
            for link, (_, _, dtype, shape) in zip(links, entries, strict=True)
        ]
        # jax fills the arrays with zeros asynchronously. A late fill would overwrite received values.
        jax.block_until_ready(arrays)
        exchange([], [(self._ends[link], array) for link, array in zip(links, arrays, strict=True)])
        return arrays

    # Ending

    def _watch(self) -> None:
        """The host transport detects a dead peer, for which NCCL would wait for ever."""
        self._fail(self._control.mailbox.wait_for_failure())

    def _fail(self, error: WorkerError) -> None:
        if not self._closing:
            self._end(error, abort=True)
            # The host transport then closes without a goodbye, by which the peers notice.
            self._control.mailbox.fail(error)

    def _end(self, error: WorkerError, *, abort: bool) -> None:
        self._mailbox.fail(error)
        with self._lock:
            ends, self._ends = self._ends, {}
        for end in ends.values():
            end.close(abort=abort)


def new_id() -> bytes:
    return bytes(_cuda().nccl.get_unique_id())


class Endpoint:
    """One end of a communicator. With one rank, it is its own peer."""

    def __init__(self, device: jax.Device, unique_id: bytes, rank: int, n_ranks: int = 2) -> None:
        self.device = device
        self.peer = n_ranks - 1 - rank
        with self.current():
            # A blocking stream would wait for the default stream, and so for other kernels.
            self.stream = _cuda().Stream(non_blocking=True)
            self.communicator = _cuda().nccl.NcclCommunicator(n_ranks, unique_id, rank)

    def current(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = _cuda().Device(self.device.local_hardware_id)
        return context

    def close(self, *, abort: bool) -> None:
        """`abort` also ends kernels that wait for the peer."""
        with contextlib.suppress(Exception), self.current():
            if abort:
                self.communicator.abort()
            else:
                self.communicator.destroy()


Transfers = Sequence[tuple[Endpoint, jax.Array]]


def exchange(sends: Transfers, receives: Transfers) -> None:
    """Send arrays and fill others in place; returns when all transfers are done.

    All arrays must be ready. Only the caller may hold the arrays in `receives`.
    """
    posts = [(end, end.communicator.send, array) for end, array in sends if array.size]
    posts += [(end, end.communicator.recv, array) for end, array in receives if array.size]

    with _group():
        for end, post, array in posts:
            pointer, n_bytes = memory_of(array)
            with end.current():
                post(pointer, n_bytes, _cuda().nccl.NCCL_UINT8, end.peer, end.stream.ptr)

    # jax does not know these streams. After this wait, its kernels see the new values, and sent arrays may be freed.
    for end in dict.fromkeys(end for end, _, _ in posts):
        end.stream.synchronize()


def _join(threads: Iterable[threading.Thread], deadline: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _group() -> Iterator[None]:
    """Posted sends and receives start together, at the end."""
    nccl = _cuda().nccl
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


def _describe(array: jax.Array, link: DeviceLink) -> tuple[int, int, str, tuple[int, ...]]:
    return link.source_device, link.target_device, str(array.dtype), array.shape


def _cuda() -> Any:
    try:
        import cupy.cuda
        import cupy.cuda.nccl  # noqa: F401 - `cupy.cuda` does not import it
    except ImportError as error:
        raise WorkerError(
            "CuPy with NCCL is not installed. Install it on every host with `pip install 'minialpa[gpu]'`."
        ) from error
    return cupy.cuda
