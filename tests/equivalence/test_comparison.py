"""The comparison detects one percent of a gradient under every optimizer, and accepts other roundings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.equivalence import steps
from tests.equivalence.comparison import differences, reference
from tests.equivalence.drawing import example_of
from tests.equivalence.layers import Layer
from tests.equivalence.losses import Loss, Term
from tests.equivalence.model import BatchNorm, Model
from tests.equivalence.steps import OPTIMIZERS, Training, make_args, make_step

LAYERS = (Layer("dense"), BatchNorm(), Layer("layer_norm"), Layer("mlp", "residual"))
#: Optimizers that always run: one with sums over rows of a matrix, and one without.
SHORT = ("adafactor", "sgd")
_OPTIMIZERS = [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in OPTIMIZERS]
LOSS = Loss((Term("squared", "log of the mean"), Term("cross entropy", "masked mean")))


def _training(**fields: Any) -> Training:
    return Training(Model("vector", LAYERS), LOSS, **fields)


def _plant_one_percent(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Adds one percent to the gradients of the parameters with these names, or to all."""
    right = steps._gradient_of

    def planted(*arguments: Any) -> Any:
        aux, grads = right(*arguments)
        return aux, {**grads, **jax.tree.map(lambda g: 1.01 * g, {name: grads[name] for name in names or grads})}

    monkeypatch.setattr(steps, "_gradient_of", planted)


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_another_order_of_examples_is_no_error_and_one_percent_of_a_gradient_is(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = _training(optimizer=optimizer, batch_size=16, shows_gradients=True)
    state, batch, key = make_args(training)
    expected = reference(make_step(training), (state, batch, key))
    backwards = jax.tree.map(lambda x: x[::-1], batch)
    assert differences(jax.jit(make_step(training))(state, backwards, key), expected) == []

    _plant_one_percent(monkeypatch, "head")
    found = jax.jit(make_step(training))(state, batch, key)
    assert any("state" in d.path and "head" in d.path for d in differences(found, expected))


#: Drawn steps: one of a single gradient, and one where the loss is evaluated after the update.
@pytest.mark.parametrize("number", [66, 116])
def test_drawn_steps_show_one_percent_of_all_gradients(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    training = example_of(number).training
    args = make_args(training)
    expected = reference(make_step(training), args)
    _plant_one_percent(monkeypatch)
    assert differences(jax.jit(make_step(training))(*args), expected)


def test_a_run_in_double_precision_is_no_error() -> None:
    training = _training(optimizer="adam")
    args = make_args(training)
    expected = reference(make_step(training), args)
    as_type = lambda tree, kind: jax.tree.map(  # noqa: E731
        lambda x: np.asarray(x, kind) if np.issubdtype(np.asarray(x).dtype, np.floating) else x, tree
    )
    with jax.enable_x64(True):
        exact = jax.jit(make_step(training))(*as_type(args, np.float64))
        exact = jax.tree.map(np.asarray, exact)
    assert differences(as_type(exact, np.float32), expected) == []


def test_a_gradient_that_is_all_noise_has_a_tolerance_and_no_more() -> None:
    """The gradient of a bias before BatchNorm is zero, and computed from large numbers that cancel."""

    def step(state: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = x @ p["w"] + p["bias"][None]
            return jnp.sum(jnp.sin(10 * (h - jnp.mean(h, 0, keepdims=True)) / (0.1 + jnp.std(h, 0, keepdims=True))))

        return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state)), None

    rng = np.random.default_rng(0)
    state = {"w": rng.standard_normal((8, 8)).astype(np.float32), "bias": np.zeros(8, np.float32)}
    x = rng.standard_normal((16, 8)).astype(np.float32)
    expected = reference(step, (state, x))
    bias, w = expected.leaves
    assert bias.norm < 1e-3 < w.norm and not bias.is_sharp and w.is_sharp
    assert differences(jax.jit(step)(state, x[::-1]), expected) == []
    new_state, _ = jax.jit(step)(state, x)
    moved = {**new_state, "bias": new_state["bias"] + 1e-2}
    assert [d.path for d in differences((moved, None), expected)] == ["state['bias']"]


def _identity(state: Any, x: Any) -> Any:
    return state, {"x": x, "n": jnp.int32(3)}


@pytest.mark.parametrize(
    ("found", "note"),
    [
        ({"x": np.full(3, np.nan, np.float32), "n": np.int32(3)}, "off by"),
        ({"x": np.ones(3, np.float32), "n": np.int32(4)}, "4 in place of 3"),
        ({"x": np.ones(3, np.float64), "n": np.int32(3)}, "float64(3,) in place of float32(3,)"),
        ({"x": np.ones(4, np.float32), "n": np.int32(3)}, "float32(4,) in place of float32(3,)"),
        ({"x": np.ones(3, np.float32)}, "another structure"),
    ],
)
def test_differences_are_reported(found: Any, note: str) -> None:
    expected = reference(_identity, (np.float32(1), np.ones(3, np.float32)))
    assert note in str(differences((np.float32(1), found), expected)[0])


def test_a_number_that_both_runs_lack_is_no_difference() -> None:
    missing = np.full(3, np.nan, np.float32)
    expected = reference(_identity, (np.float32(1), missing))
    assert differences((np.float32(1), {"x": missing, "n": np.int32(3)}), expected) == []
