"""The table of models marks wrong runs as wrong, and benchmarks/models.md has the text of its generator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.models import row
from benchmarks.models.catalogue import SHARD_2, Training
from benchmarks.models.common import regression
from benchmarks.models.comparison import compare
from benchmarks.models.page import page

START = {"w": np.linspace(1, 2, 12, dtype=np.float32).reshape(3, 4), "n": np.int32(0)}
END = {"w": START["w"] + np.float32(0.1) * np.sin(START["w"]), "n": np.int32(3)}
LOSSES = [np.float32(2.0), np.float32(1.0)]


def wrong(state: Any, losses: Any = LOSSES, others: Any = ()) -> tuple[str, ...]:
    return compare((state, losses), (END, LOSSES), [(END, LOSSES), *others], START).wrong


def test_a_run_is_compared_by_its_updates() -> None:
    assert wrong(END) == ()
    assert wrong({**END, "w": np.nextafter(END["w"], np.float32(9))}) == ()
    # One percent of the update, which is a tenth of a percent of the parameters.
    (message,) = wrong({**END, "w": START["w"] + 1.01 * (END["w"] - START["w"])})
    assert message.startswith("state['w']: off by")
    assert wrong(END, [np.float32(2.0), np.float32(1.001)])[0].startswith("results[1]")
    assert wrong({**END, "w": np.full((3, 4), np.nan, np.float32)})[0].startswith("state['w']: off by 3.5e+30")

    # Dtypes, shapes and integers must be equal.
    assert wrong({**END, "n": np.int32(4)}) == ("state['n']: 4 in place of 3",)
    assert wrong({**END, "w": END["w"].astype(np.float64)})[0].startswith("state['w']: float64")
    assert wrong({"w": END["w"]}) == ("the results have another structure",)
    # An integer in which serial runs differ is not compared.
    assert wrong({**END, "n": np.int32(4)}, others=[({**END, "n": np.int32(5)}, LOSSES)]) == ()


def test_a_step_that_is_computed_otherwise_is_wrong() -> None:
    """The plan is right, and the serial run computes another step."""

    def trained_with(rate: float) -> Training:
        def step(weights: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(weights)
            return weights - rate * grads, loss

        return Training(step=step, state=jnp.ones((8, 4)), batches=regression(8, 4))

    # One percent of an update, as above.
    serial, others = row._serial_runs(trained_with(0.101))
    outcome = row._outcome(trained_with(0.1), SHARD_2, serial, others)
    assert outcome["outcome"] == "wrong" and outcome["detail"].startswith("state: off by")
    assert row._outcome(trained_with(0.101), SHARD_2, serial, others)["outcome"] == "equal"


def test_the_page_has_the_text_of_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    written = (Path(row.__file__).parents[1] / "models.md").read_text(encoding="utf-8")
    monkeypatch.setattr(jax, "__version__", re.findall(r"with jax (.*)\.\n", written)[0])
    generated = page([])
    # Paragraph 3 counts the rows.
    for i in (0, 1, 2, 4):
        assert written.split("\n\n")[i] == generated.split("\n\n")[i]
