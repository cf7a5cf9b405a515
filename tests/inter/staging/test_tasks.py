"""Placement of a step on meshes: the task of each equation, and the meshes of each value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minialpa.inter.layers.forward import assign_layers
from minialpa.inter.staging.staged_step import stage_step
from minialpa.inter.staging.tasks import StagedStep
from minialpa.options import AutoLayerOption, ManualLayerOption
from minialpa.tracing.gradients import mark_pipeline_boundary, value_and_grad
from minialpa.tracing.trace import TracedStep
from tests.helpers import trace

N_LAYERS, WIDTH, BATCH = 3, 4, 8


def update(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def chain_step(params: Any, batch: jax.Array) -> Any:
    """Three layers with a boundary after each of the first two; the head reuses the first layer's weight."""

    def loss_fn(params: Any) -> jax.Array:
        x = batch
        skip = None
        for i in range(N_LAYERS):
            x = jnp.tanh(x @ params[i])
            skip = x if i == 0 else skip
            if i < N_LAYERS - 1:
                mark_pipeline_boundary()
        return jnp.mean((x @ params[0].T + skip) ** 2)

    loss, grads = value_and_grad(loss_fn)(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
    return update(params, [g / jnp.maximum(norm, 1.0) for g in grads]), loss


def traced_chain() -> TracedStep:
    params = [np.full((WIDTH, WIDTH), 0.1 * (i + 1), np.float32) for i in range(N_LAYERS)]
    return trace(chain_step, params, np.ones((BATCH, WIDTH), np.float32))


def staged_chain(n_micro_batches: int) -> StagedStep:
    traced = traced_chain()
    return stage_step(traced, n_micro_batches, assign_layers(traced, ManualLayerOption()), range(N_LAYERS))


def test_boundaries_cut_forward_and_backward_alike() -> None:
    staged = staged_chain(4)
    kinds = [(task.kind, task.mesh) for task in staged.tasks if task.per_micro_batch]
    assert kinds == [
        (kind, mesh) for kind, order in (("forward", (0, 1, 2)), ("backward", (2, 1, 0))) for mesh in order
    ]
    products = {task.name: sum(e.primitive.name == "dot_general" for e in task.eqns) for task in staged.tasks}
    # Forward: one product a layer, and the head's. Backward: two for each, but the input of the first has no gradient.
    assert products["forward0"] == 1 and products["forward1"] == 1 and products["forward2"] == 2
    assert products["backward2"] == 4 and products["backward1"] == 2 and products["backward0"] == 1


def test_values_live_on_the_meshes_that_read_them() -> None:
    """A tied weight has two meshes, of which the first updates it; a skip connection comes from its own mesh."""
    staged = staged_chain(2)
    assert staged.input_meshes[:N_LAYERS] == ((0, 2), (1,), (2,))
    assert staged.output_meshes[0] == (0,)
    # The two gradients are accumulated where they arise and added after the loop.
    shapes = [a.loop.aval.shape for a in staged.split.accumulators if a.loop.aval.shape]
    assert shapes.count((WIDTH, WIDTH)) == N_LAYERS + 1

    forward = {task.mesh: task for task in staged.tasks if task.kind == "forward"}
    assert set(forward[0].outvars) & set(forward[2].invars)


def test_a_norm_over_meshes_is_computed_once_and_sent_back() -> None:
    staged = staged_chain(2)
    updates = [task for task in staged.tasks if task.kind == "update"]
    roots = [task for task in updates for e in task.eqns if e.primitive.name == "sqrt"]
    assert len(roots) == 1
    assert all(any(t.mesh == mesh for t in updates) for mesh in range(N_LAYERS))


def test_plain_jax_grad_is_cut_by_residuals() -> None:
    """Without tags, the backward equations follow the residuals of the forward pass."""

    def step(params: Any, batch: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            x = batch
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        return update(params, jax.grad(loss_fn)(params))

    params = [np.full((WIDTH, WIDTH), 0.1, np.float32) for _ in range(N_LAYERS)]
    traced = trace(step, params, np.ones((BATCH, WIDTH), np.float32))
    staged = stage_step(traced, 2, assign_layers(traced, AutoLayerOption(layer_num=N_LAYERS)), range(N_LAYERS))
    products = [sum(e.primitive.name == "dot_general" for e in t.eqns) for t in staged.tasks if t.kind == "backward"]
    assert products == [2, 2, 1]
