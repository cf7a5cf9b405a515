"""What bodies of loops make by position, such as random bits: a micro-batch meets the rows of the full batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from minialpa.inter.microbatch.rewrite import split_micro_batches
from minialpa.inter.microbatch.split_step import SplitStep, is_loop
from minialpa.ir.equations import is_control_flow, shape_of
from minialpa.tracing.gradients import value_and_grad
from tests.helpers import run_split, trace

B, H, L = 8, 4, 3
#: (activations, weight, key, number of the layer) -> activations
Layer = Callable[[Any, Any, Any, Any], Any]
#: (layer, activations, weights, key) -> activations
Loop = Callable[[Layer, Any, Any, Any], Any]


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _drop(h: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.6, h.shape), h / 0.6, 0)


def _dropout(h: Any, w: Any, key: Any, i: Any) -> Any:
    return _drop(jnp.tanh(h @ w), key)


# ---- loops over layers, with keys that come from everywhere ----------------------------------------------------------


def _carried(layer: Layer, h: Any, w: Any, key: Any) -> Any:
    def body(carry: Any, w: Any) -> Any:
        h, key = carry
        key, own = jax.random.split(key)
        return (layer(h, w, own, 0), key), None

    return lax.scan(body, (h, key), w)[0][0]


def _by_layer(layer: Layer, h: Any, w: Any, key: Any) -> Any:
    return lax.scan(lambda h, one: (layer(h, one[0], one[1], 0), None), h, (w, jax.random.split(key, L)))[0]


def _folded(layer: Layer, h: Any, w: Any, key: Any) -> Any:
    def body(h: Any, one: Any) -> Any:
        return layer(h, one[0], jax.random.fold_in(key, one[1]), one[1]), None

    return lax.scan(body, h, (w, jnp.arange(L)))[0]


def _branch_in_loop(layer: Layer, h: Any, w: Any, key: Any) -> Any:
    def body(h: Any, one: Any) -> Any:
        w, i = one
        own = jax.random.fold_in(key, i)
        return lax.cond(i == 1, lambda h: h @ w, lambda h: layer(h, w, own, i), h), None

    return lax.scan(body, h, (w, jnp.arange(L)))[0]


# ---- what layers make by position ------------------------------------------------------------------------------------

_WEIGHTS = _normal(B, H, seed=5)


def _keys_of_examples(h: Any, w: Any, key: Any, i: Any) -> Any:
    return jax.vmap(_drop)(jnp.tanh(h @ w), jax.random.split(key, h.shape[0]))


def _captured(h: Any, w: Any, key: Any, i: Any) -> Any:
    return jnp.tanh(h @ w) * _WEIGHTS + jnp.arange(B, dtype=h.dtype)[:, None] / B


def _own_position(h: Any, w: Any, key: Any, i: Any) -> Any:
    h = _drop(h @ w, key)
    return h.at[jnp.arange(B), i].add(h[jnp.arange(B), 1])


def _neighbours(h: Any, w: Any, key: Any, i: Any) -> Any:
    return _drop(h @ w, key) + h[jnp.arange(B) - 1]


def _flipped_bits(h: Any, w: Any, key: Any, i: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.6, h.shape)[::-1], h @ w, 0)


# ---- the checks ------------------------------------------------------------------------------------------------------


def _step(loop: Loop, layer: Layer, wrap: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = wrap(layer)

    def loss(w: Any, batch: Any, key: Any) -> Any:
        h = loop(wrapped, batch["x"], w, key)
        return jnp.mean((h - batch["y"]) ** 2)

    def step(w: Any, batch: Any, key: Any) -> Any:
        value, grads = value_and_grad(loss)(w, batch, key)
        return w - 0.1 * grads, value

    return step


def _split(loop: Loop, layer: Layer, key: Any, n: int, wrap: Callable[..., Any] = lambda f: f) -> SplitStep:
    """The split step, after a check that it computes what the step does."""
    step = _step(loop, layer, wrap)
    args = (_normal(L, H, H) / 2, {"x": _normal(B, H, seed=1), "y": _normal(B, H, seed=2)}, key)
    split = split_micro_batches(trace(step, *args), n)
    got, expected = run_split(split, args), jax.jit(step)(*args)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    return split


def _runs_in_loop(split: SplitStep) -> bool:
    """Whether all loops and branches on examples run once per micro-batch, on its rows."""
    ops = [op for op in split.ops if is_control_flow(op.eqn)]
    assert ops
    # Operands and results may be whole that the body does not need, such as zeros.
    return all(is_loop(op.segment) and B not in shape_of(op.eqn.outvars[0]) for op in ops)


@pytest.mark.parametrize(("loop", "n", "wrap"), [(_carried, 4, jax.checkpoint), (_branch_in_loop, 2, lambda f: f)])
def test_dropout_in_loops_over_layers(loop: Loop, n: int, wrap: Callable[..., Any]) -> None:
    assert _runs_in_loop(_split(loop, _dropout, jax.random.key(3), n, wrap))


@pytest.mark.parametrize("layer", [_captured, _own_position, _keys_of_examples])
def test_layers_that_make_arrays_by_position(layer: Layer) -> None:
    assert _runs_in_loop(_split(_folded, layer, jax.random.key(3), 4))


@pytest.mark.parametrize("layer", [_neighbours, _flipped_bits])
def test_layers_that_mix_examples_see_all_of_them(layer: Layer) -> None:
    assert not _runs_in_loop(_split(_folded, layer, jax.random.key(3), 2))


@pytest.mark.parametrize(("impl", "partitionable"), [("rbg", True), ("raw", False)])
def test_every_generator_draws_what_it_draws_for_the_full_batch(impl: str, partitionable: bool) -> None:
    with jax.threefry_partitionable(partitionable):
        key = np.asarray(jax.random.PRNGKey(3)) if impl == "raw" else jax.random.key(3, impl=impl)
        assert _runs_in_loop(_split(_by_layer, _dropout, key, 2, jax.checkpoint))


def test_a_while_loop_and_its_test() -> None:
    def halved(w: Any, batch: Any, key: Any) -> Any:
        def body(carry: Any) -> Any:
            i, h = carry
            return i + 1, _drop(h, jax.random.fold_in(key, i)) * 1.25

        steps = 2 + jnp.int32(jnp.abs(w.sum()) * 0)
        return lax.while_loop(lambda carry: carry[0] < steps, body, (0, batch["x"] @ w))[1]

    args = (_normal(H, H), {"x": _normal(B, H, seed=1)}, jax.random.key(3))
    split = split_micro_batches(trace(halved, *args), 4)
    np.testing.assert_allclose(run_split(split, args), jax.jit(halved)(*args), rtol=1e-6)
    (op,) = (op for op in split.ops if op.eqn.primitive.name == "while")
    assert is_loop(op.segment)


def test_a_mask_that_leaves_the_loop_is_that_of_the_full_batch() -> None:
    def step(w: Any, batch: Any, key: Any) -> Any:
        def body(h: Any, key: Any) -> Any:
            keep = jax.random.bernoulli(key, 0.5, h.shape)
            return jnp.where(keep, h @ w, h), keep

        h, kept = lax.scan(body, batch["x"], jax.random.split(key, L))
        return h, kept, jnp.sum(kept)

    args = (_normal(H, H), {"x": _normal(B, H, seed=1)}, jax.random.key(3))
    split = split_micro_batches(trace(step, *args), 2)
    for one, other in zip(run_split(split, args), jax.jit(step)(*args), strict=True):
        # Sums of products of about 1, which processors add in different orders.
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert _runs_in_loop(split)


def _weights_and_rows_as_results(h: Any, w: Any, keys: Any) -> Any:
    def body(h: Any, one: Any) -> Any:
        w, key = one
        return _dropout(h, w, key, 0), (w, key, jnp.ones(3))

    return lax.scan(jax.checkpoint(body), h, (w, keys))


def _weights_in_the_carry(h: Any, w: Any, keys: Any) -> Any:
    def body(carry: Any, key: Any) -> Any:
        h, w, x = carry
        return (_dropout(h, w[0], key, 0), w, x), None

    (out, *others), _ = lax.scan(jax.checkpoint(body), (h, w, h), keys)
    return out, others


@pytest.mark.parametrize("loop", [_weights_and_rows_as_results, _weights_in_the_carry])
def test_a_loop_that_hands_its_operands_back(loop: Callable[..., Any]) -> None:
    def step(w: Any, x: Any, key: Any) -> Any:
        def loss(w: Any) -> Any:
            h, others = loop(x, w, jax.random.split(key, L))
            return jnp.mean(h**2), others

        (value, others), grads = value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * grads, value, jax.tree.map(_data, others)

    args = _normal(L, H, H), _normal(B, H, seed=1), jax.random.key(0)
    split = split_micro_batches(trace(step, *args), 4)
    made = {var for op in split.ops for var in op.eqn.outvars}
    assert all(part.loop in made for part in (*split.accumulators, *split.stacks))
    for got, right in zip(jax.tree.leaves(run_split(split, args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
