"""Micro-batches through scan, while and cond: the split step computes what the serial one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from minialpa.inter.microbatch.rewrite import split_micro_batches
from minialpa.inter.microbatch.split_step import SplitStep, is_loop
from minialpa.ir.equations import shape_of
from minialpa.tracing.gradients import value_and_grad
from tests.helpers import run_split, trace

B, T, H, V, L = 8, 6, 4, 12, 3


def _split_equals_serial(step: Callable[..., Any], *args: Any, n: int = 4, rtol: float = 2e-5) -> SplitStep:
    """The split step, after a check that its results are those of the serial step."""
    split = split_micro_batches(trace(step, *args), n)
    got, expected = run_split(split, args), jax.jit(step)(*args)
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, b), a in zip(paths, jax.tree.leaves(got), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6, err_msg=jax.tree_util.keystr(path))
    return split


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
    split = _split_equals_serial(_sgd(_rnn_loss), _rnn_params(), tokens)
    scans = [op.eqn for op in split.ops if op.eqn.primitive.name == "scan"]
    assert len(scans) == 2
    assert not any(B in shape_of(v) for eqn in scans for v in (*eqn.invars, *eqn.outvars))


def _block(x: Any, p: Any) -> Any:
    """Attention over positions and a feed-forward part, both on normalised inputs."""
    heads = (x @ p["qkv"]).reshape(*x.shape[:2], 3, 2, H // 2)
    q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    centred = x - x.mean(-1, keepdims=True)
    normed = centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * p["scale"][None, None]
    return x + jax.nn.gelu(normed @ p["up"]) @ p["down"]


def _stack_params() -> dict[str, np.ndarray]:
    shapes = {"qkv": (L, H, 3 * H), "scale": (L, H), "up": (L, H, 8), "down": (L, 8, H)}
    return {name: 0.5 * _normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def test_transformer_with_a_scan_over_layers_whose_losses_add_up() -> None:
    def loss(params: Any, x: Any) -> Any:
        def layer(carry: Any, p: Any) -> Any:
            x, total = carry
            x = _block(x, p)
            return (x, total + jnp.mean(x**2)), jnp.mean(jnp.abs(x))

        (_, total), each = lax.scan(layer, (x, jnp.float32(3)), params)
        return total + each.sum()

    split = _split_equals_serial(_sgd(loss), _stack_params(), _normal(B, T, H))
    assert sum(is_loop(op.segment) for op in split.ops if op.eqn.primitive.name == "scan") == 2


def test_fori_loop_and_cond_on_a_flag() -> None:
    def loss(params: Any, x: Any) -> Any:
        x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ params["w"]) + i.astype(x.dtype), x)
        flag = params["w"][0, 0] > 0
        return jnp.mean(lax.cond(flag, lambda x: jnp.sin(x @ params["w"]), lambda x: x, x) ** 2)

    _split_equals_serial(_sgd(loss), {"w": _normal(H, H)}, _normal(B, H))


def test_carries_that_do_not_depend_on_examples_come_back_whole() -> None:
    def step(state: Any, x: Any) -> Any:
        def iteration(carry: Any, _: None) -> Any:
            key, count, x = carry
            key, drawn = jax.random.split(key)
            noise = jax.random.normal(drawn, (1, H))
            return (key, count + 1, jnp.sin(x * noise)), noise[0, 0]

        (key, count, x), drawn = lax.scan(iteration, (state["key"], state["count"], x), None, length=3)
        return {"key": key, "count": count}, drawn, jnp.mean(x), x

    _split_equals_serial(step, {"key": jax.random.key(0), "count": jnp.int32(5)}, _normal(B, H))


def test_two_independent_carries_are_both_split() -> None:
    def step(w: Any, batch: Any) -> Any:
        x, y = lax.fori_loop(0, 3, lambda i, c: (c[0] * w, c[1] + 1), (batch["x"], batch["y"]))
        return x, y.sum()

    _split_equals_serial(step, np.float32(2), {"x": _normal(B, H), "y": _normal(B)})


def test_a_loop_that_mixes_examples_runs_on_all_of_them() -> None:
    def loss(params: Any, x: Any) -> Any:
        y, _ = lax.scan(lambda x, w: ((x - x.mean(0, keepdims=True)) @ w, None), x, params["w"])
        return jnp.mean(y**2)

    split = _split_equals_serial(_sgd(loss), {"w": _normal(L, H, H)}, _normal(B, H))
    assert not any(is_loop(op.segment) and op.eqn.primitive.name == "scan" for op in split.ops)
