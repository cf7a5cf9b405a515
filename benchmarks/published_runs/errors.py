"""The error for parts of a record that this benchmark does not build."""

from __future__ import annotations


class NotBuiltError(Exception):
    """A row with a model, degrees or machines that are not built; the message has the reason."""
