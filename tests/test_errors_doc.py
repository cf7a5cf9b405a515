"""docs/errors.md has each class of errors, with the messages that calls raise."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from tests.errors_doc import EXAMPLES, PATH, page, public, subclasses


@pytest.mark.usefixtures("fresh_session")
def test_the_page_has_the_messages_of_wrong_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):
        assert PATH.read_text(encoding="utf-8") == page(), "python -m tests.errors_doc"


def test_each_class_has_examples_or_a_base_with_examples() -> None:
    assert set(EXAMPLES) == public() and all(EXAMPLES.values())
    assert all(f"- `{name}`: " in PATH.read_text(encoding="utf-8") for name in subclasses())
