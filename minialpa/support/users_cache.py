"""Private folders of the user for caches, by the environment. No plan and no result depends on them."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def users_cache(name: str) -> Path | None:
    """Made if necessary; None if no folder exists that only this user can change."""
    for root in _roots():
        with suppress(OSError):
            if _is_private(made(root)) and _is_private(made(root / name)):
                return root / name
    return None


def made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _roots() -> Iterator[Path]:
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the XDG specification ignores relative paths
        yield Path(named) / "minialpa"
    home = os.path.expanduser("~")
    if os.path.isabs(home) and os.path.isdir(home):  # users of services may have no home
        yield Path(home) / ".cache" / "minialpa"
    with suppress(FileNotFoundError):  # no folder for temporary files can be written
        yield Path(tempfile.gettempdir()) / f"minialpa-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    """Only this user may write here: code in these files is run, and plans are used."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
