"""Skips a test if its environment lacks a requirement."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip(reason: str) -> NoReturn:
    """Skip a test. In CI, whose environment has all requirements, the test fails instead of hiding the lack."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
