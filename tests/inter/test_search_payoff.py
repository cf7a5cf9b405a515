"""Whether a search of stages pays: a law of steps and seconds, and the plan of a step without a search."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from benchmarks.planning import planned, traced_step
from minialpa import (
    AutoLayerOption,
    AutoParallel,
    AutoStageOption,
    ClusterSpec,
    PipeshardParallel,
    Plan,
    ShardParallel,
)
from minialpa.inter import search_payoff
from minialpa.inter.context import PlanningContext, compiler_of
from minialpa.inter.search.stage_solve import StageSolver
from minialpa.methods import Method
from minialpa.tracing.trace import TracedStep

CLUSTER = ClusterSpec.preset("cpu", num_hosts=1, devices_per_host=4)
ALWAYS = AutoStageOption(planned_steps=math.inf)


def mlp(width: int, n_layers: int = 4) -> TracedStep:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        value, grads = minialpa.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shapes = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * n_layers
    return traced_step(step, shapes, jax.ShapeDtypeStruct((4 * width, width), jnp.float32))


def asked(traced: TracedStep, method: AutoParallel | PipeshardParallel, cluster: ClusterSpec = CLUSTER) -> bool:
    options = method.options()
    assert isinstance(options.stages, AutoStageOption) and options.layers is not None
    context = PlanningContext(
        traced=traced,
        cluster=cluster,
        solver=StageSolver(compiler_of(cluster)),
        options=options,
        logical_mesh=None,
        report=lambda what, done, total: None,
    )
    return search_payoff.search_pays(context, options.layers, options.stages)


def on(steps: float, **options: Any) -> AutoParallel:
    return AutoParallel(stage_option=AutoStageOption(planned_steps=steps, **options))


def pipeline(stages: AutoStageOption, n: int = 4) -> Method:
    layers = AutoLayerOption(layer_num=4)
    return PipeshardParallel(num_micro_batches=n, layer_option=layers, stage_option=stages)


def searched(plan: Plan) -> bool:
    return plan.certificate is not None


@pytest.mark.parametrize("width", [16, 512])
def test_a_search_pays_from_so_many_steps_on_as_take_as_long(width: int) -> None:
    """The oracle: seconds of the matrix products by hand, which are nearly all of a wide step."""
    traced = mlp(width)
    n = len(traced.flat.eqns)
    flops_s = 2 * 4 * width**3 * 3 * 4 / 5e10  # two backward products for each forward one but the first
    turn = search_payoff.SEARCH_S_PER_EQUATION * n / flops_s
    assert asked(traced, on(4 * turn))
    assert not asked(traced, on(turn / 20))
    assert asked(traced, on(math.inf)) and not asked(traced, on(0))


def test_a_short_step_is_planned_as_one_stage_and_a_long_one_is_searched_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short, long = mlp(16), mlp(4096)
    plan = planned(short, CLUSTER, AutoParallel())
    assert not searched(plan) and len(plan.stages) == 1
    monkeypatch.setattr(search_payoff, "plan_without_search", lambda *_: pytest.fail("planned without a search"))
    assert searched(planned(short, CLUSTER, AutoParallel(stage_option=ALWAYS)))
    assert searched(planned(long, CLUSTER, AutoParallel()))


def test_a_plan_without_a_search_is_the_better_one_of_its_two_choices() -> None:
    """One device for steps too small to split, all devices for others; no devices idle if that is not allowed."""
    small, wide = mlp(16), mlp(512)
    never = AutoStageOption(planned_steps=0)
    one, all_ = (planned(traced, CLUSTER, AutoParallel(stage_option=never)) for traced in (small, wide))
    assert (one.stages[0].n_devices, all_.stages[0].n_devices) == (1, 4)
    assert planned(small, CLUSTER, pipeline(never)).stages[0].n_devices == 4
    best = planned(wide, CLUSTER, AutoParallel(stage_option=ALWAYS))
    assert best.cost.total_s <= all_.cost.total_s <= 1.2 * best.cost.total_s


def test_what_only_a_search_gives_is_searched(tmp_path: Any) -> None:
    traced = mlp(16)
    recomputed = AutoParallel(
        layer_option=AutoLayerOption(layer_num=2, remat="full"), stage_option=AutoStageOption(planned_steps=0)
    )
    assert asked(traced, recomputed)
    assert asked(traced, on(0, cached_costs=str(tmp_path / "costs.json")))
    mixed = ClusterSpec.preset("cpu", num_hosts=2, devices_per_host=2)
    other = dataclasses.replace(mixed.device, name="other")
    assert asked(traced, on(0), dataclasses.replace(mixed, host_devices=(mixed.device, other)))
    assert not asked(traced, on(0), mixed)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_what_is_planned_well_enough_without_a_search_is_not_searched(factor: float) -> None:
    """The oracle: the distance of the plan without a search from perfectly shared work."""
    traced = mlp(64)
    plan = planned(traced, CLUSTER, on(0))
    flops_s = 2 * 4 * 64**3 * 3 * 4 / 5e10
    saved_s = plan.cost.total_s - flops_s / CLUSTER.n_devices
    turn = search_payoff.SEARCH_S_PER_EQUATION * len(traced.flat.eqns) / saved_s
    assert asked(traced, on(factor * turn))
    found = planned(traced, CLUSTER, on(factor * turn))
    assert searched(found) == (factor > 1) and (searched(found) or found == plan)

    reason = found.search_not_made
    assert (reason is None) == searched(found)
    if reason is not None:
        assert 0 < reason.saved_s <= saved_s and reason.n_steps == pytest.approx(factor * turn)
        assert reason.saved_s * reason.n_steps <= reason.search_s
        assert "No search of stages, which would take" in found.summary()
        assert Plan.from_json(found.to_json()).search_not_made == reason


@pytest.mark.parametrize("preset", ["h100", "v100-p3.16xlarge"])
def test_equal_stages_without_a_search_repay_their_programs(preset: str) -> None:
    """Small products on GPUs: most of the time of one stage is the latency of its collectives."""
    traced, n_steps = mlp(32, 8), 10_000
    cluster = ClusterSpec.preset(preset, num_hosts=2, devices_per_host=4)
    layers, stages = AutoLayerOption(remat="auto"), AutoStageOption(planned_steps=n_steps)
    found = planned(traced, cluster, PipeshardParallel(num_micro_batches=4, layer_option=layers, stage_option=stages))

    expected_s = single_s = planned(traced, cluster, ShardParallel(num_micro_batches=4)).cost.total_s
    compile_s = search_payoff._COMPILE_S_PER_EQUATION * search_payoff.n_equations(traced.flat.eqns)
    for p in (2, 4, 8):
        equal = PipeshardParallel(
            num_micro_batches=4, layer_option=AutoLayerOption(layer_num=p), stage_option="uniform"
        )
        equal_s = planned(traced, cluster, equal).cost.total_s
        expected_s = equal_s if (expected_s - equal_s) * n_steps > compile_s else expected_s
    assert not searched(found) and found.cost.total_s == expected_s < single_s


@pytest.mark.parametrize("n_devices", [1, 4])
def test_a_step_without_gradients_is_planned_on_any_number_of_devices(n_devices: int) -> None:
    """On one device, two attempts at a plan stage the same step, each with new equations."""
    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    cluster = ClusterSpec.preset("cpu", devices_per_host=n_devices)
    plan = minialpa.plan(lambda w, x: jnp.mean(jnp.tanh(x @ w)), shapes, cluster=cluster)
    assert len(plan.stages) == 1 and plan.cost.total_s > 0
