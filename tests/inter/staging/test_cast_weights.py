"""Weights are cast once per step where that pays; the step computes the same, to the bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from benchmarks.corpus import arguments
from benchmarks.planning import traced_step
from minialpa import AutoLayerOption, ClusterSpec, Plan, Zero3Parallel, models
from minialpa.inter import pipeline
from minialpa.inter.layers.forward import assign_layers
from minialpa.inter.layers.remat import rematerialise
from minialpa.inter.microbatch.batching import is_barrier
from minialpa.inter.microbatch.rewrite import split_micro_batches
from minialpa.inter.microbatch.split_step import PROLOGUE
from minialpa.inter.staging.cast_weights import with_weights_cast_once
from minialpa.inter.staging.replan import options_of

GPUS = ClusterSpec.preset("h100", devices_per_host=2)
ZERO = Zero3Parallel(GPUS, num_micro_batches=2)
SIZES = {"hidden": 32, "n_heads": 2, "n_layers": 1, "seq_len": 8, "vocab_size": 64}


def _force(monkeypatch: pytest.MonkeyPatch, cast_once: bool) -> None:
    """Force plans to cast once, or not, even if that is slower."""

    def way(context: pipeline.PlanningContext, best: Plan, **options: bool) -> Plan:
        asked = dataclasses.replace(options_of(best), cast_once=cast_once)
        return pipeline._planned(dataclasses.replace(context, options=asked))

    monkeypatch.setattr(pipeline, "_or_planned_with", way)


def _mixed_step(w: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Reads weights in all ways: narrow in a checkpointed scan in a scan, narrow and wide, twice, and as a result."""

    def loss(w: dict[str, jax.Array]) -> jax.Array:
        def outer(carry: tuple[jax.Array, jax.Array], layer: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            def inner(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(x @ row.astype(jnp.bfloat16) + w["bias"].astype(jnp.bfloat16)), None

            x, passed_on = carry
            return (jax.lax.scan(jax.checkpoint(inner), x, layer)[0], passed_on), None

        first = batch.astype(jnp.bfloat16) @ w["both"].astype(jnp.bfloat16)
        (x, scale), _ = jax.lax.scan(outer, (first, jnp.float32(0.5)), w["layers"])
        x = x @ w["both"].astype(jnp.bfloat16)
        return jnp.mean((scale * x.astype(jnp.float32) @ w["both"]) ** 2)

    value, gradients = minialpa.value_and_grad(loss)(w)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients)
    return new, value, w["both"].astype(jnp.bfloat16)


def test_weights_that_a_step_reads_in_several_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    w = {
        "both": jax.random.normal(keys[0], (16, 16)) / 4,
        "layers": jax.random.normal(keys[1], (2, 3, 16, 16)) / 4,
        "bias": jnp.ones((1, 16)) / 8,
    }
    batch = jax.random.normal(keys[2], (8, 16))

    def planned(cast_once: bool) -> tuple[list[str], Any]:
        """The names of the functions with a prologue, and the results."""
        _force(monkeypatch, cast_once)
        step = minialpa.parallelize(_mixed_step, method=ZERO, batch_argnums=(1,), donate_argnums=())
        assert step.plan(w, batch).casts_once == cast_once
        results = step(w, batch)
        names = [f.name for f in step.get_last_executable().program.functions]
        return [name for name in names if name.startswith("prologue")], results

    no_prologues, expected = planned(False)
    prologues, results = planned(True)
    assert prologues and not no_prologues
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_products_read_narrow_weights_in_front_of_barriers() -> None:
    """Scales, biases and positions are combined element by element with recomputed values, and must wait."""
    case = models.build("gpt", batch_size=8, dtype=jnp.bfloat16, **SIZES)
    traced = traced_step(case.train_step(minialpa.value_and_grad), *arguments(case))
    again = rematerialise(traced, assign_layers(traced, AutoLayerOption(layer_num=1)), ("full",))
    split = with_weights_cast_once(split_micro_batches(again, 2))
    casts = {op.eqn.outvars[0] for op in split.ops if op.segment == PROLOGUE}
    behind = [v for op in split.ops if is_barrier(op.eqn) for v in op.eqn.invars if v in casts]
    smallest_matrix = SIZES["hidden"] ** 2
    assert behind and all(v.aval.size < smallest_matrix for v in behind)


def test_weights_are_gathered_once_where_links_are_slow() -> None:
    """Four hosts of one GPU each: ZeRO-3 would gather each weight for each micro-batch over the network."""
    hosts = ClusterSpec.preset("h100", num_hosts=4, devices_per_host=1)
    case = models.build("mlp", batch_size=64, n_layers=1, dtype=jnp.bfloat16)
    step = minialpa.parallelize(
        case.train_step(minialpa.value_and_grad), method=Zero3Parallel(hosts, num_micro_batches=8)
    )
    plan = step.plan(case.init(jax.random.key(0)), case.make_batch(0, case.batch_size))
    assert plan.casts_once
    gathers = [c for c in plan.collectives if c.kind == "all-gather"]
    assert gathers and all(c.times_per_step < 8 for c in gathers)
    assert "weights cast once" in plan.summary()


def test_weights_that_are_read_wide_are_cast_where_they_were() -> None:
    """A float32 step has no casts; its plan has no prologue."""
    case = models.build("mlp", batch_size=16, hidden=8, dtype=jnp.float32)
    step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=ZERO)
    plan = step.plan(case.init(jax.random.key(0)), case.make_batch(0, case.batch_size))
    assert not plan.casts_once
