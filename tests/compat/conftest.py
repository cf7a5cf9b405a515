"""Tests here run as scripts: each with its own session, jax's own dtype promotion, and `global_config` as at first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import pytest

import minialpa.compat.alpa as alpa


@pytest.fixture(autouse=True)
def _as_in_a_script() -> Iterator[None]:
    alpa.shutdown()
    before = dataclasses.asdict(alpa.global_config)
    with jax.numpy_dtype_promotion("standard"):
        yield
    vars(alpa.global_config).update(before)
    alpa.shutdown()
