"""What a process holds: memory, arrays, descriptors and threads. None of it may grow from step to step."""

from __future__ import annotations

import gc
import math
import os
from pathlib import Path

import jax


def holdings() -> dict[str, int]:
    """Counts and bytes of this process, after a collection of garbage.

    live_arrays, live_bytes: jax arrays, the bytes being those on devices of this process. rss_bytes: resident memory.
    shared_bytes: memory that transports of this process made or mapped, resident or not. Only Linux tells
    more than the first two.
    """
    gc.collect()
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    held = {
        "live_arrays": len(arrays),
        "live_bytes": sum(map(_local_bytes, arrays)),
    }
    if not Path("/proc/self/statm").exists():
        return held
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return held | {
        "rss_bytes": pages * os.sysconf("SC_PAGESIZE"),
        "shared_bytes": sum(map(_size, Path("/proc/self/maps").read_text().splitlines())),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _local_bytes(array: jax.Array) -> int:
    shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return shard * len(array.sharding.addressable_devices)


def _size(mapping: str) -> int:
    """Bytes of a line of `maps` if it is memory of a transport."""
    if "memfd:minialpa" not in mapping:
        return 0
    start, stop = mapping.split(maxsplit=1)[0].split("-")
    return int(stop, 16) - int(start, 16)
