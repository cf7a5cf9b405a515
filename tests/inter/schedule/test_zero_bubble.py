"""Backward passes split in two: gradients that other stages wait for, and gradients of weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa import AutoLayerOption, ClusterSpec, PipeshardParallel, UniformStageOption
from minialpa.errors import VerifyError
from minialpa.inter.schedule.simulate import simulate
from minialpa.inter.staging.staged_step import realise
from minialpa.options import Remat
from minialpa.plan import Plan
from minialpa.rules.expensive import has_contraction
from tests.helpers import trace

N_STAGES, WIDTH = 4, 1024


def loss_fn(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = x + jnp.tanh(x @ layer["up"] + layer["bias"][None]) @ layer["down"]
    return jnp.mean(x**2)


def step(layers: Any, x: Any) -> Any:
    loss, gradients = minialpa.value_and_grad(loss_fn)(layers, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, layers, gradients), loss


def arguments() -> Any:
    shapes = {"up": (WIDTH, 4 * WIDTH), "bias": (4 * WIDTH,), "down": (4 * WIDTH, WIDTH)}
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return [layer] * N_STAGES, jax.ShapeDtypeStruct((8 * 1024, WIDTH), jnp.float32)


def planned(schedule: str, remat: Remat = "none", n_chunks: int = 1) -> Plan:
    n_stages = N_STAGES // n_chunks
    method = PipeshardParallel(
        num_micro_batches=8,
        pipeline_schedule=schedule,
        layer_option=AutoLayerOption(layer_num=N_STAGES, remat=remat),
        stage_option=UniformStageOption(num_stages=n_stages, num_chunks=n_chunks),
    )
    return minialpa.plan(
        step, arguments(), cluster=ClusterSpec.preset("h100", devices_per_host=n_stages), method=method
    )


@pytest.mark.parametrize("remat", ["none", "full"])
def test_both_parts_share_what_they_compute_and_leave_nothing_out(remat: Remat) -> None:
    whole, split = planned("1f1b", remat), planned("zb-h1", remat)
    traced = trace(step, *arguments())
    one, other = (realise(traced, plan).staged for plan in (whole, split))
    n_products = [
        {
            chunk: sum(
                has_contraction(eqn)
                for task in staged.tasks
                if task.kind in ("backward", "weights") and task.chunk == chunk
                for eqn in task.eqns
            )
            for chunk in range(N_STAGES)
        }
        for staged in (one, other)
    ]
    assert n_products[0] == n_products[1]

    tasks = {(task.kind, task.chunk): task for task in other.tasks}
    for chunk in range(1, N_STAGES):
        first, weights = tasks["backward", chunk], tasks["weights", chunk]
        made = [v for eqn in weights.eqns for v in eqn.outvars]
        assert not set(made) & {v for eqn in first.eqns for v in eqn.outvars}
        # No other stage reads what the second part makes.
        assert not any(set(task.invars) & set(weights.outvars) for task in other.tasks if task.per_micro_batch)
    # No stage waits for the gradients of the first chunk, which stay in one pass.
    assert ("weights", 0) not in tasks


def test_stages_wait_less_and_keep_as_many_micro_batches_as_there_are_stages() -> None:
    whole, split = planned("1f1b"), planned("zb-h1")
    before, after = simulate(whole), simulate(split)
    assert split.cost.total_s == after.total_s < 0.9 * before.total_s
    assert sum(after.bubble) < 0.6 * sum(before.bubble)
    assert [stage.peak_live for stage in after.stages] == [N_STAGES] * N_STAGES
    assert [stage.peak_live for stage in before.stages] == [4, 3, 2, 1]
    for stage, timeline in zip(split.stages, after.stages, strict=True):
        assert timeline.peak_bytes == pytest.approx(stage.peak_bytes, rel=0.02)


def test_a_plan_has_the_order_for_its_seconds_and_memory() -> None:
    named, made = planned("zb-v", n_chunks=2), planned("zb", n_chunks=2)
    assert [stage.layers for stage in named.stages] == [stage.layers for stage in made.stages] == [(0, 3), (1, 2)]
    assert made.orders and made.cost.total_s < 0.97 * named.cost.total_s
    for plan in (named, made):
        timeline = simulate(plan)
        assert plan.cost.total_s == pytest.approx(timeline.total_s)
        assert [stage.peak_bytes for stage in timeline.stages] == pytest.approx(list(plan.cost.peak_bytes), rel=0.02)
    assert "forward  █ backward  ▓ weights" in made.summary()

    # The file of a plan has the order, which is checked against the step.
    assert Plan.from_json(made.to_json()) == made
    wrong = dataclasses.replace(made, orders=(made.orders[0], made.orders[1].replace("w0.1 ", "")))
    with pytest.raises(VerifyError, match=r"orders.*The order of stage 1 needs the passes f0\.1 to f7\.1"):
        realise(trace(step, *arguments()), wrong)
