"""Paths for orbax: literal paths, and unique folders for incomplete checkpoints."""

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
    """A local path whose `glob` takes only its argument for a pattern.

    `epath` takes the whole path for one: in a folder `lr[0.1]`, orbax would save a checkpoint without arrays.
    """

    def glob(self, pattern: str) -> Iterator[LiteralPath]:
        return (self / name for name in glob.glob(pattern, root_dir=self))


class UnfinishedCheckpoint(atomicity.AtomicRenameTemporaryPath):
    """A folder with a unique name until the checkpoint is complete.

    orbax reuses one name for all attempts to save a step: a lost worker may write into the next one.
    """

    @classmethod
    def from_final(cls, final_path: Any, **options: Any) -> UnfinishedCheckpoint:
        name = f"{final_path.name}{_SUFFIX}-{secrets.token_hex(8)}"
        return cls(final_path.parent / name, final_path, **options)


def unfinished_checkpoints(directory: Path) -> list[Path]:
    return list(directory.glob(f"*{_SUFFIX}*"))


def unfinished_bytes(directory: Path) -> int:
    """0 if files move meanwhile."""
    try:
        return sum(file.stat().st_size for path in unfinished_checkpoints(directory) for file in path.rglob("*"))
    except OSError:
        return 0
