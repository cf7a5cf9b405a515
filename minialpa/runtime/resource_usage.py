"""What a process holds: memory, arrays, descriptors and threads. None of it may grow from step to step."""

from __future__ import annotations

import gc
import math
import os
from pathlib import Path

import jax


def holdings() -> dict[str, int]:
    """Counts and bytes of this process, after a collection of garbage.

    live_arrays, live_bytes: jax arrays, the bytes being those on devices of this process. private_bytes, shmem_bytes:
    as `resident` says. shared_bytes: memory that transports of this process made or mapped, resident or not. Only
    Linux tells more than the first two.
    """
    gc.collect()
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    held = {
        "live_arrays": len(arrays),
        "live_bytes": sum(map(_local_bytes, arrays)),
    }
    if not Path("/proc/self/status").exists():
        return held
    return {
        **held,
        **resident(os.getpid()),
        "shared_bytes": sum(map(_size, Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def resident(pid: int) -> dict[str, int]:
    """Resident memory of a process of this machine, without files.

    private_bytes: its own. shmem_bytes: what it has touched of memory that other processes have, too: of the
    transports, and of Ray's object store. The store gives each object another place until it comes round, so this
    grows for hundreds of steps, and the machine has no more in use for that.
    """
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines())
    kilobytes = {"private_bytes": fields["RssAnon"], "shmem_bytes": fields["RssShmem"]}
    return {name: int(text.split()[0]) << 10 for name, text in kilobytes.items()}


def _local_bytes(array: jax.Array) -> int:
    shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return shard * len(array.sharding.addressable_devices)


def _size(mapping: str) -> int:
    """Bytes of a line of `maps` if it is memory of a transport."""
    if "memfd:minialpa" not in mapping:
        return 0
    start, stop = mapping.split(maxsplit=1)[0].split("-")
    return int(stop, 16) - int(start, 16)
