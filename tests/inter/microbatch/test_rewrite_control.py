"""Micro-batches through scan, while and cond: the split step computes the results of the serial step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minialpa.inter.microbatch.split_step import is_loop
from minialpa.ir.equations import shape_of
from minialpa.tracing.gradients import value_and_grad
from tests.helpers import split_equals_serial

B, T, H, V, L = 8, 6, 4, 12, 3


def _sgd(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        value, grads = value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _rnn_loss(params: Any, tokens: Any) -> Any:
    x = jnp.swapaxes(params["embedding"][tokens], 0, 1)

    def cell(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ params["w"] + x @ params["u"] + params["b"][None])
        return h, h @ params["out"]

    _, logits = lax.scan(jax.checkpoint(cell), jnp.zeros((tokens.shape[0], H)), x)
    labels = jax.nn.one_hot(jnp.roll(tokens, -1, 1).T, V)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, -1))


def _rnn_params() -> dict[str, np.ndarray]:
    shapes = {"embedding": (V, H), "w": (H, H), "u": (H, H), "b": (H,), "out": (H, V)}
    return {name: _normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def test_language_model_with_a_scan_over_time() -> None:
    tokens = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
    split = split_equals_serial(_sgd(_rnn_loss), _rnn_params(), tokens)
    scans = [op.eqn for op in split.ops if op.eqn.primitive.name == "scan"]
    assert len(scans) == 2
    assert not any(B in shape_of(v) for eqn in scans for v in (*eqn.invars, *eqn.outvars))


def test_scan_over_layers_whose_losses_add_up() -> None:
    def loss(params: Any, x: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            x, total = carry
            x = jnp.tanh(x @ w)
            return (x, total + jnp.mean(x**2)), jnp.mean(jnp.abs(x))

        (_, total), each = lax.scan(layer, (x, jnp.float32(3)), params["w"])
        return total + each.sum()

    split = split_equals_serial(_sgd(loss), {"w": _normal(L, H, H)}, _normal(B, H))
    assert sum(is_loop(op.segment) for op in split.ops if op.eqn.primitive.name == "scan") == 2


def test_fori_loop_and_cond_on_a_flag() -> None:
    def loss(params: Any, x: Any) -> Any:
        x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ params["w"]) + i.astype(x.dtype), x)
        flag = params["w"][0, 0] > 0
        return jnp.mean(lax.cond(flag, lambda x: jnp.sin(x @ params["w"]), lambda x: x, x) ** 2)

    split_equals_serial(_sgd(loss), {"w": _normal(H, H)}, _normal(B, H))


def test_carries_with_examples_are_split_and_others_come_back_whole() -> None:
    def step(state: Any, batch: Any) -> Any:
        def iteration(carry: Any, _: None) -> Any:
            key, count, x, y = carry
            key, drawn = jax.random.split(key)
            noise = jax.random.normal(drawn, (1, H))
            return (key, count + 1, jnp.sin(x * noise), y + 1), noise[0, 0]

        carry = state["key"], state["count"], batch["x"], batch["y"]
        (key, count, x, y), drawn = lax.scan(iteration, carry, None, length=3)
        return {"key": key, "count": count}, drawn, jnp.mean(x), x, y.sum()

    state = {"key": jax.random.key(0), "count": jnp.int32(5)}
    split_equals_serial(step, state, {"x": _normal(B, H), "y": _normal(B)})
