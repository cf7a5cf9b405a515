"""`write_text` and `write_bytes` write a file completely or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

#: Errors for files that can be written but not replaced.
_NOT_REPLACED = (errno.EACCES, errno.EBUSY, errno.EPERM, errno.EROFS, errno.EXDEV)


def write_text(path: str | Path, text: str) -> None:
    """UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to a temporary file beside `path`, which then replaces `path` and takes its permissions.

    Links are followed. A file that is not regular, such as /dev/stdout, or cannot be replaced is written directly.
    Raises OSError; the old file then stays.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    target = Path(os.path.realpath(target))
    partial = target.with_name(f".{secrets.token_hex(8)}.new")
    try:
        _replace(target, partial, data)
    except OSError as error:
        if error.errno not in _NOT_REPLACED or not target.exists():
            error.filename, error.filename2 = str(path), None
            raise
        target.write_bytes(data)
    finally:
        with suppress(OSError):
            partial.unlink()


def _replace(target: Path, partial: Path, data: bytes) -> None:
    with partial.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileNotFoundError):
        target.open("r+b").close()  # a read-only file is not replaced
        old = target.stat()
        with suppress(OSError):  # only root gives files away
            os.chown(partial, old.st_uid, old.st_gid)
        partial.chmod(old.st_mode & 0o7777)
    partial.replace(target)
