"""What a record has that this benchmark does not build."""

from __future__ import annotations


class NotBuiltError(Exception):
    """A row whose model, degrees or machines are not built; says why."""
