"""Steps with kernels whose rules a user has registered: right rules compute the step, wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from tests.equivalence.comparison import reference
from tests.equivalence.known_steps import make_batch, make_state
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
WAYS = [
    Way("data", (2,), 2),
    pytest.param(Way("shard", (2,), 1), marks=pytest.mark.slow),
    pytest.param(Way("zero3", (4,), 2), marks=pytest.mark.slow),
    pytest.param(Way("pipeline", (2,), 4, manual=True), marks=pytest.mark.slow),
]


def _step(kernel: Callable[[Any], Any]) -> Callable[..., Any]:
    def loss_of(p: Any, b: Any) -> Any:
        hidden = kernel(b["x"] @ p["w1"])
        minialpa.mark_pipeline_boundary()
        return jnp.mean((kernel(hidden @ p["w2"]) @ p["v"] - b["y"]) ** 2)

    def step(state: Any, batch: Any) -> Any:
        loss, gradient = minialpa.value_and_grad(loss_of)(state["params"], batch)
        return {**state, "params": jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], gradient)}, {"loss": loss}

    return step


def _kind(fun: Any, rule: str, options: dict[str, Any], way: Way) -> tuple[str, str]:
    args = (make_state(), make_batch())
    expected = reference(_step(fun), args)
    kernel = minialpa.register_sharding_rule(lambda h: fun(h), rule, **options)
    found = outcome_of(_step(kernel), args, make_method(way), (1,), lambda n, args: expected)
    return found.kind, found.detail


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "norm" else pytest.mark.slow) for n in RIGHT])
def test_a_right_rule_computes_the_step(name: str, way: Way) -> None:
    kind, detail = _kind(*RIGHT[name], way)
    assert kind == "equal", detail


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "batch norm" else pytest.mark.slow) for n in WRONG])
def test_a_wrong_rule_is_refused_by_name(name: str, way: Way) -> None:
    kind, detail = _kind(*WRONG[name], way)
    assert kind == "rejected" and "The sharding rule of `" in detail, detail
