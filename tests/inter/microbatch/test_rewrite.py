"""Micro-batches: the split step, run by `run_split`, computes what the serial step does, or is refused for a reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from minialpa.errors import TraceError
from minialpa.inter.microbatch.rewrite import split_micro_batches
from minialpa.inter.microbatch.split_step import LOOP, PROLOGUE, UPDATE, SplitStep, is_loop
from minialpa.ir.equations import shape_of
from minialpa.tracing.gradients import grad, per_micro_batch, value_and_grad
from tests.helpers import run_split, trace

B, D, V = 8, 4, 10


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _params() -> dict[str, np.ndarray]:
    return {"w": _normal(D, D), "b": _normal(D, seed=1), "v": _normal(D, seed=2)}


def _batch() -> dict[str, np.ndarray]:
    mask = np.array([1, 0, 1, 1, 0, 0, 1, 0], np.float32)
    return {"x": _normal(B, D, seed=3), "y": _normal(B, seed=4), "mask": mask, "id": np.arange(B, dtype=np.int32)}


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


def _assert_close(got: Any, expected: Any, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, b), a in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype, path
        a, b = (np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else np.asarray(x) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def _check(step: Callable[..., Any], *args: Any, n: int = 4, **tolerance: float) -> SplitStep:
    """The split step, after a check that its results are those of the serial step; also if it keeps rows."""
    traced, expected = trace(step, *args), jax.jit(step)(*args)
    split = split_micro_batches(traced, n)
    _assert_close(run_split(split, args), expected, **tolerance)
    if split.computes_rows_again:
        kept = split_micro_batches(traced, n, keep_rows=True)
        assert not kept.computes_rows_again
        _assert_close(run_split(kept, args), expected, **tolerance)
    return split


def _primitives(split: SplitStep, segment: int) -> list[str]:
    return [op.eqn.primitive.name for op in split.in_segment(segment)]


# ---- losses ---------------------------------------------------------------------------------------------------------


def _weight_decay(params: Any) -> Any:
    return 0.01 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


LOSSES: dict[str, Callable[..., Any]] = {
    "mean": lambda p, b: jnp.mean(_errors(p, b)),
    "sum": lambda p, b: jnp.sum(_errors(p, b)),
    "masked mean": lambda p, b: jnp.sum(_errors(p, b) * b["mask"]) / jnp.sum(b["mask"]),
    "masked mean, at least one": lambda p, b: jnp.sum(_errors(p, b) * b["mask"]) / jnp.maximum(b["mask"].sum(), 1),
    "weight decay": lambda p, b: jnp.mean(_errors(p, b)) + _weight_decay(p),
    "scaled": lambda p, b: 1024 * jnp.mean(_errors(p, b)),
    "two means": lambda p, b: jnp.mean(_errors(p, b)) + 0.5 * jnp.mean(jnp.abs(b["x"] @ p["w"])),
    "vmap": lambda p, b: jax.vmap(lambda x, y: (jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2)(b["x"], b["y"]).mean(),
    "remat": lambda p, b: jnp.mean(jax.checkpoint(_errors)(p, b)),
    "remat of the loss": jax.checkpoint(lambda p, b: jnp.mean(_errors(p, b)) + _weight_decay(p)),
    "constant": lambda p, b: _weight_decay(p),
}


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("name", LOSSES)
def test_training_equals_the_serial_run(name: str, n: int) -> None:
    _check(_training(LOSSES[name]), _params(), _batch(), n=n)


def test_the_loop_works_on_rows_and_the_update_runs_once() -> None:
    split = _check(_training(LOSSES["mean"]), _params(), _batch())
    loop = [op.eqn for op in split.in_segment(LOOP)]
    assert not any(B in shape_of(v) for eqn in loop for v in eqn.outvars)
    assert "dot_general" not in _primitives(split, UPDATE)
    assert len(split.accumulators) == 4  # three gradients and the loss
    assert {a.reduction for a in split.accumulators} == {"sum"}


def test_one_micro_batch_leaves_the_program_as_it_is() -> None:
    traced = trace(_training(LOSSES["mean"]), _params(), _batch())
    split = split_micro_batches(traced, 1)
    kept = [op.eqn for op in split.ops if op.eqn.primitive.name != "minialpa_gradient"]
    assert [e.outvars for e in kept] == [e.outvars for e in traced.flat.eqns]
    assert not split.accumulators and not split.stacks and not split.micro_inputs


def test_plain_jax_gradients_need_no_marks() -> None:
    def step(params: Any, batch: Any) -> Any:
        return _sgd(params, jax.grad(LOSSES["mean"])(params, batch))

    _check(step, _params(), _batch())


def test_several_gradients_in_a_step() -> None:
    def step(params: Any, batch: Any) -> Any:
        first, grads = value_and_grad(LOSSES["mean"])(params, batch)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g / (1 + jnp.abs(g)), params, grads)
        second, more = value_and_grad(lambda p, b: jnp.mean(jnp.abs(b["x"] @ p["w"])))(params, batch)
        return _sgd(moved, more), first, second

    split = _check(step, _params(), _batch())
    assert "dot_general" not in _primitives(split, UPDATE)


def test_a_gradient_norm_is_that_of_the_whole_batch() -> None:
    def step(params: Any, batch: Any) -> Any:
        value, grads = value_and_grad(LOSSES["mean"])(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return _sgd(params, jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)), value, norm

    _check(step, _params(), _batch())


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_rows_come_back_in_order() -> None:
    def loss(params: Any, batch: Any) -> Any:
        errors = _errors(params, batch)
        outer = batch["x"][:, :, None] * batch["x"][:, None]
        return jnp.mean(errors), {"errors": errors, "id": batch["id"] * 2, "columns": outer.transpose(1, 0, 2)}

    split = _check(_training(loss, has_aux=True), _params(), _batch())
    assert sorted(stack.dim for stack in split.stacks) == [0, 0, 1]


def test_metrics_combine_by_their_reduction() -> None:
    def loss(params: Any, batch: Any) -> Any:
        errors = _errors(params, batch)
        metrics = {
            "count": jnp.sum(errors > 0.5),
            "any": jnp.any(errors > 2),
            "all": jnp.all(errors > 0),
            "max": jnp.max(errors),
            "min": jnp.min(errors),
            "prod": jnp.prod(jax.lax.stop_gradient(errors)),
            "accuracy": jnp.mean(errors > 0.5),
            "histogram": jnp.zeros(3, jnp.int32).at[batch["id"] % 3].add(1),
            "perplexity": jnp.exp(jnp.mean(errors)),
            "ratio": jnp.max(errors) / jnp.mean(errors),
            "std": jnp.sqrt(jnp.mean(errors**2) - jnp.mean(errors) ** 2),
        }
        return jnp.mean(errors), metrics

    split = _check(_training(loss, has_aux=True), _params(), _batch())
    assert {a.reduction for a in split.accumulators} == {"sum", "max", "min", "and", "or", "prod"}
    assert "exp" in _primitives(split, UPDATE)


def test_metrics_without_gradients() -> None:
    def step(params: Any, batch: Any) -> Any:
        errors = _errors(params, batch)
        return {"loss": errors.mean(), "worst": errors.max(), "errors": errors}

    _check(step, _params(), _batch())


def test_results_may_be_inputs_constants_and_literals() -> None:
    table = jnp.arange(3.0)

    def step(params: Any, batch: Any) -> Any:
        value, _ = value_and_grad(LOSSES["mean"])(params, batch)
        return {"params": params, "x": batch["x"], "one": 1.0, "table": table, "v": value, "again": value}

    _check(step, _params(), _batch())


# ---- values that do not depend on the examples but have their shape -------------------------------------------------


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_dropout_draws_the_rows_of_the_whole_batch(make_key: Callable[[int], Any]) -> None:
    def step(state: Any, batch: Any) -> Any:
        key, drawn = jax.random.split(state["key"])

        def loss(params: Any, batch: Any) -> Any:
            kept = jax.random.bernoulli(drawn, 0.5, batch["x"].shape)
            hidden = jnp.where(kept, batch["x"] @ params["w"], 0.0)
            return jnp.mean(hidden @ params["v"]), kept

        (value, kept), grads = value_and_grad(loss, has_aux=True)(state["params"], batch)
        return {"params": _sgd(state["params"], grads), "key": jax.random.key_data(key)}, value, kept

    state = {"params": _params(), "key": make_key(0)}
    split = split_micro_batches(trace(step, state, _batch()), 4)
    _assert_close(run_split(split, (state, _batch())), jax.jit(step)(state, _batch()))
    assert split.micro_index is not None


def test_position_numbers_and_weights_of_rows_are_cut() -> None:
    weights = jnp.linspace(0, 1, B)

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(_errors(params, batch) * weights * jnp.arange(B).astype(jnp.float32))

    _check(_training(loss), _params(), _batch())


# ---- batch statistics -----------------------------------------------------------------------------------------------


def _mean_of_runs(step: Callable[..., Any], state: Any, batch: Any, n: int) -> Any:
    """The average result of `n` serial steps, each on the rows of one micro-batch and all from the same state."""
    runs = [jax.jit(step)(state, jax.tree.map(lambda x: np.split(x, n)[m], batch)) for m in range(n)]  # noqa: B023
    return jax.tree.map(lambda *xs: sum(xs) / np.float32(n), *runs)


def _fast_variance(h: Any) -> Any:
    return jnp.maximum(jnp.mean(h**2, 0, keepdims=True) - jnp.mean(h, 0, keepdims=True) ** 2, 0)


#: Spreads of a (batch, features) array.
SPREADS: dict[str, Callable[..., Any]] = {
    "biased variance": lambda h: jnp.var(h, 0, keepdims=True),
    "unbiased variance": lambda h: jnp.var(h, 0, keepdims=True, ddof=1),
    "unbiased variance by hand": lambda h: jnp.sum((h - h.mean(0)[None]) ** 2, 0, keepdims=True) / (h.shape[0] - 1),
    "fast variance": _fast_variance,
    "standard deviation": lambda h: jnp.std(h, 0, keepdims=True) ** 2,
}

#: What else an array may be divided by, which is no variance.
OTHER_SPREADS: dict[str, Callable[..., Any]] = {
    "largest value": lambda h: jnp.max(h, 0, keepdims=True) ** 2,
    "norm per example": lambda h: jnp.sqrt(jnp.sum(h**2) / h.shape[0])[None, None],
    "weighted variance": lambda h: jnp.sum(jnp.abs(h) * (h - h.mean(0)[None]) ** 2, 0, keepdims=True) / h.shape[0],
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("spread", SPREADS)
def test_batch_norm_uses_statistics_of_the_micro_batch(spread: str, n: int, wrap: Callable[..., Any]) -> None:
    def loss(params: Any, batch: Any) -> Any:
        hidden = batch["x"] @ params["w"]
        mean, size = hidden.mean(0, keepdims=True), SPREADS[spread](hidden)
        normed = (hidden - mean) * jax.lax.rsqrt(size + 1e-3) * params["b"][None]
        return jnp.mean((normed @ params["v"] - batch["y"]) ** 2), (mean[0], size[0])

    def step(state: Any, batch: Any) -> Any:
        (value, stats), grads = value_and_grad(wrap(loss), has_aux=True)(state["params"], batch)
        running = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["running"], stats)
        return {"params": _sgd(state["params"], grads), "running": running}, value, stats

    state = {"params": _params(), "running": (np.zeros(D, np.float32), np.ones(D, np.float32))}
    got = run_split(split_micro_batches(trace(step, state, _batch()), n), (state, _batch()))
    # The update is linear in gradients and statistics, so the average of the steps is the step of the averages.
    _assert_close(got, _mean_of_runs(step, state, _batch(), n), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spread", OTHER_SPREADS)
def test_what_is_no_batch_statistic_is_that_of_the_whole_batch(spread: str) -> None:
    def loss(params: Any, batch: Any) -> Any:
        hidden = batch["x"] @ params["w"]
        mean, size = hidden.mean(0, keepdims=True), OTHER_SPREADS[spread](hidden)
        normed = (hidden - mean) * jax.lax.rsqrt(size + 1e-3) * params["b"][None]
        return jnp.mean((normed @ params["v"] - batch["y"]) ** 2)

    split = _check(_training(loss), _params(), _batch(), rtol=1e-4)
    assert split.own == () and split.n_loops > 1


def test_a_standardised_loss_is_that_of_the_whole_batch() -> None:
    """It divides by a spread as a normalisation does, but of whole examples."""

    def loss(params: Any, batch: Any) -> Any:
        gains = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
        return jnp.mean(jax.lax.stop_gradient((gains - gains.mean()) / (gains.std() + 1e-3)) * gains)

    assert _check(_training(loss), _params(), _batch(), rtol=1e-4).own == ()


def test_whitened_embeddings_are_those_of_the_whole_batch() -> None:
    """A normalisation without running averages, as in losses on the correlation of features, also with a gain."""

    def loss(params: Any, batch: Any) -> Any:
        z = jnp.tanh(batch["x"] @ params["w"])
        z = (z - z.mean(0, keepdims=True)) / jnp.sqrt(z.var(0, keepdims=True) + 1e-3) * params["b"][None]
        return jnp.sum((z.T @ z / B - jnp.eye(D)) ** 2)

    assert _check(_training(loss), _params(), _batch(), rtol=1e-4).own == ()


def test_statistics_are_listed_with_their_line() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            hidden = batch["x"] @ params["w"]
            mean, var = hidden.mean(0), hidden.var(0)
            normed = (hidden - mean[None]) * jax.lax.rsqrt(var + 1e-3)[None]
            return jnp.mean((normed * params["b"][None]) @ params["v"] - batch["y"]), (mean, var)

        (_, stats), grads = value_and_grad(loss, has_aux=True)(state["params"], batch)
        running = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["running"], stats)
        return {"params": _sgd(state["params"], grads), "running": running}

    state = {"params": _params(), "running": (np.zeros(D, np.float32), np.ones(D, np.float32))}
    split = split_micro_batches(trace(step, state, _batch()), 4)
    (found,) = split.own
    assert re.fullmatch(r"mean and variance of float32 \(batch, 4\) at .*test_rewrite.py:\d+.*", found), found


TOTALS: dict[str, tuple[Callable[..., Any], int]] = {
    "root of a mean": (lambda e, b: jnp.sqrt(jnp.mean(e) + 1), 1),
    "mean of the positive": (lambda e, b: jnp.sum(jnp.where(e > 0.5, e, 0)) / jnp.sum(e > 0.5).astype(e.dtype), 1),
    "over a detached total": (lambda e, b: jnp.sum(e**2) / jax.lax.stop_gradient(jnp.sum(jnp.abs(e))), 1),
    "detached weights": (lambda e, b: jnp.sum(e * (w := jax.lax.stop_gradient(jnp.exp(-e))) / jnp.sum(w)), 1),
    "logsumexp": (lambda e, b: jax.nn.logsumexp(e), 2),
    "max": (lambda e, b: jnp.max(e), 2),
    "variance": (lambda e, b: jnp.var(e), 3),
    "unbiased deviation": (lambda e, b: jnp.std(e, ddof=1), 3),
    "two scales": (lambda e, b: jnp.sqrt(jnp.mean(e)) + jnp.log(jnp.mean(e**2)), 2),
    "half precision": (lambda e, b: jnp.log(jnp.mean(e.astype(jnp.float16)) + 1).astype(jnp.float32), 2),
}


@pytest.mark.parametrize("name", TOTALS)
def test_losses_of_totals_take_as_many_loops_as_they_need(name: str) -> None:
    """A scalar that multiplies what comes back waits until gradients are added up; a sum of two scales cannot."""
    loss, n_loops = TOTALS[name]
    step = _training(lambda p, b: loss(_errors(p, b), b))
    split = _check(step, _params(), _batch(), rtol=1e-2 if name == "half precision" else 1e-4)
    assert split.n_loops == n_loops


def test_gradients_that_wait_for_a_scalar_may_be_added_up() -> None:
    """A weight that is used twice has two gradients, both of which are scaled by the same total."""

    def loss(params: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["w"]) @ params["w"]
        values = jnp.abs(hidden @ params["v"])
        return jnp.sum(values**2) / jax.lax.stop_gradient(jnp.sum(values))

    assert _check(_training(loss), _params(), _batch(), rtol=1e-4).n_loops == 1


def test_rows_that_wait_for_a_scalar_may_be_results() -> None:
    def loss(params: Any, batch: Any) -> Any:
        errors = _errors(params, batch)
        weights = jax.lax.stop_gradient(errors)
        shares = weights / jnp.sum(weights)
        return jnp.sum(shares * errors), (shares, 3.0 * shares)

    split = _check(_training(loss, has_aux=True), _params(), _batch(), rtol=1e-4)
    assert split.n_loops == 1 and len(split.stacks) == 2


def test_a_value_of_the_micro_batch_is_asked_for() -> None:
    """The loss is the mean of the micro-batches' own, and the gradient is that of this mean."""

    def balance(params: Any, x: Any, own: Callable[[Any], Any]) -> Any:
        routed = jax.nn.softmax(x @ params["w"])
        mean = own(routed.mean(0))
        total = own(jnp.sum(routed**2, 0))
        return jnp.sum(mean * jnp.log(mean)) + jnp.sum(total * mean) / B

    def step(params: Any, batch: Any) -> Any:
        loss = lambda p, b: jnp.mean(_errors(p, b)) + balance(p, b["x"], per_micro_batch)  # noqa: E731
        value, grads = value_and_grad(loss)(params, batch)
        return _sgd(params, grads), value

    def expected(params: Any, batch: Any) -> Any:
        def loss(p: Any, b: Any) -> Any:
            parts = [balance(p, x, lambda v: v) for x in np.split(b["x"], 4)]
            return jnp.mean(_errors(p, b)) + sum(parts) / 4

        value, grads = jax.value_and_grad(loss)(params, batch)
        return _sgd(params, grads), value

    split = split_micro_batches(trace(step, _params(), _batch()), 4)
    _assert_close(run_split(split, (_params(), _batch())), jax.jit(expected)(_params(), _batch()), rtol=1e-4)
    assert len(split.own) == 2 and "`per_micro_batch` at" in split.own[0]
    whole = run_split(split_micro_batches(trace(step, _params(), _batch()), 1), (_params(), _batch()))
    _assert_close(whole, jax.jit(step)(_params(), _batch()))


