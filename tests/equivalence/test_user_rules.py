"""Steps with kernels whose rules a user has registered: right rules compute the step, wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from tests.equivalence.comparison import reference
from tests.equivalence.outcomes import outcome_of
from tests.equivalence.ways import Way, make_method

pytestmark = pytest.mark.usefixtures("own_rules")

RIGHT = {
    "elementwise": (jnp.tanh, "b d -> b d", {}),
    "softmax": (lambda h: jax.nn.softmax(h, 1), "b d -> b d", {"need_replication": "d"}),
    "norm": (lambda h: h / jnp.sqrt(1 + jnp.mean(h * h, 1, keepdims=True)), "b d -> b d", {"need_replication": "d"}),
}  # fmt: skip
WRONG = {
    "softmax": (lambda h: jax.nn.softmax(h, 1), "b d -> b d", {}),
    "batch norm": (lambda h: h - jnp.mean(h, 0, keepdims=True), "b d -> b d", {}),
    "prefix": (lambda h: jnp.cumsum(h, 0), "b d -> b d", {}),
    "reversed": (lambda h: h[:, ::-1], "b d -> b d", {}),
}


def _args() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {"params": {"w1": 0.4 * draw(8, 8), "w2": 0.4 * draw(8, 8)}}, {"x": draw(16, 8), "y": draw(16, 8)}


def _step(kernel: Callable[[Any], Any]) -> Callable[..., Any]:
    def loss_of(p: Any, b: Any) -> Any:
        return jnp.mean((kernel(kernel(b["x"] @ p["w1"]) @ p["w2"]) - b["y"]) ** 2)

    def step(state: Any, batch: Any) -> Any:
        loss, gradient = minialpa.value_and_grad(loss_of)(state["params"], batch)
        return {"params": jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], gradient)}, {"loss": loss}

    return step


def _kind(fun: Any, rule: str, options: dict[str, Any]) -> tuple[str, str]:
    args = _args()
    expected = reference(_step(fun), args)
    kernel = minialpa.register_sharding_rule(lambda h: fun(h), rule, **options)
    found = outcome_of(_step(kernel), args, make_method(Way("data", (2,), 2)), (1,), lambda n, args: expected)
    return found.kind, found.detail


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "norm" else pytest.mark.slow) for n in RIGHT])
def test_a_right_rule_computes_the_step(name: str) -> None:
    kind, detail = _kind(*RIGHT[name])
    assert kind == "equal", detail


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "batch norm" else pytest.mark.slow) for n in WRONG])
def test_a_wrong_rule_is_refused_by_name(name: str) -> None:
    kind, detail = _kind(*WRONG[name])
    assert kind == "rejected" and "The sharding rule of `" in detail, detail
