"""Alpa's `testing`: `assert_allclose`."""

from typing import Any

from minialpa.compat.alpa import names
from minialpa.testing import assert_allclose

__all__ = ["assert_allclose"]


def __getattr__(name: str) -> Any:
    return names.find(f"testing.{name}")