def test_examples_may_be_normalised_by_what_the_micro_batch_has() -> None:
    def weighted(params: Any, batch: Any, own: Callable[[Any], Any]) -> Any:
        errors = _errors(params, batch)
        weights = jnp.exp(-errors)
        return jnp.sum(errors * weights / (own(jnp.sum(weights)) + 0.1))

    def step(params: Any, batch: Any) -> Any:
        value, grads = value_and_grad(lambda p, b: weighted(p, b, per_micro_batch))(params, batch)
        return _sgd(params, grads), value

    def expected(params: Any, batch: Any) -> Any:
        def loss(p: Any, b: Any) -> Any:
            parts = [jax.tree.map(lambda x: x[m : m + 2], b) for m in range(0, B, 2)]  # noqa: B023
            return sum(weighted(p, part, lambda v: v) for part in parts)

        value, grads = jax.value_and_grad(loss)(params, batch)
        return _sgd(params, grads), value

    split = split_micro_batches(trace(step, _params(), _batch()), 4)
    _assert_close(run_split(split, (_params(), _batch())), jax.jit(expected)(_params(), _batch()), rtol=1e-4)


def test_statistics_of_the_batch_alone_are_exact() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = (batch["x"] - batch["x"].mean(0, keepdims=True)) / batch["x"].std(0, keepdims=True)
        return jnp.mean(_errors(params, {**batch, "x": x}))

    split = _check(_training(loss), _params(), _batch())
    assert "reduce_sum" in _primitives(split, PROLOGUE)


