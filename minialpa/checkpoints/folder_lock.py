"""The lock of a folder of checkpoints: one manager at a time saves there."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from minialpa.errors import CheckpointError

_LOCK = ".minialpa-lock"


def lock(directory: Path) -> IO[str] | None:
    """Lock the folder, which exists, until the file that this returns is closed or the process ends.

    A second manager would delete the checkpoint that the first one is writing, since it looks like one that a killed
    process has left. None if the file system has no locks. Raises CheckpointError if the folder is locked.
    """
    # A link is not followed, since it would lead to a file of somebody else.
    number = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    file = os.fdopen(number, "r+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = file.read() or "another process"
        file.close()
        raise CheckpointError(
            f"Another manager saves checkpoints to `{directory}`, in {owner}. Close it or end that process first, or "
            "save to another folder; `read_only=True` and `restore_checkpoint` read meanwhile."
        ) from None
    except OSError:
        file.close()
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file
