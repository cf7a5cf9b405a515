"""docs/rules.md lists every rule."""

from __future__ import annotations

import re

import jax
import pytest

from minialpa.rules.factors import known_primitives
from tests.rules.rules_doc import PATH, table


def test_every_rule_is_listed() -> None:
    assert set(re.findall(r"^\| `([^`]+)` \|", PATH.read_text(), re.MULTILINE)) == set(known_primitives())


def test_the_list_is_up_to_date() -> None:
    if f"jax {jax.__version__}." not in PATH.read_text():
        pytest.skip("made with another jax, whose equations may look different")
    assert PATH.read_text() == table()