def test_an_integer_from_a_total_is_that_of_the_whole_batch() -> None:
    def loss(params: Any, batch: Any) -> Any:
        hidden = batch["x"] @ params["w"]
        bucket = (10 * hidden.mean(0)).astype(jnp.int32)
        return jnp.mean(hidden * bucket.astype(hidden.dtype)[None]), {"bucket": bucket}

    _check(_training(loss, has_aux=True), _params(), _batch())


def test_an_integer_of_the_micro_batch_is_refused() -> None:
    def loss(params: Any, batch: Any) -> Any:
        mean = per_micro_batch((batch["x"] @ params["w"]).mean(0))
        return jnp.mean(_errors(params, batch)), {"bucket": (10 * mean).astype(jnp.int32)}

    with pytest.raises(TraceError, match=r"`result\[1\]\[1\]\['bucket'\]` \(int32\) is computed at .*statistics"):
        split_micro_batches(trace(_training(loss, has_aux=True), _params(), _batch()), 4)


# ---- examples that meet each other ----------------------------------------------------------------------------------

MIXED: dict[str, Callable[..., Any]] = {
    "argmax": lambda e, b: jnp.argmax(e),
    "sort": lambda e, b: jnp.sort(e),
    "cumsum": lambda e, b: jnp.cumsum(e),
    "flip": lambda e, b: jnp.flip(e),
    "slice": lambda e, b: e[:3],
    "median": lambda e, b: jnp.median(e),
    "pairs": lambda e, b: e[:, None] - e[None],
    "similarity": lambda e, b: (h := e[:, None] * b["x"]) @ h.T,
    "gather": lambda e, b: e[b["id"][::-1]],
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_examples_runs_on_all_of_them(name: str) -> None:
    """As a result of the step, and in the loss, whose gradient goes back to each example."""

    def loss(params: Any, batch: Any) -> Any:
        mixed = MIXED[name](_errors(params, batch), batch)
        return jnp.mean(_errors(params, batch)) + 0.1 * jnp.mean(jnp.sin(mixed / 10)), mixed

    split = _check(_training(loss, has_aux=True), _params(), _batch(), rtol=1e-4)
    in_loops = [v for op in split.ops if is_loop(op.segment) for v in op.eqn.outvars]
    assert not any(shape_of(v) == (B, B) for v in in_loops)


def test_shuffled_examples_are_put_in_order_before_the_loop() -> None:
    def loss(params: Any, batch: Any) -> Any:
        mixed = {**batch, "x": 0.3 * batch["x"] + 0.7 * batch["x"][batch["id"][::-1]]}
        return jnp.mean(_errors(params, mixed))

    assert _check(_training(loss), _params(), _batch()).n_loops == 1


def test_a_mean_over_no_examples_leaves_gradients_alone() -> None:
    """It is 0 / 0, and its derivative is infinite, behind a mask that lets nothing through."""

    def loss(params: Any, batch: Any) -> Any:
        y = _errors(params, batch)
        chosen = y > 1e9
        return jnp.sum(jnp.where(chosen, y, 0)) / jnp.sum(chosen.astype(y.dtype)) + _weight_decay(params)

    split = _check(_training(loss), _params(), _batch())
    assert split.n_loops == 1
    params, value = run_split(split, (_params(), _batch()))
    assert np.isnan(value) and all(np.isfinite(p).all() for p in jax.tree.leaves(params))


def test_a_barrier_passes_on_what_waits_for_a_scalar_apart() -> None:
    """Whoever reads an array that a total multiplies may compute it without the total, but not what is beside it."""

    def loss(params: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ params["w"])
        total = jax.lax.stop_gradient(jnp.sum(hidden**2))
        squares = jax.lax.stop_gradient(jnp.sum(hidden, 0)) ** 2
        weights, squares = jax.lax.optimization_barrier((params["v"] * total, squares))
        return jnp.mean(hidden @ weights) + jnp.mean(hidden @ squares)

    _check(_training(loss), _params(), _batch(), rtol=1e-4)


def test_the_forward_pass_alone_is_computed_again() -> None:
    """A contrastive loss: embeddings of one loop, the loss on all of them, and a loop back through the model."""

    def loss(params: Any, batch: Any) -> Any:
        z = jnp.tanh(jnp.tanh(batch["x"] @ params["w"]) @ params["w"])
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T)))

    split = _check(_training(loss), _params(), _batch(), rtol=1e-4)
    last = 2 * split.n_loops
    assert "dot_general" not in _primitives(split, last)
    # The first layer again (the embeddings were put together), two gradients of weights and one of a layer.
    assert _primitives(split, last - 1).count("dot_general") == 4
    assert not any(B in shape_of(v) for op in split.in_segment(LOOP) for v in op.eqn.outvars)
    kept = split_micro_batches(split.traced, 4, keep_rows=True)
    assert _primitives(kept, last - 1).count("dot_general") == 3


