"""Paths of checkpoints for orbax: folders whose names are not patterns, and folders of incomplete checkpoints."""

from __future__ import annotations

import glob
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath
from orbax.checkpoint.path import atomicity

_LocalPath: Any = type(epath.Path("/"))
_SUFFIX = atomicity.TMP_DIR_SUFFIX


class LiteralPath(_LocalPath):
    """A local path. `epath` would read the whole path as a pattern in `glob`: in a folder `lr[0.1]`, orbax would not
    find the files that it has written, and would save a checkpoint without arrays."""

    def glob(self, pattern: str) -> Iterator[LiteralPath]:
        return (self / name for name in glob.glob(pattern, root_dir=self))


class UnfinishedCheckpoint(atomicity.AtomicRenameTemporaryPath):
    """A folder with a unique name until the checkpoint is complete.

    orbax uses one temporary name for all attempts to save a step: a lost worker that still writes would write into the
    next attempt.
    """

    @classmethod
    def from_final(cls, final_path: Any, **options: Any) -> UnfinishedCheckpoint:
        """An unused folder for the checkpoint `final_path`."""
        name = f"{final_path.name}{_SUFFIX}-{secrets.token_hex(8)}"
        return cls(final_path.parent / name, final_path, **options)


def unfinished_checkpoints(directory: Path) -> list[Path]:
    """The folders of incomplete checkpoints in `directory`; none if it is an address."""
    return list(directory.glob(f"*{_SUFFIX}*"))
