"""Values by position in bodies of loops, such as random bits: a micro-batch gets the rows of the full batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from minialpa.inter.microbatch.split_step import SplitStep, is_loop
from minialpa.ir.equations import is_control_flow, shape_of
from tests.equivalence.layers import Layer
from tests.equivalence.losses import Loss, Term
from tests.equivalence.model import Model
from tests.equivalence.steps import Training, make_args, make_step
from tests.helpers import split_equals_serial

#: No other dimension of the models is as long as the batch.
B, H, L = 12, 4, 3
ARGS = np.eye(H, dtype=np.float32) / 2, np.linspace(-1, 1, B * H, dtype=np.float32).reshape(B, H)


def _split(layer: str, wrap: str, n: int = 4, typed: bool = True) -> SplitStep:
    """The split step of a model with one layer, after a check of its results."""
    model = Model("vector", (Layer(layer, wrap),))
    training = Training(model, Loss((Term("squared", "mean"),)), typed=typed, batch_size=B)
    split = split_equals_serial(make_step(training), *make_args(training), n=n)
    made = {var for op in split.ops for var in op.eqn.outvars}
    assert all(part.loop in made for part in (*split.accumulators, *split.concatenations))
    return split


def _runs_in_loop(split: SplitStep) -> bool:
    """Whether all loops and branches on examples run once per micro-batch, on its rows."""
    ops = [op for op in split.ops if is_control_flow(op.eqn)]
    assert ops
    # Operands and results that the body does not need, such as zeros, may be whole.
    return all(is_loop(op.segment) and B not in shape_of(op.eqn.outvars[0]) for op in ops)


@pytest.mark.parametrize(
    ("layer", "wrap"),
    [
        ("dropout", "stack that carries keys"),
        ("dropout", "stack that returns weights"),
        ("dropout_by_position", "checkpointed stack"),
        ("dropout_by_keys", "checkpointed stack with keys"),
        ("updated_feature", "stack"),
        ("halting", "cond"),
    ],
)
def test_layers_that_make_arrays_by_position_run_in_the_loop(layer: str, wrap: str) -> None:
    assert _runs_in_loop(_split(layer, wrap))


def test_layers_that_mix_examples_see_all_of_them() -> None:
    assert not _runs_in_loop(_split("mixed_with_reverse", "stack", n=2))


def test_bits_in_another_order_are_drawn_for_all_examples() -> None:
    def step(w: Any, x: Any, key: Any) -> Any:
        def body(h: Any, key: Any) -> Any:
            return jnp.where(jax.random.bernoulli(key, 0.6, h.shape)[::-1], h @ w, 0), None

        return lax.scan(body, x, jax.random.split(key, L))[0]

    assert not _runs_in_loop(split_equals_serial(step, *ARGS, jax.random.key(3), n=2))


@pytest.mark.parametrize(("impl", "partitionable"), [("rbg", True), ("threefry2x32", False)])
def test_every_generator_draws_what_it_draws_for_the_full_batch(impl: str, partitionable: bool) -> None:
    with jax.threefry_partitionable(partitionable), jax.default_prng_impl(impl):
        assert _runs_in_loop(_split("dropout", "checkpointed stack with keys", n=2, typed=partitionable))


def test_a_while_loop_and_its_test() -> None:
    def halved(w: Any, x: Any, key: Any) -> Any:
        def body(carry: Any) -> Any:
            i, h = carry
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.6, h.shape)
            return i + 1, jnp.where(keep, h, 0) * 1.25

        steps = 2 + jnp.int32(jnp.abs(w.sum()) * 0)
        return lax.while_loop(lambda carry: carry[0] < steps, body, (0, x @ w))[1]

    split = split_equals_serial(halved, *ARGS, jax.random.key(3))
    (op,) = (op for op in split.ops if op.eqn.primitive.name == "while")
    assert is_loop(op.segment)


def test_a_mask_that_leaves_the_loop_is_that_of_the_full_batch() -> None:
    def step(w: Any, x: Any, key: Any) -> Any:
        def body(h: Any, key: Any) -> Any:
            keep = jax.random.bernoulli(key, 0.5, h.shape)
            return jnp.where(keep, h @ w, h), keep

        h, kept = lax.scan(body, x, jax.random.split(key, L))
        return h, kept, jnp.sum(kept)

    assert _runs_in_loop(split_equals_serial(step, *ARGS, jax.random.key(3), n=2))
