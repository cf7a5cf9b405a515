"""Paths of checkpoints whose names are not patterns."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from typing import Any

from etils import epath

_LocalPath: Any = type(epath.Path("/"))


class LiteralPath(_LocalPath):
    """A local path for orbax. `epath` reads the whole path as a pattern in `glob`, so that in a folder `lr[0.1]` orbax
    finds none of the files that it has written, and saves a checkpoint without arrays."""

    def glob(self, pattern: str) -> Iterator[LiteralPath]:
        return (self / name for name in glob.glob(pattern, root_dir=self))
