"""Writes files that a user keeps: afterwards a file holds all that is new, or what it held before."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

#: What systems say where a file may be written and not replaced: in a folder of others, or mounted by itself.
_NOT_REPLACED = (errno.EACCES, errno.EBUSY, errno.EPERM, errno.EROFS, errno.EXDEV)


def write_text(path: str | Path, text: str) -> None:
    """Write `text`, as UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to a file beside `path` that then takes its place, with the permissions of the old one.

    Links are followed. What is no regular file, such as /dev/stdout, is written to, and so is what cannot be replaced.
    Raises OSError where it cannot be written; the old file is then as it was.
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
        target.open("r+b").close()  # one that may only be read is not replaced
        old = target.stat()
        with suppress(OSError):  # only root gives files away
            os.chown(partial, old.st_uid, old.st_gid)
        partial.chmod(old.st_mode & 0o7777)
    partial.replace(target)
