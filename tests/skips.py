"""Skips a test whose environment lacks something."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip(reason: str) -> NoReturn:
    """Skip a test. In CI, whose environment has all that tests need, it fails instead, so that somebody notices."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