# ---- gradients at values that others changed ------------------------------------------------------------------------


def test_a_gradient_at_values_that_another_changed_is_a_loop_of_its_own() -> None:
    def step(params: Any, batch: Any) -> Any:
        grads = grad(LOSSES["mean"])(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        moved = jax.tree.map(lambda p, g: p + 0.1 * g / norm, params, grads)
        value, grads = value_and_grad(LOSSES["mean"])(moved, batch)
        return _sgd(params, grads), value

    split = _check(step, _params(), _batch(), rtol=1e-4)
    assert split.n_loops == 2


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_an_indivisible_batch_is_refused_with_the_divisors() -> None:
    with pytest.raises(TraceError, match=r"8 examples cannot be split into 3 .* divisors: 1, 2, 4, 8"):
        split_micro_batches(trace(_training(LOSSES["mean"]), _params(), _batch()), 3)


def test_a_step_without_a_batch_is_refused() -> None:
    traced = trace(lambda p: jax.tree.map(jnp.sin, p), _params(), batch=())
    with pytest.raises(TraceError, match="needs an argument with examples"):
        split_micro_batches(traced, 2)


# ---- shapes and dtypes ----------------------------------------------------------------------------------------------


def test_examples_may_be_folded_with_positions() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"].reshape(-1, D) @ params["w"]
        logits = jax.nn.log_softmax(x).reshape(B, 3, 2, D // 2)
        return -jnp.mean(logits), jnp.moveaxis(logits, 0, 2)

    params, batch = _params(), {"x": _normal(B, 3, D)}
    _check(_training(loss, has_aux=True), params, batch)


@pytest.mark.parametrize("lookup", [lambda t, i: t[i], lambda t, i: jnp.take(t, i, axis=0)], ids=["index", "take"])
def test_embedding_gradients_add_up(lookup: Callable[..., Any]) -> None:
    def loss(table: Any, ids: Any) -> Any:
        logits = lookup(table, ids) @ table.T
        rows = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(ids, 1, 1)[..., None], axis=-1)
        return -jnp.mean(rows)

    ids = np.random.default_rng(0).integers(0, V, (B, 3)).astype(np.int32)
    _check(_training(loss), _normal(V, D), ids)


def test_what_a_sum_is_added_to_counts_once() -> None:
    def step(counts: Any, ids: Any) -> Any:
        return counts.at[ids].add(1.0)

    ids = np.random.default_rng(0).integers(0, V, B).astype(np.int32)
    _check(step, _normal(V), ids)


def test_convolutions_split_the_batch() -> None:
    def loss(kernel: Any, x: Any) -> Any:
        y = jax.lax.conv(x, kernel, (1, 1), "SAME")
        pooled = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        return jnp.mean(pooled**2)

    _check(_training(loss), _normal(2, 3, 3, 3), _normal(B, 3, 4, 4))


def test_narrow_gradients_accumulate_in_float32() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params)).astype(jnp.float32)

    def step(params: Any, x: Any) -> Any:
        value, grads = value_and_grad(loss)(params, x)
        return params - jnp.bfloat16(0.1) * grads, value

    params, x = jnp.asarray(_normal(D, D), jnp.bfloat16), jnp.asarray(_normal(B, D), jnp.bfloat16)
    split = _check(step, params, x, rtol=2e-2, atol=1e-2)
    dtypes = {(str(a.loop.aval.dtype), str(a.total.aval.dtype)) for a in split.accumulators}  # type: ignore[attr-defined]
    assert ("bfloat16", "float32") in dtypes
    assert ("bfloat16", "bfloat16") not in dtypes


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float16], ids=str)
def test_small_gradients_of_narrow_floats_do_not_vanish_over_micro_batches(dtype: Any) -> None:
    """Summed in its own precision, an e4m3 of 0.015625 stops growing at 0.25."""

    def step(total: Any, x: Any) -> Any:
        return (total.astype(jnp.float32) + jnp.sum(x, 0).astype(jnp.float32)).astype(jnp.float32), jnp.sum(x, 0)

    x = jnp.full((64, D), 0.015625, dtype)
    _, summed = run_split(split_micro_batches(trace(step, jnp.zeros(D), x), 64), (jnp.zeros(D), x))
    np.testing.assert_array_equal(np.asarray(summed, np.float32), 1.0)


