"""The scripts of docs/frameworks.md: with the lines that change, they compute what they compute on one device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import minialpa

TEXT = (Path(__file__).parents[1] / "docs" / "frameworks.md").read_text(encoding="utf-8")
#: A section: its title, the script for one device, and the lines that change.
SECTIONS = {
    title: (script, changes.splitlines())
    for title, script, changes in re.findall(
        r"^## (.*?)\n\n```python\n(.*?)```\n.*?```diff\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE
    )
}
MOST_LINES = 3


@pytest.fixture(autouse=True)
def _as_users_have_jax() -> Iterator[None]:
    minialpa.shutdown()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    minialpa.shutdown()


def changed(script: str, changes: list[str]) -> str:
    """The script with the removed line replaced by the last added one, after the other added lines."""
    added = [line[1:] for line in changes if line.startswith("+")]
    removed = [line[1:] for line in changes if line.startswith("-")]
    assert len(added) + len(removed) == len(changes)
    (old,) = removed
    *front, new = added
    lines = script.splitlines()
    assert lines.count(old) == 1
    at = lines.index(old)
    return "\n".join([*front, *lines[:at], new, *lines[at + 1 :]])


def losses_of(script: str) -> list[float]:
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "frameworks.md", "exec"), names)
    found: list[float] = names["losses"]
    return found


def test_each_framework_has_its_section() -> None:
    assert list(SECTIONS) == ["flax linen", "flax nnx", "equinox", "haiku", "jax and optax"]


@pytest.mark.parametrize("title", SECTIONS)
def test_at_most_three_lines_change_and_the_losses_stay(title: str) -> None:
    script, changes = SECTIONS[title]
    assert sum(line.startswith("+") for line in changes) <= MOST_LINES
    one_device = losses_of(script)
    many = losses_of(changed(script, changes))
    assert many == pytest.approx(one_device, rel=1e-3)
    assert one_device[-1] < one_device[0]
