"""The folders of checkpoints that are being written."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from orbax.checkpoint.path import atomicity

_SUFFIX = atomicity.TMP_DIR_SUFFIX


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
