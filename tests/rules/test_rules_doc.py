"""docs/rules.md lists every rule."""

from __future__ import annotations

import re

import jax

from minialpa.rules.known_rules import known_primitives
from tests.rules.rules_doc import PATH, table
from tests.skips import skip


def test_every_rule_is_listed() -> None:
    assert set(re.findall(r"^\| `([^`]+)` \|", PATH.read_text(), re.MULTILINE)) == set(known_primitives())


def test_the_list_is_up_to_date() -> None:
    if f"jax {jax.__version__}." not in PATH.read_text():
        skip(
            f"docs/rules.md was made with another jax than {jax.__version__}, whose equations may look different: "
            "python -m tests.rules.rules_doc"
        )
    assert PATH.read_text() == table()
