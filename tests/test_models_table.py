"""The table of models tells right runs from wrong ones, and goes on behind a model that ends its process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.models import models, processes, row, table
from benchmarks.models.all_models import MODELS
from benchmarks.models.catalogue import METHODS, SHARD_2, Training
from benchmarks.models.common import regression
from benchmarks.models.comparison import compare, rounded_differently
from benchmarks.models.page import page
from benchmarks.models.results import OtherVersions, read

START = {"w": np.linspace(1, 2, 12, dtype=np.float32).reshape(3, 4), "n": np.int32(0)}
END = {"w": START["w"] + np.float32(0.1) * np.sin(START["w"]), "n": np.int32(3)}
LOSSES = [np.float32(2.0), np.float32(1.0)]


def wrong(state: Any, losses: Any = LOSSES, others: Any = ()) -> tuple[str, ...]:
    return compare((state, losses), (END, LOSSES), [(END, LOSSES), *others], START).wrong


def test_a_run_is_compared_by_its_updates() -> None:
    assert wrong(END) == ()
    assert wrong({**END, "w": np.nextafter(END["w"], np.float32(9))}) == ()
    # One percent of the update, which is a tenth of a percent of the parameters.
    (told,) = wrong({**END, "w": START["w"] + 1.01 * (END["w"] - START["w"])})
    assert told.startswith("state['w']: off by")
    assert wrong(END, [np.float32(2.0), np.float32(1.001)])[0].startswith("results[1]")
    assert wrong({**END, "w": np.full((3, 4), np.nan, np.float32)})[0].startswith("state['w']: off by 3.5e+30")


def test_dtypes_shapes_and_integers_have_to_be_equal() -> None:
    assert wrong({**END, "n": np.int32(4)}) == ("state['n']: 4 in place of 3",)
    assert wrong({**END, "w": END["w"].astype(np.float64)})[0].startswith("state['w']: float64")
    assert wrong({"w": END["w"]}) == ("the results have another structure",)
    # An integer that serial runs differ in is known to none of them.
    assert wrong({**END, "n": np.int32(4)}, others=[({**END, "n": np.int32(5)}, LOSSES)]) == ()


def test_what_serial_runs_differ_by_is_allowed() -> None:
    noisy = {**END, "w": END["w"] + np.float32(1e-3)}
    assert wrong({**END, "w": END["w"] - np.float32(1e-3)})
    assert wrong({**END, "w": END["w"] - np.float32(1e-3)}, others=[(noisy, LOSSES)]) == ()
    assert wrong({**END, "w": END["w"] - np.float32(1e-1)}, others=[(noisy, LOSSES)])


def test_one_leaf_does_not_decide_how_large_the_difference_is() -> None:
    """The scale of a loss is 1e30 times greater than the parameters, and a gradient that is zero is all rounding."""
    start = {name: np.zeros(4, np.float32) for name in ("a", "b", "c", "zero")} | {"scale": np.float32(0)}
    weights = {name: np.ones(4, np.float32) for name in ("a", "b", "c")}
    end = {**weights, "zero": np.float32([1e-9] * 4), "scale": np.float32(1e30)}
    found = {**{name: np.float32(1.01) * value for name, value in weights.items()}, "zero": -end["zero"]}
    found["scale"] = end["scale"]

    told = compare((found, []), (end, []), [(end, [])], start)
    np.testing.assert_allclose(told.difference, 0.01, rtol=1e-4)
    assert told.noise == 0
    # The rounding of a serial run is measured in the same way.
    told = compare((end, []), (end, []), [(found, []), (end, [])], start)
    assert told.difference == 0
    np.testing.assert_allclose(told.noise, 0.01, rtol=1e-4)


def test_a_leaf_without_an_update_is_left_out_of_the_difference() -> None:
    start = {name: np.ones(4, np.float32) for name in ("a", "b", "c")}
    end = {**start, "c": np.full(4, 2, np.float32)}
    found = {**end, "c": np.full(4, 2.01, np.float32)}
    assert compare((found, []), (end, []), [(end, [])], start).difference > 9e-3


def test_not_a_number_is_equal_to_itself_alone() -> None:
    losses = [np.float32("nan"), np.float32(1.0)]
    assert compare((END, losses), (END, losses), [(END, losses)], START).wrong == ()
    assert compare((END, LOSSES), (END, losses), [(END, losses)], START).wrong[0].startswith("results[0]")
    assert wrong(END, losses)[0].startswith("results[0]")


def test_rounding_moves_floats_by_a_last_place_and_no_whole_numbers() -> None:
    tree = {"w": np.float32([0.3, 1.0, 2.7]), "n": np.int32(3), "half": jnp.bfloat16(0.3), "f": abs}
    moved = rounded_differently(tree, 0)
    assert moved["n"] == 3 and moved["f"] is abs and moved["w"][1] == 1
    np.testing.assert_allclose(moved["w"], tree["w"], rtol=3e-7)
    assert any(rounded_differently(tree, seed)["w"][0] != tree["w"][0] for seed in range(3))


def test_a_step_that_is_computed_otherwise_is_wrong() -> None:
    """The plan is right, and the table is told another serial step."""

    def trained_with(rate: float) -> Training:
        def step(weights: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(weights)
            return weights - rate * grads, loss

        return Training(step=step, state=jnp.ones((8, 4)), batches=regression(8, 4))

    # One percent of an update, as above.
    serial, others = row._serial_runs(trained_with(0.101))
    told = row._outcome(trained_with(0.1), SHARD_2, serial, others)
    assert told["outcome"] == "wrong" and told["detail"].startswith("state: off by")
    assert row._outcome(trained_with(0.101), SHARD_2, serial, others)["outcome"] == "equal"


def test_the_smallest_rows_are_equal() -> None:
    rows = models("tiny")
    assert [one["outcome"] for one in rows] == ["equal", "equal"]
    assert all(isinstance(value, str | float) for one in rows for value in one.values())


def test_every_model_has_methods_that_there_are() -> None:
    assert len(MODELS) >= 45
    assert all(model.methods and set(model.methods) <= METHODS.keys() for model in MODELS.values())
    assert all(" " not in name for name in MODELS)


class Process:
    """Trains no model: each has one row that is equal, and `gan` ends the process."""

    code = -11
    started: ClassVar[list[str]] = []

    def __init__(self, names: Any) -> None:
        self._names = names

    def lines(self) -> Iterator[str]:
        for name in self._names:
            self.started.append(name)
            if name == "gan":
                return
            found = {"name": name, "package": "jax 1", "model": name, "optimizer": "adam", "method": "m"}
            yield row.ROW + json.dumps(found | {"outcome": "equal", "difference": 1e-7, "rounding": 2e-7})
            yield row.DONE + name

    def end(self) -> None:
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that processes begin to train, which are none but those of the test."""
    monkeypatch.setattr(processes, "_Process", Process)
    monkeypatch.setattr(Process, "started", [])
    return Process.started


