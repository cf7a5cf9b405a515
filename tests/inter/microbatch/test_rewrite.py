"""Micro-batches: the split step, run by `run_split`, equals the serial step, or is refused for a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.errors import TraceError
from minialpa.inter.microbatch.rewrite import split_micro_batches
from minialpa.inter.microbatch.split_step import LOOP, UPDATE, SplitStep
from minialpa.ir.equations import aval_of, shape_of
from minialpa.testing import assert_allclose
from minialpa.tracing.gradients import grad, per_micro_batch, value_and_grad
from tests.helpers import run_split, split_equals_serial, trace

B, D, V = 8, 4, 10


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _params() -> dict[str, np.ndarray]:
    return {"w": _normal(D, D), "b": _normal(D, seed=1), "v": _normal(D, seed=2)}


def _batch() -> dict[str, np.ndarray]:
    return {"x": _normal(B, D, seed=3), "y": _normal(B, seed=4), "id": np.arange(B, dtype=np.int32)}


def _errors(params: Any, batch: Any) -> Any:
    """Squared error of each example."""
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    return (hidden @ params["v"] - batch["y"]) ** 2


def _sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def _training(loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        value, grads = value_and_grad(loss, has_aux=has_aux)(params, batch)
        return _sgd(params, grads), value

    return step


def _primitives(split: SplitStep, segment: int) -> list[str]:
    return [op.eqn.primitive.name for op in split.in_segment(segment)]


def _mean(params: Any, batch: Any) -> Any:
    return jnp.mean(_errors(params, batch))


def _weight_decay(params: Any) -> Any:
    return 0.01 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


def test_the_loop_works_on_rows_and_the_update_runs_once() -> None:
    split = split_equals_serial(_training(_mean), _params(), _batch())
    loop = [op.eqn for op in split.in_segment(LOOP)]
    assert not any(B in shape_of(v) for eqn in loop for v in eqn.outvars)
    assert "dot_general" not in _primitives(split, UPDATE)
    assert len(split.accumulators) == 4  # three gradients and the loss
    assert {a.reduction for a in split.accumulators} == {"sum"}


def test_one_micro_batch_leaves_the_program_as_it_is() -> None:
    traced = trace(_training(_mean), _params(), _batch())
    split = split_micro_batches(traced, 1)
    kept = [op.eqn for op in split.ops if op.eqn.primitive.name != "minialpa_gradient"]
    assert [e.outvars for e in kept] == [e.outvars for e in traced.flat.eqns]
    assert not split.accumulators and not split.concatenations and not split.micro_inputs


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_combine_by_their_reduction_and_rows_come_back_in_order() -> None:
    def loss(params: Any, batch: Any) -> Any:
        errors = _errors(params, batch)
        outer = batch["x"][:, :, None] * batch["x"][:, None]
        rows = {"errors": errors, "id": batch["id"] * 2, "columns": outer.transpose(1, 0, 2)}
        metrics = {
            "count": jnp.sum(errors > 0.5),
            "any": jnp.any(errors > 2),
            "all": jnp.all(errors > 0),
            "max": jnp.max(errors),
            "min": jnp.min(errors),
            "prod": jnp.prod(jax.lax.stop_gradient(errors)),
            "histogram": jnp.zeros(3, jnp.int32).at[batch["id"] % 3].add(1),
            "perplexity": jnp.exp(jnp.mean(errors)),
        }
        return jnp.mean(errors), (rows, metrics)

    split = split_equals_serial(_training(loss, has_aux=True), _params(), _batch())
    assert sorted(stack.dim for stack in split.concatenations) == [0, 0, 1]
    assert {a.reduction for a in split.accumulators} == {"sum", "max", "min", "and", "or", "prod"}
    assert "exp" in _primitives(split, UPDATE)


def test_results_may_be_inputs_constants_literals_and_independent_of_examples() -> None:
    table = jnp.arange(3.0)

    def step(params: Any, batch: Any) -> Any:
        value, _ = value_and_grad(_mean)(params, batch)
        decay, grads = value_and_grad(lambda p, _: _weight_decay(p))(params, batch)
        computed = {"value": value, "again": value, "decay": decay, "of decay": grads}
        return {"params": params, "x": batch["x"], "one": 1.0, "table": table, **computed}

    split_equals_serial(step, _params(), _batch())


# ---- batch statistics -----------------------------------------------------------------------------------------------


TOTALS: dict[str, tuple[Callable[..., Any], int]] = {
    "mean of the positive": (lambda e, b: jnp.sum(jnp.where(e > 0.5, e, 0)) / jnp.sum(e > 0.5).astype(e.dtype), 1),
    "over a detached total": (lambda e, b: jnp.sum(e**2) / jax.lax.stop_gradient(jnp.sum(jnp.abs(e))), 1),
    "detached weights": (lambda e, b: jnp.sum(e * (w := jax.lax.stop_gradient(jnp.exp(-e))) / jnp.sum(w)), 1),
    "logsumexp": (lambda e, b: jax.nn.logsumexp(e), 2),
    "variance": (lambda e, b: jnp.var(e), 3),
    "two scales": (lambda e, b: jnp.sqrt(jnp.mean(e)) + jnp.log(jnp.mean(e**2)), 2),
    "half precision": (lambda e, b: jnp.log(jnp.mean(e.astype(jnp.float16)) + 1).astype(jnp.float32), 2),
}


@pytest.mark.parametrize("name", TOTALS)
def test_losses_of_sums_take_as_many_loops_as_they_need(name: str) -> None:
    """A scalar that multiplies cotangents waits for the sum of the gradients; a sum of two scales cannot wait."""
    loss, n_loops = TOTALS[name]
    step = _training(lambda p, b: loss(_errors(p, b), b))
    assert split_micro_batches(trace(step, _params(), _batch()), 4).n_loops == n_loops


def test_rows_that_wait_for_a_scalar_may_be_results() -> None:
    def loss(params: Any, batch: Any) -> Any:
        errors = _errors(params, batch)
        weights = jax.lax.stop_gradient(errors)
        shares = weights / jnp.sum(weights)
        return jnp.sum(shares * errors), (shares, 3.0 * shares)

    split = split_equals_serial(_training(loss, has_aux=True), _params(), _batch(), rtol=1e-4)
    assert split.n_loops == 1 and len(split.concatenations) == 2


def _balance(params: Any, batch: Any, own: Callable[[Any], Any]) -> Any:
    routed = jax.nn.softmax(batch["x"] @ params["w"])
    mean, total = own(routed.mean(0)), own(jnp.sum(routed**2, 0))
    return jnp.mean(_errors(params, batch)) + jnp.sum(mean * jnp.log(mean)) + jnp.sum(total * mean) / B


def _weighted(params: Any, batch: Any, own: Callable[[Any], Any]) -> Any:
    errors = _errors(params, batch)
    weights = jnp.exp(-errors)
    return jnp.sum(errors * weights / (own(jnp.sum(weights)) + 0.1))


@pytest.mark.parametrize(("loss", "share"), [(_balance, 1 / 4), (_weighted, 1)])
def test_a_value_of_the_micro_batch_is_asked_for(loss: Callable[..., Any], share: float) -> None:
    """The loss is the mean, or the sum, over the micro-batches, with the gradient of this loss."""

    def of_parts(params: Any, batch: Any) -> Any:
        parts = [jax.tree.map(lambda x: x[m : m + 2], batch) for m in range(0, B, 2)]  # noqa: B023
        return share * sum(loss(params, part, lambda v: v) for part in parts)

    step = _training(lambda p, b: loss(p, b, per_micro_batch))
    split = split_micro_batches(trace(step, _params(), _batch()), 4)
    expected = jax.jit(_training(of_parts))(_params(), _batch())
    assert_allclose(run_split(split, (_params(), _batch())), expected, rtol=1e-4, atol=1e-6)
    assert all("`per_micro_batch` at" in found for found in split.per_micro_batch) and split.per_micro_batch


def test_an_integer_of_the_micro_batch_is_refused() -> None:
    def loss(params: Any, batch: Any) -> Any:
        mean = per_micro_batch((batch["x"] @ params["w"]).mean(0))
        return jnp.mean(_errors(params, batch)), {"bucket": (10 * mean).astype(jnp.int32)}

    with pytest.raises(TraceError, match=r"`result\[1\]\[1\]\['bucket'\]`, computed at .* statistics .* dtype int32"):
        split_micro_batches(trace(_training(loss, has_aux=True), _params(), _batch()), 4)


# ---- examples that meet each other ----------------------------------------------------------------------------------


def test_what_mixes_examples_runs_on_all_of_them() -> None:
    """As a result of the step, and in the loss, whose gradient goes back to each example."""

    def loss(params: Any, batch: Any) -> Any:
        errors = _errors(params, batch)
        mixed = errors[batch["id"][::-1]]
        return jnp.mean(errors) + 0.1 * jnp.mean(jnp.sin(mixed / 10)), (mixed, jnp.argmax(errors))

    split_equals_serial(_training(loss, has_aux=True), _params(), _batch(), rtol=1e-4)


def test_shuffled_examples_are_put_in_order_before_the_loop() -> None:
    def loss(params: Any, batch: Any) -> Any:
        mixed = {**batch, "x": 0.3 * batch["x"] + 0.7 * batch["x"][batch["id"][::-1]]}
        return jnp.mean(_errors(params, mixed))

    assert split_equals_serial(_training(loss), _params(), _batch()).n_loops == 1


def test_a_mean_over_no_examples_leaves_gradients_alone() -> None:
    """The mean is 0 / 0, and its derivative is infinite, but a mask blocks the gradient."""

    def loss(params: Any, batch: Any) -> Any:
        y = _errors(params, batch)
        chosen = y > 1e9
        return jnp.sum(jnp.where(chosen, y, 0)) / jnp.sum(chosen.astype(y.dtype)) + _weight_decay(params)

    split = split_equals_serial(_training(loss), _params(), _batch())
    params, value = run_split(split, (_params(), _batch()))
    assert np.isnan(value) and all(np.isfinite(p).all() for p in jax.tree.leaves(params))


def test_a_barrier_passes_on_what_waits_for_a_scalar_apart() -> None:
    """If a scalar sum multiplies an array, the array may be read without the sum, but not the arrays beside it."""

    def loss(params: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["w"])
        total = jax.lax.stop_gradient(jnp.sum(hidden**2))
        squares = jax.lax.stop_gradient(jnp.sum(hidden, 0)) ** 2
        weights, squares = jax.lax.optimization_barrier((params["v"] * total, squares))
        return jnp.mean(hidden @ weights) + jnp.mean(hidden @ squares)

    split_equals_serial(_training(loss), _params(), _batch(), rtol=1e-4)


def test_the_forward_pass_alone_is_computed_again() -> None:
    """A contrastive loss: embeddings of one loop, the loss on all of them, and a loop back through the model."""

    def loss(params: Any, batch: Any) -> Any:
        z = jnp.tanh(jnp.tanh(batch["x"] @ params["w"]) @ params["w"])
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T)))

    split = split_equals_serial(_training(loss), _params(), _batch(), rtol=1e-4)
    last = 2 * split.n_loops
    assert "dot_general" not in _primitives(split, last)
    # The recomputed first layer (the embeddings were joined), two gradients of weights and one of a layer.
    assert _primitives(split, last - 1).count("dot_general") == 4
    assert not any(B in shape_of(v) for op in split.in_segment(LOOP) for v in op.eqn.outvars)
    kept = split_micro_batches(split.traced, 4, keep_activations=True)
    assert _primitives(kept, last - 1).count("dot_general") == 3


# ---- gradients at values that others changed ------------------------------------------------------------------------


@pytest.mark.parametrize(("moves", "n_loops"), [(False, 1), (True, 2)])
def test_a_gradient_at_values_that_another_changed_is_a_loop_of_its_own(moves: bool, n_loops: int) -> None:
    def step(params: Any, batch: Any) -> Any:
        first = grad(_mean)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(first)))
        moved = jax.tree.map(lambda p, g: p + 0.1 * g / norm, params, first)
        value, second = value_and_grad(_mean)(moved if moves else params, batch)
        return _sgd(moved, second), value

    split = split_equals_serial(step, _params(), _batch(), rtol=1e-4)
    assert split.n_loops == n_loops
    assert "dot_general" not in _primitives(split, 2 * n_loops)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_batches_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(TraceError, match=r"8 examples cannot be split into 3 .* divisors: 1, 2, 4, 8"):
        split_micro_batches(trace(_training(_mean), _params(), _batch()), 3)
    with pytest.raises(TraceError, match="needs an argument that holds the examples of a batch"):
        split_micro_batches(trace(lambda p: jax.tree.map(jnp.sin, p), _params(), batch=()), 2)


# ---- shapes and dtypes ----------------------------------------------------------------------------------------------


def test_what_a_sum_is_added_to_counts_once() -> None:
    def step(counts: Any, ids: Any) -> Any:
        return counts.at[ids].add(1.0)

    ids = np.random.default_rng(0).integers(0, V, B).astype(np.int32)
    split_equals_serial(step, _normal(V), ids)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16], ids=str)
def test_sums_of_narrow_floats_over_micro_batches_are_float32(dtype: Any) -> None:
    """In its own precision, a sum of e4m3 values 1 / 64 stops growing at 0.25."""

    def step(w: Any, x: Any) -> Any:
        return w, x.T @ x

    w, x = jnp.zeros(D), jnp.full((64, D), 1 / 8, dtype)
    split = split_micro_batches(trace(step, w, x), 64)
    assert [str(aval_of(one.complete).dtype) for one in split.accumulators] == ["float32"]
    np.testing.assert_array_equal(np.asarray(run_split(split, (w, x))[1], np.float32), 1.0)


def test_a_scalar_batch_leaf_is_the_same_for_all_micro_batches() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(_errors(params, batch)) * batch["scale"]

    split_equals_serial(_training(loss), _params(), {**_batch(), "scale": np.float32(2)})
