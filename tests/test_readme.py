"""The examples of the README and of docs/ run, and print the output on their pages.

The scripts of docs/frameworks.md, with the lines that change, compute the losses of one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest

import minialpa
from minialpa.training import What
from tests.pages import DOCS, examples_of, run

README = DOCS.parent / "README.md"
#: The version of jax that printed the output on the pages.
PAGES_JAX = "0.10.2"
#: Pages with other tests, and pages of clusters.
OTHERS = [DOCS / name for name in ("alpa.md", "clusters.md", "compiler-in-500-lines/README.md", "frameworks.md")]
PAGES = sorted(path for path in DOCS.rglob("*.md") if path not in OTHERS and examples_of(path))
#: Warnings that the examples of a page give.
WARNINGS = {"plans.md": "has solved new shardings"}


def check(path: Path) -> dict[str, Any]:
    """The names after the examples of a page. Traces of another jax have other numbers."""
    warns = pytest.warns(UserWarning, match=WARNINGS[path.name]) if path.name in WARNINGS else contextlib.nullcontext()
    with warns:
        names, printed = run(path)
    if jax.__version__ == PAGES_JAX:
        for example, text in zip(examples_of(path), printed, strict=True):
            assert example.output in (None, text), f"python -m tests.pages {path}"
    return names


def test_the_examples_of_the_readme_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names, (first, *_) = run(README)
    assert "The loss after 20 steps is" in first
    assert np.isfinite(float(names["loss"]))


def test_set_up_takes_two_commands_and_ci_gives_both_in_order() -> None:
    commands = re.findall(r"```bash\n(.*?)\n```", README.read_text(), re.DOTALL)
    assert commands == [
        'python -m pip install ".[models]" && minialpa demo',
        'python -m pip install -e ".[test]" && python -m pytest',
    ]
    given = (README.parent / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    places = [given.index(step) for command in commands for step in command.split(" && ")]
    assert places == sorted(places)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = check(page)
    if page.stem == "data":
        assert np.isfinite(float(names["loss"]))
    if page.stem == "training":
        assert names["result"].n_steps == 50
    if page.stem == "plans":
        assert names["train_step"].get_last_executable().get_parallel_plan() != names["plan"]
    if page.stem == "kernels":
        checked = minialpa.check_sharding_rule(names["attention"], *(names[name] for name in "qkv"))
        assert [one.parts for one in checked] == [2, 2, 2]


def test_the_quick_start_leads_from_a_step_to_a_checked_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra `gpu-compile`")
    monkeypatch.chdir(tmp_path)
    page = DOCS / "quick-start.md"
    run(page)
    (tmp_path / "my_model.py").write_text(examples_of(page)[0].code, encoding="utf-8")
    (command,) = re.findall(r"^minialpa (check .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(README.parent)}
    arguments = [sys.executable, "-m", "minialpa", *shlex.split(command)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[0].endswith(": fits"), done.stderr
    assert "<h1>" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [minialpa.StepReport, minialpa.TrainingResult, minialpa.TrainingEvent])
def test_the_page_of_the_training_loop_has_the_fields_of_its_reports(kind: type[Any]) -> None:
    text = (DOCS / "training.md").read_text(encoding="utf-8")
    _, table = text.split(f"`{kind.__name__}`", 1)[1].split("|---|---|\n", 1)
    rows = table.split("\n\n")[0].splitlines()
    assert [row.split("`")[1] for row in rows] == [field.name for field in dataclasses.fields(kind)]
    if kind is minialpa.TrainingEvent:
        assert set(re.findall(r'"(\w+)"', rows[0])) == set(get_args(What))


# ---- docs/frameworks.md ----------------------------------------------------------------------------------------------

#: A section: its title, the script for one device, and the lines that change.
SECTIONS = {
    title: (script, changes.splitlines())
    for title, script, changes in re.findall(
        r"^## (.*?)\n\n```python\n(.*?)```\n.*?```diff\n(.*?)```",
        (DOCS / "frameworks.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
}
MOST_LINES = 3


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
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(script, "docs/frameworks.md", "exec"), names)
    losses: list[float] = names["losses"]
    return losses


def test_each_framework_has_its_section() -> None:
    assert list(SECTIONS) == ["flax linen", "flax nnx", "equinox", "haiku", "jax and optax"]


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize("title", SECTIONS)
def test_at_most_three_lines_change_and_the_losses_stay(title: str) -> None:
    script, changes = SECTIONS[title]
    assert sum(line.startswith("+") for line in changes) <= MOST_LINES
    one_device, many = (losses_of(text) for text in (script, changed(script, changes)))
    assert many == pytest.approx(one_device, rel=1e-3)
    assert one_device[-1] < one_device[0]
