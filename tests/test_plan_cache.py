"""Plans in a folder: only the next run of the same script finds them; broken files are replanned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

import minialpa
from minialpa import ShardParallel
from minialpa.api import plan_folder, plan_makers
from minialpa.testing import assert_allclose
from tests.plans import N_EXAMPLES, make_batch, make_params, train_step

DEVICES = jax.devices()[:2]


def run(folder: Path | str, fun: Any = train_step, n: int = N_EXAMPLES, **options: Any) -> tuple[int, Any]:
    """The number of plans that a new function makes for one call, and the result of the call."""
    method = ShardParallel(**{"devices": DEVICES, **options})
    with mock.patch.object(plan_makers, "_make_plan", wraps=plan_makers._make_plan) as make:
        parallel = minialpa.parallelize(fun, method=method, donate_argnums=(), plan_cache=folder)
        result = parallel(make_params(), make_batch(n))
    return make.call_count, result


def test_whatever_planning_reads_makes_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(params: Any, x: Any) -> Any:
        new, value = train_step(params, x)
        return new, value + 1

    run(tmp_path)
    assert run(tmp_path, other)[0] == 1
    assert run(tmp_path, num_micro_batches=2)[0] == 1
    assert run(tmp_path, devices=jax.devices()[:4])[0] == 1
    monkeypatch.setattr(plan_folder, "_source_digest", lambda: "of another version")
    assert run(tmp_path)[0] == 1


def test_the_folder_of_the_user_keeps_the_plans_that_were_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_folder, "users_cache", lambda name: tmp_path)
    assert run("auto")[0] == 1 and not list(tmp_path.iterdir())  # a small step

    monkeypatch.setattr(plan_folder, "_LEAST_EQUATIONS", 0)
    files: list[Path] = []
    for n in (1, 2, 4):
        assert [run("auto", num_micro_batches=n)[0] for _ in range(2)] == [1, 0]
        files += set(tmp_path.iterdir()) - set(files)
        os.utime(files[-1], (n, n))
    assert run("auto", num_micro_batches=1)[0] == 0  # used now
    monkeypatch.setattr(plan_folder, "_MOST_BYTES", sum(file.stat().st_size for file in files))
    assert run("auto", num_micro_batches=8)[0] == 1
    assert run("auto", num_micro_batches=1)[0] == 0 and run("auto", num_micro_batches=2)[0] == 1


def test_without_a_folder_of_the_user_plans_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(plan_folder, "_LEAST_EQUATIONS", 0)
    for folder in (None, file):
        monkeypatch.setattr(plan_folder, "users_cache", lambda name, folder=folder: folder)
        assert run("auto")[0] == run("auto")[0] == 1


def test_a_rule_of_the_user_makes_another_plan(tmp_path: Path, own_rules: None) -> None:
    run(tmp_path)
    minialpa.register_sharding_rule("ffi:kernel_of_the_test", "a b -> a b")
    assert run(tmp_path)[0] == 1


def test_another_rule_of_a_function_makes_another_plan(tmp_path: Path) -> None:
    def step_with(whole: Any) -> Any:
        def halved(x: jax.Array) -> jax.Array:
            return x / 2

        half = minialpa.register_sharding_rule(halved, "a b -> a b", need_replication=whole)
        return lambda params, batch: train_step(params, jax.tree.map(half, batch))

    plans = [run(tmp_path, step_with(names))[0] for names in ((), (), "b")]
    assert plans == [1, 0, 1]


@pytest.mark.parametrize("text", ["", 'FIRST\n{"version": 1}'])
def test_a_broken_file_is_planned_anew_and_replaced(tmp_path: Path, text: str) -> None:
    _, result = run(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(text.replace("FIRST", whole.partition("\n")[0]) or whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="has no usable plan for this step.*replaces the file"):
        n_made, again = run(tmp_path)
    assert n_made == 1 and file.read_text() == whole
    assert_allclose(again, result, rtol=0, atol=0)


def test_a_plan_for_another_step_under_this_name_is_not_used(tmp_path: Path) -> None:
    run(tmp_path)
    (file,) = tmp_path.iterdir()
    mine = file.read_text()
    run(tmp_path, n=8)
    (other,) = set(tmp_path.iterdir()) - {file}
    file.write_text(mine.partition("\n")[0] + "\n" + other.read_text().partition("\n")[2])
    assert run(tmp_path)[0] == 1
    file.write_text(other.read_text())
    with pytest.warns(UserWarning, match="It is for another step"):
        assert run(tmp_path)[0] == 1


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not kept for later runs"):
        assert run(tmp_path / "file" / "plans")[0] == 1


_SCRIPT = """
import sys
from tests.test_plan_cache import run
print(run(sys.argv[1])[0])
"""


def test_another_process_finds_the_plan(tmp_path: Path) -> None:
    """With another seed of hashes, so that the name does not depend on the order of sets. So does this process."""
    (first, result), (second, again) = run(tmp_path), run(tmp_path)
    assert (first, second, len(list(tmp_path.iterdir()))) == (1, 0, 1)
    assert_allclose(again, result, rtol=0, atol=0)
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)], check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert found.stdout == "0\n"
