"""Examples train like the serial loop, continue under another method, and write the same files after interruptions."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa

FOLDER = Path(__file__).parents[1] / "examples"
#: The smallest sizes of each example.
SMALL = {
    "train_equinox": ["--hidden", "8"],
    "train_gpt": ["--hidden", "16", "--layers", "1", "--evaluate-every", "10"],
    "train_haiku": ["--hidden", "8"],
    "train_nnx": ["--hidden", "8"],
    "train_resnet": ["--width", "4", "--blocks", "1"],
}
#: Examples that always run.
SHORT = ("train_haiku",)
Main = Callable[[list[str]], None]


@pytest.fixture
def main_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Main]]:
    """The `main` of an example, for a session of two devices, with jax's default settings."""
    monkeypatch.syspath_prepend(str(FOLDER))
    minialpa.shutdown()
    minialpa.init(num_hosts=1, devices_per_host=2)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield lambda name: importlib.import_module(name).main
    minialpa.shutdown()


def column(path: Path, name: str = "loss") -> dict[int, float]:
    """A column of a file of metrics, by step."""
    header, *lines = (line.split(",") for line in path.read_text().splitlines())
    return {int(line[0]): float(line[header.index(name)]) for line in lines}


def serial_losses(main: Main, flags: list[str]) -> dict[int, float]:
    """The losses of an example if `train` is a plain loop on one device."""
    losses = {}

    def train(step: Any, create_state: Any, batches: Any, *, n_steps: int, **_: Any) -> None:
        # A number would be a constant of the compiled step, which would be compiled anew for each count of steps.
        state = jax.tree.map(lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x, eqx.filter_jit(create_state)())
        plain_step = eqx.filter_jit(step.__wrapped__)
        for i, batch in enumerate(itertools.islice(batches(), n_steps), start=1):
            state, metrics = plain_step(state, batch)
            losses[i] = float(metrics["loss"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minialpa, "train", train)
        main(flags)
    return losses


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("train_*.py")} == set(SMALL)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in SMALL]
)
def test_an_example_trains_as_the_serial_loop_and_goes_on_as_a_pipeline(
    main_of: Callable[[str], Main], tmp_path: Path, name: str
) -> None:
    main, n_steps, n_first = main_of(name), 16, 8
    serial = serial_losses(main, [*SMALL[name], "--steps", str(n_steps)])

    flags = [*SMALL[name], "--folder", str(tmp_path), "--save-every", "4"]
    main([*flags, "--steps", str(n_first)])
    main([*flags, "--steps", str(n_steps), "--stages", "2", "--profile"])
    losses = column(tmp_path / "metrics.csv")

    # Batch statistics are per micro-batch.
    n_equal = n_first if name == "train_resnet" else n_steps
    assert list(losses) == list(serial)
    assert list(losses.values())[:n_equal] == pytest.approx(list(serial.values())[:n_equal], rel=1e-3)
    values = np.array(list(losses.values()))
    assert values[-4:].mean() < values[:4].mean()
    assert json.loads((tmp_path / "trace.json").read_text())
    if name == "train_gpt":
        assert list(column(tmp_path / "evaluation.csv")) == [8, 10, 16]


# ---- what the examples share ----------------------------------------------------------------------------------------


def test_repeated_steps_leave_the_file_of_an_undisturbed_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    csv_file, rng = importlib.import_module("common").CsvFile, random.Random(seed)
    whole, disturbed = csv_file(tmp_path / "whole.csv"), csv_file(tmp_path / "disturbed.csv")
    for n in range(1, 21):
        whole.write(n, {"loss": 1 / n})

    # Some go on from a checkpoint in the same process, some in another one.
    n = 0
    while n < 20:
        n += 1
        disturbed.write(n, {"loss": 1 / n})
        if rng.random() < 0.2:
            n = rng.randrange(n + 1)
            disturbed = rng.choice((disturbed, csv_file(tmp_path / "disturbed.csv")))
    assert (tmp_path / "disturbed.csv").read_text() == (tmp_path / "whole.csv").read_text()


def test_the_flags_of_a_cluster_start_a_session_on_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    common, calls = importlib.import_module("common"), []
    monkeypatch.setattr(minialpa, "init", lambda **arguments: calls.append(arguments))
    common.start(common.flag_parser(None), ["--ray", "--hosts", "2"])
    assert calls == [{"cluster": "ray", "num_hosts": 2}]
    for wrong, message in ((["--hosts", "2"], "add --ray"), (["--profile"], "add --folder")):
        with pytest.raises(SystemExit):
            common.start(common.flag_parser(None), wrong)
        assert message in capsys.readouterr().err


def test_generation_on_the_meshes_of_training_equals_plain_jax(
    main_of: Callable[[str], Main], monkeypatch: pytest.MonkeyPatch
) -> None:
    main_of("generate")
    example = sys.modules["generate"]
    monkeypatch.setattr(example, "HIDDEN", 8)
    params, at_once, one_by_one = example.main(steps=4)
    prompt = (np.arange(4)[:, None] * 2 + np.arange(6)[None]).astype(np.int32) % example.VOCABULARY
    serial = jax.jit(example.generate)(jax.device_get(params), example.empty_cache(4), prompt)
    np.testing.assert_array_equal(at_once, serial)
    np.testing.assert_array_equal(one_by_one, serial)
