"""The lock of a folder of checkpoints: one manager at a time saves there."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path

from minialpa.errors import CheckpointError

_LOCK = ".minialpa-lock"


def lock(directory: Path) -> int:
    """Lock the folder, which exists, until the file descriptor that this returns is closed, or the process ends.

    A second manager would delete the checkpoint that the first one is writing, since it looks like one that a killed
    process has left. Where the file system has no locks, nothing is locked. Raises CheckpointError if the folder is
    locked.
    """
    # A link is not followed, since it would lead to a file of somebody else.
    number = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(number, 1000).decode(errors="replace")
        if not _has_ended(owner):
            os.close(number)
            raise CheckpointError(
                f"Another manager saves checkpoints to `{directory}`, in {owner or 'another process'}. Close it or end "
                "that process first, or save to another folder; `read_only=True` and `restore_checkpoint` read "
                "meanwhile."
            ) from None
    except OSError:
        return number
    os.ftruncate(number, 0)
    os.pwrite(number, _name(os.getpid()).encode(), 0)
    return number


def _name(process: int | str) -> str:
    return f"process {process} on {socket.gethostname()}"


def _has_ended(owner: str) -> bool:
    """Whether the process that wrote its name has ended on this host. Its children by fork may still hold its lock."""
    found = re.fullmatch(_name(r"(\d+)"), owner)
    if found is None:
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
