"""Small training steps, each of a class that a loop over micro-batches can get wrong without a word.

The losses need a total over the batch that depends on the model, and the steps take a gradient at values that another
gradient changed. Every step is `(state, batch) -> (new_state, results)`, with one layer on each side of a boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]
Loss = Callable[[Params, Batch], jax.Array]

BATCH, WIDTH, EXPERTS = 16, 8, 4


def make_state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    w1, w2 = (rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.4 for _ in range(2))
    router = rng.standard_normal((WIDTH, EXPERTS)).astype(np.float32)
    v = rng.standard_normal(WIDTH).astype(np.float32)
    # The second group of parameters is that of a discriminator.
    d = rng.standard_normal(WIDTH).astype(np.float32)
    return {"params": {"w1": w1, "w2": w2, "router": router, "v": v}, "other": {"d": d}}


def make_batch() -> Batch:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((BATCH, WIDTH)).astype(np.float32)
    # Parts of the batch differ from each other, so that a part's own total is far from the whole one's.
    x *= np.linspace(0.3, 1.7, BATCH, dtype=np.float32)[:, None]
    y = np.linspace(-1, 2, BATCH, dtype=np.float32) + 0.3 * rng.standard_normal(BATCH).astype(np.float32)
    mask = (np.arange(BATCH) % 5 > 1).astype(np.float32)
    return {"x": x, "y": y, "mask": mask}


# ---- the model ------------------------------------------------------------------------------------------------------


def _features(p: Params, b: Batch) -> jax.Array:
    hidden = jnp.tanh(b["x"] @ p["w1"])
    minialpa.mark_pipeline_boundary()
    return jnp.tanh(hidden @ p["w2"])


def _scores(p: Params, b: Batch) -> jax.Array:
    return _features(p, b) @ p["v"]


def _errors(p: Params, b: Batch) -> jax.Array:
    return (_scores(p, b) - b["y"]) ** 2


# ---- losses ---------------------------------------------------------------------------------------------------------


def _mean_of_the_positive(p: Params, b: Batch) -> jax.Array:
    y = _scores(p, b)
    return jnp.sum(jnp.where(y > 0, y, 0)) / jnp.sum((y > 0).astype(jnp.float32))


def _over_a_detached_total(p: Params, b: Batch) -> jax.Array:
    y = _scores(p, b)
    return jnp.sum(y**2) / jax.lax.stop_gradient(jnp.sum(jnp.abs(y)))


def _balance(p: Params, b: Batch) -> jax.Array:
    gates = jax.nn.softmax(_features(p, b) @ p["router"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    return EXPERTS * jnp.sum(jnp.mean(chosen, 0) * jnp.mean(gates, 0)) + jnp.mean(_errors(p, b))


def _nanmean(p: Params, b: Batch) -> jax.Array:
    y = _scores(p, b)
    return jnp.nanmean(jnp.where(y > 0, y**2, jnp.nan))


def _normalised_weights(p: Params, b: Batch) -> jax.Array:
    return jnp.sum(jax.nn.softmax(_scores(p, b)) * _errors(p, b))


def _detached_weights(p: Params, b: Batch) -> jax.Array:
    errors = _errors(p, b)
    weights = jax.lax.stop_gradient(errors / jnp.sum(errors))
    return jnp.sum(weights * errors)


def _advantages(p: Params, b: Batch) -> jax.Array:
    y = _scores(p, b)
    reward = jax.lax.stop_gradient(b["y"] - y)
    return -jnp.mean((reward - jnp.mean(reward)) / (jnp.std(reward) + 1e-3) * y)


def _contrastive(p: Params, b: Batch) -> jax.Array:
    z = _features(p, b)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T)))


def _entropy_of_the_mean(p: Params, b: Batch) -> jax.Array:
    mean = jnp.mean(jax.nn.softmax(_features(p, b) @ p["router"]), 0)
    return jnp.sum(mean * jnp.log(mean)) + jnp.mean(_errors(p, b))


def _chosen_by_the_mean(p: Params, b: Batch) -> jax.Array:
    mean = jnp.mean(_errors(p, b))
    return jnp.where(mean > 1, 2 * mean - 1, mean**2)


def _correlation(p: Params, b: Batch) -> jax.Array:
    y, t = _scores(p, b), b["y"]
    y, t = y - jnp.mean(y), t - jnp.mean(t)
    return -jnp.sum(y * t) / jnp.sqrt(jnp.sum(y**2) * jnp.sum(t**2))


LOSSES: dict[str, Loss] = {
    "mean": lambda p, b: jnp.mean(_errors(p, b)),
    "sum": lambda p, b: jnp.sum(_errors(p, b)),
    "mean under a mask of the batch": lambda p, b: jnp.sum(_errors(p, b) * b["mask"]) / jnp.sum(b["mask"]),
    "masked mean, computed again": jax.checkpoint(lambda p, b: jnp.sum(_errors(p, b) * b["mask"]) / jnp.sum(b["mask"])),
    "mean of the positive": _mean_of_the_positive,
    "sum over a detached total": _over_a_detached_total,
    "ratio of sums": lambda p, b: jnp.sum(_errors(p, b)) / jnp.sum(_scores(p, b) ** 2),
    "logsumexp over the batch": lambda p, b: jax.nn.logsumexp(_scores(p, b)),
    "balance loss of a router": _balance,
    "nanmean": _nanmean,
    "normalised weights of the model": _normalised_weights,
    "normalised detached weights": _detached_weights,
    "normalised advantages": _advantages,
    "mean squared": lambda p, b: jnp.mean(_errors(p, b)) ** 2,
    "mean times mean": lambda p, b: jnp.mean(_errors(p, b)) * jnp.mean(jnp.abs(_features(p, b))),
    "var": lambda p, b: jnp.var(_scores(p, b)),
    "log of the mean": lambda p, b: jnp.log(jnp.mean(_errors(p, b))),
    "root of the mean": lambda p, b: jnp.sqrt(jnp.mean(_errors(p, b))),
    "max": lambda p, b: jnp.max(_errors(p, b)),
    "softplus of the deviation": lambda p, b: jnp.mean(jax.nn.softplus(_scores(p, b) - jnp.mean(_scores(p, b)))),
    "median": lambda p, b: jnp.median(_errors(p, b)),
    "contrastive": _contrastive,
    "entropy of the mean": _entropy_of_the_mean,
    "chosen by the mean": _chosen_by_the_mean,
    "correlation": _correlation,
}


# ---- steps ----------------------------------------------------------------------------------------------------------

Step = Callable[[Any, Batch], Any]


def _moved(params: Any, grads: Any, rate: float = 0.1) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def _training(loss: Loss) -> Step:
    def step(state: Any, batch: Batch) -> Any:
        value, grads = minialpa.value_and_grad(loss)(state["params"], batch)
        return {**state, "params": _moved(state["params"], grads)}, value

    return step


def _sharpness_aware(state: Any, batch: Batch) -> Any:
    loss, params = LOSSES["mean"], state["params"]
    value, grads = minialpa.value_and_grad(loss)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    there = jax.tree.map(lambda p, g: p + 0.5 * g / norm, params, grads)
    return {**state, "params": _moved(params, minialpa.grad(loss)(there, batch))}, value


def _extragradient(state: Any, batch: Batch) -> Any:
    loss, params = LOSSES["mean"], state["params"]
    there = _moved(params, minialpa.grad(loss)(params, batch), 0.5)
    value, grads = minialpa.value_and_grad(loss)(there, batch)
    return {**state, "params": _moved(params, grads)}, value


def _two_updates(state: Any, batch: Batch) -> Any:
    params = state["params"]
    first, grads = minialpa.value_and_grad(LOSSES["mean"])(params, batch)
    params = _moved(params, grads, 0.3)
    second, grads = minialpa.value_and_grad(lambda p, b: jnp.mean(jnp.abs(_scores(p, b))))(params, batch)
    return {**state, "params": _moved(params, grads)}, (first, second)


def _adversarial(state: Any, batch: Batch) -> Any:
    def judged(p: Params, d: Params) -> tuple[jax.Array, jax.Array]:
        return _features(p, batch) @ d["d"], batch["x"] @ d["d"]

    def of_judge(d: Params) -> jax.Array:
        fake, real = judged(state["params"], d)
        return jnp.mean(jax.nn.softplus(fake)) + jnp.mean(jax.nn.softplus(-real))

    other = _moved(state["other"], minialpa.grad(of_judge)(state["other"]), 0.5)
    of_maker = lambda p: jnp.mean(jax.nn.softplus(-judged(p, other)[0]))  # noqa: E731
    value, grads = minialpa.value_and_grad(of_maker)(state["params"])
    return {"params": _moved(state["params"], grads), "other": other}, value


def _curvature(state: Any, batch: Batch) -> Any:
    params = state["params"]
    grad = jax.grad(lambda p: LOSSES["mean"](p, batch))
    grads, along = jax.jvp(grad, (params,), (grad(params),))
    return {**state, "params": _moved(params, jax.tree.map(lambda g, h: g + 0.1 * h, grads, along))}, None


def _penalty_on_the_gradient(state: Any, batch: Batch) -> Any:
    def loss(p: Params) -> jax.Array:
        value, grads = jax.value_and_grad(LOSSES["mean"])(p, batch)
        return value + 0.1 * sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

    return {**state, "params": _moved(state["params"], jax.grad(loss)(state["params"]))}, None


def _weights_of_the_whole_batch(state: Any, batch: Batch) -> Any:
    weights = jax.nn.softmax(_errors(state["params"], batch))
    loss = lambda p, b: jnp.sum(weights * _errors(p, b))  # noqa: E731
    value, grads = minialpa.value_and_grad(loss)(state["params"], batch)
    return {**state, "params": _moved(state["params"], grads)}, value


def _loss_after_the_update(state: Any, batch: Batch) -> Any:
    before, grads = minialpa.value_and_grad(LOSSES["mean"])(state["params"], batch)
    params = _moved(state["params"], grads, 0.5)
    return {**state, "params": params}, (before, LOSSES["mean"](params, batch), _scores(params, batch))


def _clipped_by_norm(state: Any, batch: Batch) -> Any:
    value, grads = minialpa.value_and_grad(LOSSES["mean"])(state["params"], batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, 0.5 / norm), grads)
    return {**state, "params": _moved(state["params"], grads)}, (value, norm)


def _penalty_on_the_input_gradient(state: Any, batch: Batch) -> Any:
    def loss(p: Params, b: Batch) -> jax.Array:
        slopes = jax.vmap(jax.grad(lambda x: _scores(p, {"x": x[None]})[0]))(b["x"])
        return jnp.mean(_errors(p, b)) + jnp.mean((jnp.sqrt(jnp.sum(slopes**2, -1)) - 1) ** 2)

    value, grads = minialpa.value_and_grad(loss)(state["params"], batch)
    return {**state, "params": _moved(state["params"], grads)}, value


STEPS: dict[str, Step] = {
    **{name: _training(loss) for name, loss in LOSSES.items()},
    "clipping by the norm": _clipped_by_norm,
    "penalty on the gradient of the input": _penalty_on_the_input_gradient,
    "sharpness-aware": _sharpness_aware,
    "extragradient": _extragradient,
    "two updates in a row": _two_updates,
    "adversarial": _adversarial,
    "curvature along the gradient": _curvature,
    "penalty on the gradient": _penalty_on_the_gradient,
    "weights of the whole batch": _weights_of_the_whole_batch,
    "loss after the update": _loss_after_the_update,
}
