"""Drawn steps for a mesh: regions, types with shardings, Refs, host memory and transforms, in any order.

Each step computes what it computes under `jax.jit`, or a minialpa error names what it cannot have.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import AutoLayerOption, MinialpaError, PipeshardParallel, ShardParallel, UniformStageOption, Zero3Parallel
from minialpa.testing import assert_allclose

#: Steps of a run; MINIALPA_DRAWN_STEPS=300 draws more.
N_STEPS = int(os.environ.get("MINIALPA_DRAWN_STEPS", "30"))
XY, N = ("x", "y"), 16
RING = [(i, (i + 1) % 4) for i in range(4)]
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

pytestmark = pytest.mark.usefixtures("fresh_session")

#: (rows of the hidden values on one device, weight) -> new rows.
REGIONS: dict[str, Callable[[Any, Any], Any]] = {
    "psum": lambda h, w: h + lax.psum(jnp.tanh(h @ w), "x") / 4,
    "pmean": lambda h, w: h - lax.pmean(jnp.tanh(h @ w), XY),
    "all_gather": lambda h, w: jnp.tanh(h @ w) + lax.all_gather(h, "y", tiled=True)[: h.shape[0]],
    "psum_scatter": lambda h, w: h + lax.psum_scatter(lax.all_gather(h @ w, "x", tiled=True), "x", tiled=True) / 4,
    "all_to_all": lambda h, w: lax.all_to_all(
        jnp.tanh(lax.all_to_all(h @ w, "y", 1, 0, tiled=True)), "y", 0, 1, tiled=True
    ),
    "ppermute": lambda h, w: h + lax.ppermute(jnp.tanh(h @ w), "x", RING),
    "ppermute along": lambda h, w: h + lax.ppermute(h @ w, "x", RING[:3]),
    "ppermute of both": lambda h, w: h + lax.ppermute(h @ w, XY, [(i, (5 * i + 1) % 8) for i in range(8)]),
    "axis_index": lambda h, w: h @ w * (1.0 + lax.axis_index(XY).astype(h.dtype) / 8),
    "pmax": lambda h, w: h @ w / (1.0 + lax.stop_gradient(lax.pmax(lax.stop_gradient(jnp.max(jnp.abs(h))), XY))),
    "loop": lambda h, w: lax.scan(lambda c, _: (jnp.tanh(lax.ppermute(c @ w, "x", RING)), None), h, None, length=2)[0],
    "branch": lambda h, w: lax.cond(lax.axis_index("y") > 0, lambda h: jnp.tanh(h @ w), lambda h: h @ w / 2, h),
}
SPECS = (P(XY), P("x"), P("x", "y"), P(None, "y"), P())
TRANSFORMS = ("plain", "remat", "jit", "scan", "cond")


@dataclass(frozen=True)
class Layer:
    """kind: a region, "product", or the number of a sharding. transform: around the layer."""

    kind: str
    transform: str
    checks: bool


@dataclass(frozen=True)
class Drawn:
    explicit: bool
    layers: tuple[Layer, ...]
    state: str
    method: str


steps = st.builds(
    Drawn,
    explicit=st.booleans(),
    layers=st.lists(
        st.builds(
            Layer,
            kind=st.sampled_from([*REGIONS, "product", *map(str, range(len(SPECS)))]),
            transform=st.sampled_from(TRANSFORMS),
            checks=st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    state=st.sampled_from(["plain", "ref", "captured ref", "host"]),
    method=st.sampled_from(["shard", "shard", "micro", "zero3", "stages"]),
)
METHODS = {
    "shard": ShardParallel(),
    "micro": ShardParallel(num_micro_batches=2),
    "zero3": Zero3Parallel(),
    "stages": PipeshardParallel(
        num_micro_batches=2,
        layer_option=AutoLayerOption(layer_num=2),
        stage_option=UniformStageOption(num_stages=2),
    ),
}


def applied(layer: Layer, mesh: Mesh, explicit: bool) -> Callable[[Any, Any], Any]:
    """(hidden, weight) -> hidden, in the sharding P(XY) on Explicit axes."""
    rows = P(XY, None)

    def inner(h: Any, w: Any) -> Any:
        if layer.kind in REGIONS:
            region = REGIONS[layer.kind]
            return jax.shard_map(region, mesh=mesh, in_specs=(rows, P()), out_specs=rows, check_vma=layer.checks)(h, w)
        h = jnp.tanh(h @ w)
        if layer.kind == "product":
            return h
        spec = SPECS[int(layer.kind)]
        if not explicit:
            return lax.with_sharding_constraint(h, NamedSharding(mesh, spec))
        return reshard(2 * reshard(h, spec), rows)

    match layer.transform:
        case "remat":
            return jax.checkpoint(inner)
        case "jit":
            return jax.jit(inner)
        case "scan":
            return lambda h, w: lax.scan(lambda c, _: (inner(c, w), None), h, None, length=2)[0]
        case "cond":
            return lambda h, w: lax.cond(jnp.sum(w) > 0, lambda h: inner(h, w), lambda h: h, h)
        case _:
            return inner


def step_of(drawn: Drawn, mesh: Mesh, log: Any) -> Callable[..., Any]:
    layers = [applied(layer, mesh, drawn.explicit) for layer in drawn.layers]

    def step(weights: Any, state: Any, x: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            h = x
            for layer, w in zip(layers, weights, strict=True):
                h = layer(h, w)
            return jnp.mean(h**2)

        loss, grads = minialpa.value_and_grad(loss_of)(weights)
        if drawn.state == "host":
            state = jax.tree.map(lambda m, g: 0.9 * m + g, jax.device_put(state, DEVICE), grads)
            weights = jax.tree.map(lambda w, m: w - 0.1 * m, weights, state)
            return weights, jax.device_put(state, HOST), loss
        if drawn.state != "plain":
            ref = state if drawn.state == "ref" else log
            ref[...] = 0.5 * ref[...] + loss
        new = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
        return new, None if drawn.state == "ref" else state, loss

    return step


def trained(drawn: Drawn, parallel: bool) -> Any:
    """Weights, state and loss after two steps."""
    kind = AxisType.Explicit if drawn.explicit else AxisType.Auto
    mesh = jax.make_mesh((4, 2), XY, axis_types=(kind,) * 2)
    with jax.set_mesh(mesh) if drawn.explicit else contextlib.nullcontext():
        keys = jax.random.split(jax.random.key(0), len(drawn.layers) + 1)
        everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(XY))
        weights = [jax.device_put(0.3 * jax.random.normal(key, (N, N)), everywhere) for key in keys[1:]]
        x, zero = jax.device_put(jax.random.normal(keys[0], (N, N)), rows), jax.device_put(jnp.zeros(()), everywhere)
        log, momentum = jax.new_ref(zero), jax.tree.map(jnp.zeros_like, weights)
        state = {"ref": jax.new_ref(zero), "host": jax.device_put(momentum, HOST)}.get(drawn.state, zero)

        step, method = step_of(drawn, mesh, log), METHODS[drawn.method]
        run = minialpa.parallelize(step, method=method, batch_argnums=(2,)) if parallel else jax.jit(step)
        for _ in range(2):
            weights, made, loss = run(weights, state, x)
            state = state if drawn.state == "ref" else made
        return weights, state[...] if drawn.state == "ref" else state, log[...], loss


@hypothesis.settings(max_examples=N_STEPS, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(steps)
def test_a_drawn_step_is_as_under_jit_or_refused_by_name(drawn: Drawn) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(drawn, parallel=False)
        try:
            actual = trained(drawn, parallel=True)
        except MinialpaError as error:
            hypothesis.event(f"refused: {type(error).__name__}")
            return
    hypothesis.event("equal")
    assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)
    kinds = [[leaf.sharding.memory_kind for leaf in jax.tree.leaves(made)] for made in (actual, expected)]
    assert kinds[0] == kinds[1]
