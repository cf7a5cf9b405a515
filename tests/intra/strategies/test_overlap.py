"""The values of a program whose collectives its work can hide."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import minialpa
from minialpa import ClusterSpec, Zero3Parallel, models
from minialpa.intra.strategies.overlap import hidden_values
from minialpa.tracing.flattening import trace_flat


def test_weights_come_ahead_and_gradients_behind() -> None:
    def step(w: jax.Array, v: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = x @ w
        out = h @ (v * 2.0)
        gradient = x.T @ h
        return (out @ v) @ v, gradient + 1.0

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4), (4, 4), (8, 4))]
    flat, _ = trace_flat(step, *shapes)
    w, v, x = flat.invars
    out, result = flat.outvars
    hidden = hidden_values(flat.eqns, flat.invars, live_on_entry=(w, v), required_outputs=(out,))

    made = {eqn.primitive.name: eqn.outvars[0] for eqn in flat.eqns}
    products = [eqn.outvars[0] for eqn in flat.eqns if eqn.primitive.name == "dot_general"]
    assert made["mul"] in hidden  # there before the products
    assert {result, products[2]} <= hidden  # the gradient has no readers
    assert not {x, w, products[0], out} & hidden  # before `w` there is no work


def test_the_first_and_the_last_product_have_no_work_beside_them_but_in_loops() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ (w + 1.0)) * 2.0

    flat, _ = trace_flat(step, *[jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 2)
    w, _ = flat.invars
    assert not hidden_values(flat.eqns, flat.invars, live_on_entry=(w,), required_outputs=())
    assert {w, *flat.outvars} <= hidden_values(
        flat.eqns, flat.invars, live_on_entry=(w,), required_outputs=(), in_loop=True
    )


def test_gpus_hide_what_cpus_wait_for() -> None:
    """Gathers of weights and sums of gradients, as far as there is work; the same program on CPUs waits for all."""
    cluster = ClusterSpec.preset("h100", devices_per_host=4)
    case = models.build("mlp", batch_size=512, hidden=512)
    arguments = case.init(jax.random.key(0)), case.make_batch(0, 512)

    def cost(name: str) -> tuple[float, float]:
        device = dataclasses.replace(cluster.device, name=name)
        devices = dataclasses.replace(cluster, device=device)
        step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=Zero3Parallel(devices))
        (stage,) = step.plan(*arguments).stages
        return sum(p.hidden_s for p in stage.passes), sum(p.communication_s for p in stage.passes)

    hidden_s, exposed_s = cost("h100")
    none_s, all_s = cost("cpu")
    assert none_s == 0 < hidden_s
    assert exposed_s < all_s
