"""The lock of a folder of checkpoints."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path

from minialpa.errors import CheckpointError

_LOCK = ".minialpa-lock"


def lock(directory: Path) -> int:
    """Lock a folder until the returned file descriptor is closed or the process ends.

    A second manager would take a checkpoint in progress for the remains of a killed process, and delete it. A file
    system without locks locks no folder. Raises CheckpointError if the folder is locked.
    """
    # A link could lead to another user's file.
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
    """Forked children of an ended process may hold the lock."""
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