def test_a_scalar_batch_leaf_is_the_same_for_all_micro_batches() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(_errors(params, batch)) * batch["scale"]

    _check(_training(loss), _params(), {**_batch(), "scale": np.float32(2)})


# ---- generated programs ---------------------------------------------------------------------------------------------

_ACTIVATIONS: list[Callable[..., Any]] = [jnp.tanh, jax.nn.relu, jax.nn.gelu, jax.nn.softmax, lambda x: x]
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "mean": jnp.mean,
    "sum": jnp.sum,
    "rows": lambda x: jnp.mean(jnp.sum(x, -1)),
    "logsumexp": lambda x: jnp.mean(jax.nn.logsumexp(x, -1)),
    "half": lambda x: jnp.sum(x) / 2 + jnp.mean(x),
}
_METRICS: list[Callable[..., Any]] = [
    *(jnp.max, jnp.min, jnp.mean),
    *(lambda x: jnp.max(x, 0), lambda x: jnp.exp(jnp.mean(x))),
]


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    activations=st.lists(st.sampled_from(range(len(_ACTIVATIONS))), min_size=1, max_size=3),
    skip=st.booleans(),
    reduction=st.sampled_from(sorted(_REDUCTIONS)),
    metrics=st.lists(st.sampled_from(range(len(_METRICS))), max_size=2),
    remat=st.booleans(),
    n=st.sampled_from([1, 2, 3, 6, 12]),
)
def test_generated_networks_equal_the_serial_run(
    activations: list[int], skip: bool, reduction: str, metrics: list[int], remat: bool, n: int
) -> None:
    def loss(params: Any, x: Any) -> Any:
        for w, a in zip(params, activations, strict=True):
            y = _ACTIVATIONS[a](x @ w)
            x = x + y if skip else y
        return _REDUCTIONS[reduction](x), [_METRICS[m](x) for m in metrics]

    params = [0.5 * _normal(D, D, seed=i) for i in range(len(activations))]
    wrapped = jax.checkpoint(loss) if remat else loss
    _check(_training(wrapped, has_aux=True), params, _normal(12, D), n=n, rtol=1e-4, atol=1e-5)
