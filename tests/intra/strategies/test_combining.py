"""Sums that start together, by their dependencies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import minialpa
from minialpa.inter.staging.mesh_problem import mesh_equations
from minialpa.inter.staging.staged_step import stage_step
from minialpa.intra.strategies.combining import ALONE, WITH_GRADIENTS, Sharing, sum_groups
from minialpa.ir.equations import is_gradient_marker, operand_vars, shape_of
from tests.helpers import trace

#: The sums have different shapes.
N_EXAMPLES, WIDTH, N_METRICS = 8, 4, 3


def step(params: Any, batch: Any) -> Any:
    def loss_fn(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = batch @ w
        normal = h / (1 + jnp.sum(h * h, axis=0))[None]  # gradients wait for this sum
        return jnp.mean(normal**2), jnp.sum(jnp.abs(h[:, :N_METRICS]), axis=0)

    (loss, metrics), grads = minialpa.value_and_grad(loss_fn, has_aux=True)(params)
    norm = jnp.sum(grads * grads)  # this one waits for the gradient
    return params - 0.1 * grads / (1 + norm), loss, metrics


def test_what_no_gradient_waits_for_starts_with_the_gradients() -> None:
    traced = trace(
        step,
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((N_EXAMPLES, WIDTH), jnp.float32),
    )
    eqns = mesh_equations(stage_step(traced, 1, (), (0,)), 0).eqns
    groups, together = sum_groups(eqns)

    (gradient,) = (var for eqn in eqns if is_gradient_marker(eqn) for var in operand_vars(eqn))
    assert groups.get(gradient) == WITH_GRADIENTS
    sums = [eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "reduce_sum"]
    by_shape = {shape: [groups.get(var) for var in sums if shape_of(var) == shape] for shape in map(shape_of, sums)}

    # The metrics, and the loss but not the norm of the gradient; not the sum over examples that gradients read.
    assert set(by_shape[N_METRICS,]) == {WITH_GRADIENTS}
    assert WITH_GRADIENTS not in by_shape[WIDTH,]
    assert by_shape[()].count(WITH_GRADIENTS) == 1 and len(by_shape[()]) == 2
    assert together[gradient] == 3


def test_a_start_that_nobody_counted_is_paid_in_full() -> None:
    sharing = Sharing(("all-reduce",), 9, (("all-reduce", (0, 1), 5),))
    assert sharing.of("all-reduce", (0, 1)) == 5
    assert sharing.of("all-reduce", (0,)) == 1
    assert sharing.of("reduce-scatter", (0, 1)) == 1
    assert Sharing(("all-reduce",), 9).of("all-reduce", (0,)) == 9
    assert ALONE.of("all-reduce", (0, 1)) == 1
