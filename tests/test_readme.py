"""The first example of the README and the examples of docs/ run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import minialpa

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"


def examples_of(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def run(path: Path, examples: list[str]) -> dict[str, Any]:
    """The names after examples, which run one after the other, in jax as users have it."""
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(compile("\n".join(examples), str(path), "exec"), names)
    return names


def test_first_example_trains() -> None:
    assert np.isfinite(float(run(README, examples_of(README)[:1])["loss"]))


def test_set_up_takes_two_commands_and_ci_gives_both_in_order() -> None:
    commands = re.findall(r"```bash\n(.*?)\n```", README.read_text(), re.DOTALL)
    assert commands == [
        'python -m pip install ".[models]" && minialpa demo',
        'python -m pip install -e ".[test]" && python -m pytest',
    ]
    given = (README.parent / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    places = [given.index(step) for command in commands for step in command.split(" && ")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("page", "n_examples"), [("checkpoints", 3), ("kernels", 1), ("signatures", 2), ("state", 3), ("training", 2)]
)
def test_the_examples_of_a_page_run_one_after_the_other(
    page: str, n_examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = DOCS / f"{page}.md"
    examples = examples_of(path)
    assert len(examples) == n_examples
    names = run(path, examples)
    if page == "training":
        assert names["result"].n_steps == 50
    if page == "kernels":
        checked = minialpa.check_sharding_rule(names["attention"], *(names[name] for name in "qkv"))
        assert [one.parts for one in checked] == [2, 2, 2]


def test_the_examples_of_micro_batches_run() -> None:
    path = DOCS / "micro_batches.md"
    for example in examples_of(path):
        run(path, [example])


def test_the_examples_of_plans_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="has solved new shardings"):
        names = run(DOCS / "plans.md", examples_of(DOCS / "plans.md"))
    assert names["train_step"].get_last_executable().get_parallel_plan() != names["plan"]