def test_a_model_that_ends_its_process_is_a_crash_and_the_others_go_on(started: list[str]) -> None:
    of_model: dict[str, Any] = {}
    processes.train(["mlp", "gan", "vae"], 2, of_model.__setitem__)
    outcomes = {name: [one["outcome"] for one in rows] for name, rows in of_model.items()}
    assert outcomes == {"mlp": ["equal"], "gan": ["crash"], "vae": ["equal"]}

    text = page([one for rows in of_model.values() for one in rows])
    assert f"3 rows (3 of {len(MODELS)} models): 2 equal, 1 crash." in text
    assert "| jax 1 | mlp | adam | m | equal | 1.0e-07 | 2.0e-07 |" in text
    assert "the process ended with code -11" in text


def test_an_interrupted_run_goes_on_with_the_models_that_are_missing(started: list[str], tmp_path: Path) -> None:
    results, written = tmp_path / "rows.json", tmp_path / "page.md"
    command = ["--processes", "1", "--results", str(results), "--write", str(written)]
    assert table.main(["vae", "mlp", *command]) == 0
    assert started == ["vae", "mlp"]

    # A page of some models says which are missing, and how many.
    text = written.read_text()
    assert f"2 rows (2 of {len(MODELS)} models): 2 equal." in text
    missing = text[text.index(f"{len(MODELS) - 2} models have not been run") : text.index("| package")]
    assert "`gan`" in missing and "`vae`" not in missing
    assert max(map(len, missing.splitlines())) <= 120

    # The rows are those of the whole run, in the order of the models.
    assert table.main(command) == 0
    assert sorted(started) == sorted(MODELS) and started[:2] == ["vae", "mlp"]
    text = written.read_text()
    assert f"{len(MODELS)} rows (all {len(MODELS)} models)" in text and "have not been run" not in text
    assert text.index("| jax 1 | mlp ") < text.index("| jax 1 | vae ")
    assert table.main(command) == 0
    assert len(started) == len(MODELS)


def test_no_model_begins_after_the_time_is_over(started: list[str], tmp_path: Path) -> None:
    results = read(tmp_path / "rows.json")
    processes.train(["mlp", "vae", "word2vec"], 1, results.add, lambda: len(results.of_model) >= 2)
    assert list(read(results.path).of_model) == ["mlp", "vae"]
    assert "word2vec" not in started

    assert table.main(["--seconds", "0", "--results", str(results.path)]) == 0
    assert started == ["mlp", "vae"]


def test_an_interruption_by_the_keyboard_ends_the_run(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    one_is_done = threading.Event()

    def interrupted(future: Future[None]) -> None:
        one_is_done.wait()
        raise KeyboardInterrupt

    def done(name: str, rows: Any) -> None:
        names.append(name)
        one_is_done.set()
        time.sleep(0.02)  # The main thread has as many times this as there are models.

    # What the main thread waits in; a signal might come before.
    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.train(list(MODELS), 1, done)
    assert names == started and len(names) < len(MODELS)


def test_rows_of_other_versions_are_not_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    read(path).add("mlp", [])
    assert read(path).of_model == {"mlp": []}

    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"versions": stored["versions"] | {"jax": "0.1"}}))
    with pytest.raises(OtherVersions, match=rf"made with jax 0\.1 \(now {jax.__version__}\)\. Name another file"):
        read(path)
    with pytest.raises(SystemExit):
        table.main(["mlp", "--results", str(path)])

    # One more line in one source file is another version.
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    monkeypatch.setattr("benchmarks.models.results._SOURCES", (folder,))
    path.unlink()
    read(path).add("mlp", [])
    (folder / "a.py").write_text("x = 1\ny = 2\n")
    with pytest.raises(OtherVersions, match="sources"):
        read(path)
