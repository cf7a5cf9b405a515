"""docs/errors.md has each class of errors, with the messages that calls raise."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from tests.errors_doc import EXAMPLES, PATH, page, public, subclasses

#: The version of jax whose programs have the page's numbers of bytes.
PAGE_JAX = "0.10.2"


def without_bytes(text: str) -> str:
    return re.sub(r"[\d.]+ (?=[kM]B)", "", text)


@pytest.mark.usefixtures("fresh_session")
def test_the_page_has_the_messages_of_wrong_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):
        old, new = PATH.read_text(encoding="utf-8"), page()
    same = old == new if jax.__version__ == PAGE_JAX else without_bytes(old) == without_bytes(new)
    assert same, "python -m tests.errors_doc"


def test_each_class_has_examples_or_a_base_with_examples() -> None:
    assert set(EXAMPLES) == public() and all(EXAMPLES.values())
    assert all(f"- `{name}`: " in PATH.read_text(encoding="utf-8") for name in subclasses())
