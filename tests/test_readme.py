"""The first example of the README and the examples of docs/ run.

The scripts of docs/frameworks.md, with the lines that change, compute the losses of one device.
"""

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
#: The version of jax that printed the output on the pages of docs/design.
DESIGN_JAX = "0.10.2"


def examples_of(path: Path) -> list[str]:
    """The examples of a page. Examples that begin with `# source:` need other packages, and are left out."""
    examples = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    return [example for example in examples if not example.startswith("# source:")]


def run(path: Path, examples: list[str]) -> dict[str, Any]:
    """The names after examples, which run one after the other, in jax as users have it."""
    names: dict[str, Any] = {"__name__": "script"}
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


@pytest.mark.parametrize("page", ["checkpoints", "data", "kernels", "signatures", "state", "training"])
def test_the_examples_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = DOCS / f"{page}.md"
    examples = examples_of(path)
    assert examples
    names = run(path, examples)
    if page == "data":
        assert np.isfinite(float(names["loss"]))
    if page == "training":
        assert names["result"].n_steps == 50
    if page == "kernels":
        checked = minialpa.check_sharding_rule(names["attention"], *(names[name] for name in "qkv"))
        assert [one.parts for one in checked] == [2, 2, 2]


@pytest.mark.parametrize("page", sorted((DOCS / "design").glob("*.md")), ids=lambda page: page.stem)
def test_the_examples_of_a_design_page_print_the_output_on_it(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block in python may be followed by a block with its output. Traces of another jax have other numbers."""
    blocks = re.findall(r"```python\n(.*?)```(?:\n+```\n(.*?)```)?", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {"__name__": "script"}
    for example, output in blocks:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(example, str(page), "exec"), names)
        printed = capsys.readouterr().out
        assert not output or printed == output or jax.__version__ != DESIGN_JAX


def test_the_examples_of_micro_batches_run() -> None:
    path = DOCS / "micro_batches.md"
    for example in examples_of(path):
        run(path, [example])


def test_the_examples_of_plans_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="has solved new shardings"):
        names = run(DOCS / "plans.md", examples_of(DOCS / "plans.md"))
    assert names["train_step"].get_last_executable().get_parallel_plan() != names["plan"]


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


def test_each_framework_has_its_section() -> None:
    assert list(SECTIONS) == ["flax linen", "flax nnx", "equinox", "haiku", "jax and optax"]


@pytest.mark.usefixtures("fresh_session")
@pytest.mark.parametrize("title", SECTIONS)
def test_at_most_three_lines_change_and_the_losses_stay(title: str) -> None:
    script, changes = SECTIONS[title]
    assert sum(line.startswith("+") for line in changes) <= MOST_LINES
    with jax.numpy_rank_promotion("allow"):
        one_device, many = (run(DOCS, [text])["losses"] for text in (script, changed(script, changes)))
    assert many == pytest.approx(one_device, rel=1e-3)
    assert one_device[-1] < one_device[0]
