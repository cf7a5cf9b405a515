"""docs/five-questions.md has the output of its commands, which work for models of three frameworks."""

from __future__ import annotations

import jax
import pytest

from tests.questions_doc import MODELS, PATH, QUESTIONS, for_model, output_of, page

#: The version of jax that printed the output on the page.
PAGE_JAX = "0.10.2"


@pytest.mark.skipif(jax.__version__ != PAGE_JAX, reason="traces of another jax have other numbers")
def test_the_page_has_the_output_of_its_commands() -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert PATH.read_text(encoding="utf-8") == page(), "python -m tests.questions_doc"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("question", range(len(QUESTIONS)))
def test_each_command_answers_for_each_framework(model: str, question: int) -> None:
    title, _, command, _ = QUESTIONS[question]
    if f":{model}" in command:
        return  # on the page
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        text = output_of(for_model(command, model))
    words = {0: "chosen", 1: "of 80 GB", 2: "of 600 MB", 3: "questions.py:", 4: "Stage 0: "}
    assert words[question] in text, title
