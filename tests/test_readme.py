"""The first example of the README, and those of docs/, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import minialpa

README = Path(__file__).parents[1] / "README.md"
CHECKPOINTS = README.parent / "docs" / "checkpoints.md"
KERNELS = README.parent / "docs" / "kernels.md"
PLANS = README.parent / "docs" / "plans.md"


def test_first_example_trains() -> None:
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(example, str(README), "exec"), names)
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


def test_the_examples_of_micro_batches_run() -> None:
    text = (README.parent / "docs" / "micro_batches.md").read_text()
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(example, "micro_batches.md", "exec"), {})


def test_the_examples_of_signatures_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    text = (README.parent / "docs" / "signatures.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    with jax.numpy_dtype_promotion("standard"):
        exec(compile("\n".join(examples), "signatures.md", "exec"), {})
    assert "Batch: arguments `x`, `y` (64 examples)" in capsys.readouterr().out


def test_the_examples_of_checkpoints_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", CHECKPOINTS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile("\n".join(examples), str(CHECKPOINTS), "exec"), names)
    assert len(examples) == 3 and np.isfinite(float(names["metrics"]["loss"]))


def test_the_examples_of_training_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (README.parent / "docs" / "training.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(compile("\n".join(examples), "training.md", "exec"), names)
    assert names["result"].n_steps == 50


def test_the_example_of_states_runs() -> None:
    text = (README.parent / "docs" / "state.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"):
        exec(compile("\n".join(examples), "state.md", "exec"), names)
    assert np.isfinite(float(names["loss"]))


def test_the_examples_of_plans_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PLANS.read_text(), re.DOTALL)
    assert len(examples) == 7
    names: dict[str, Any] = {}
    with pytest.warns(UserWarning, match="the shardings were solved again"):
        exec(compile("\n".join(examples), str(PLANS), "exec"), names)
    assert np.isfinite(float(names["loss"]))
    assert names["train_step"].get_last_executable().get_parallel_plan() != names["plan"]


def test_the_example_of_kernels_runs_and_its_rule_is_checked() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", KERNELS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "kernels.md", "exec"), names)
    qkv = (names["q"], names["k"], names["v"])
    checked = minialpa.check_sharding_rule(names["attention"], *qkv)
    assert [one.arrays for one in checked] == [
        "operand 0: 0, operand 1: 0, operand 2: 0, result 0: 0",
        "operand 0: 2, operand 1: 2, operand 2: 2, result 0: 2",
        "operand 2: 3, result 0: 3",
    ]
