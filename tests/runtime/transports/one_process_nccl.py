"""The part of `cupy.cuda` that the NCCL transport uses, within one process and on arrays in host memory.

It keeps the relevant parts of NCCL's contract. A communicator exists when both ranks have joined. Operations of a group
start at its end. Sends and receives of a communicator match in order. A stream is synchronised when its operations are
done. `abort` ends the waits at one end, and the other end gets no message.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import types
from typing import Any

_changed = threading.Condition()
_pairs: dict[bytes, _Pair] = {}
_local = threading.local()
_ids = itertools.count()

NCCL_UINT8 = 1


class _Pair:
    """A communicator: the operations of both ranks that have no partner yet."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.waiting: dict[int, list[tuple[int, int, Stream]]] = {0: [], 1: []}
        self.aborted: set[int] = set()


class Stream:
    def __init__(self, non_blocking: bool) -> None:
        assert non_blocking
        self.n_pending = 0
        self.ptr = id(self)
        _streams[self.ptr] = self

    def synchronize(self) -> None:
        with _changed:
            _changed.wait_for(lambda: self.n_pending == 0)


_streams: dict[int, Stream] = {}


class NcclCommunicator:
    def __init__(self, n_ranks: int, unique_id: bytes, rank: int) -> None:
        assert n_ranks == 2 and isinstance(unique_id, bytes) and len(unique_id) == 128
        self.rank = rank
        with _changed:
            self.pair = _pairs.setdefault(unique_id, _Pair())
            self.pair.ranks.add(rank)
            _changed.notify_all()
            assert _changed.wait_for(lambda: len(self.pair.ranks) == 2, 30)

    def send(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        assert (self.rank, peer, dtype) == (0, 1, NCCL_UINT8)
        _local.group.append((self, pointer, count, _streams[stream]))

    def recv(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        assert (self.rank, peer, dtype) == (1, 0, NCCL_UINT8)
        _local.group.append((self, pointer, count, _streams[stream]))

    def abort(self) -> None:
        with _changed:
            self.pair.aborted.add(self.rank)
            for _, _, stream in self.pair.waiting[self.rank]:
                stream.n_pending -= 1
            self.pair.waiting[self.rank] = []
            _changed.notify_all()

    def destroy(self) -> None:
        assert not self.pair.waiting[self.rank]


def group_start() -> None:
    _local.group = []


def group_end() -> None:
    with _changed:
        for communicator, pointer, count, stream in _local.group:
            pair = communicator.pair
            if communicator.rank in pair.aborted:
                raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT")
            stream.n_pending += 1
            pair.waiting[communicator.rank].append((pointer, count, stream))
            while pair.waiting[0] and pair.waiting[1]:
                (source, n_sent, a), (target, n_received, b) = pair.waiting[0].pop(0), pair.waiting[1].pop(0)
                assert n_sent == n_received
                ctypes.memmove(target, source, n_sent)
                a.n_pending -= 1
                b.n_pending -= 1
        _changed.notify_all()


def modules() -> dict[str, Any]:
    """The modules that `sys.modules` needs for `import cupy.cuda.nccl`."""
    nccl = types.ModuleType("cupy.cuda.nccl")
    nccl.__dict__.update(
        NCCL_UINT8=NCCL_UINT8,
        NcclCommunicator=NcclCommunicator,
        get_unique_id=lambda: next(_ids).to_bytes(128, "big"),
        groupStart=group_start,
        groupEnd=group_end,
    )
    cuda = types.ModuleType("cupy.cuda")
    cuda.__dict__.update(nccl=nccl, Stream=Stream, Device=lambda ordinal: contextlib.nullcontext())
    cupy = types.ModuleType("cupy")
    cupy.__dict__.update(cuda=cuda)
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}
