"""Plans of deep models are made from short steps: with the costs of the whole step, and for the whole step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import minialpa
from minialpa import (
    AutoLayerOption,
    ClusterSpec,
    PipeshardParallel,
    Plan,
    ShardParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
)
from minialpa.cost import Collective
from minialpa.inter import build_plan, pipeline
from minialpa.inter import whole_plan as whole_plans
from minialpa.inter.build_plan import Sketch
from minialpa.inter.context import PlanningContext, compiler_of
from minialpa.inter.pipeline import _best_plan, plan_step
from minialpa.inter.search.stage_solve import StageSolver
from minialpa.inter.short_plan import NotExpandedError
from minialpa.inter.staging.last_pass import _in_loops
from minialpa.inter.whole_plan import whole_plan
from minialpa.intra.memory.buffers import Buffer, Units, copies_of, timeline_of
from minialpa.intra.memory.compiler import Kernel
from minialpa.intra.spmd import Communication
from minialpa.ir.repeats import Repeated, UnitPass
from minialpa.methods import Method
from minialpa.tracing.trace import TracedStep
from tests.helpers import trace

V100 = ClusterSpec.preset("v100-p3.16xlarge", num_hosts=1, devices_per_host=4)
N_LAYERS, WIDTH, BATCH = 12, 256, 512


@pytest.fixture(autouse=True)
def small_steps_are_shortened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(build_plan, "_LEAST_SHORTENED", 0)
    yield


# ---- models ----------------------------------------------------------------------------------------------------------


def attention_like(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    h = x - jnp.mean(x, axis=-1, keepdims=True)
    h = jax.nn.softmax(h @ layer["scores"]) @ layer["values"]
    x = x + h
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"]


def weights(key: jax.Array) -> dict[str, Any]:
    shapes = {"scores": (WIDTH, WIDTH), "values": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(shapes))
        return {name: jax.random.normal(k, shape) / 32 for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    keys = jax.random.split(key, N_LAYERS + 1)
    return {"layers": [layer(k) for k in keys[:-1]], "head": jax.random.normal(keys[-1], (WIDTH, 8)) / 16}


def loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["x"]
    for layer in params["layers"]:
        x = attention_like(layer, x)
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def scanned_loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, layer: (attention_like(layer, x), None), batch["x"], params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def step_of(optimizer: optax.GradientTransformation, of_params: Any = loss) -> Any:
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        value, gradients = minialpa.value_and_grad(of_params)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


PLAIN = optax.sgd(1e-2, momentum=0.9)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), PLAIN)


def state_and_batch(optimizer: optax.GradientTransformation, *, stacked: bool = False) -> tuple[Any, Any]:
    params = weights(jax.random.key(0))
    if stacked:
        params["layers"] = jax.tree.map(lambda *rows: jnp.stack(rows), *params["layers"])
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    return (params, optimizer.init(params)), {"x": x, "y": jnp.tanh(x[:, :8])}


@pytest.fixture(scope="module")
def traced() -> TracedStep:
    return trace(step_of(CLIPPED), *state_and_batch(CLIPPED))


def context_of(step: TracedStep, method: Method) -> PlanningContext:
    return PlanningContext(
        traced=step,
        cluster=V100,
        solver=StageSolver(compiler_of(V100)),
        options=method.options(),
        logical_mesh=None,
        report=lambda what, done, total: None,
    )


# ---- costs of the whole step -----------------------------------------------------------------------------------------

METHODS = {
    "one batch": ShardParallel(num_micro_batches=1),
    "micro-batches": ShardParallel(num_micro_batches=8),
    "zero 2": Zero2Parallel(num_micro_batches=8),
    "zero 3, computed again": Zero3Parallel(num_micro_batches=4, remat="full"),
    "no pipeline": PipeshardParallel(
        num_micro_batches=4, layer_option=AutoLayerOption(layer_num=4), stage_option=UniformStageOption(num_stages=1)
    ),
    "products kept": ShardParallel(num_micro_batches=4, remat="dots"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_sketch_has_the_costs_of_the_whole_step(traced: TracedStep, name: str) -> None:
    sketch = _best_plan(context_of(traced, METHODS[name]))
    assert isinstance(sketch, Sketch)
    plan = whole_plan(sketch)
    assert not isinstance(plan, Sketch)

    n_short, n_whole = (sum(len(stage.equation_specs) for stage in one.stages) for one in (sketch, plan))
    assert n_short < 0.9 * n_whole
    assert sketch.cost.total_s == pytest.approx(plan.cost.total_s, rel=0.02)
    assert sketch.cost.compute_s == pytest.approx(plan.cost.compute_s, rel=1e-6)
    for short, whole in zip(sketch.stages, plan.stages, strict=True):
        # Fixed bytes include the predicted temporaries of the task with most. In small models, collectives of many
        # layers wait for each other.
        assert short.fixed_bytes == pytest.approx(whole.fixed_bytes, rel=0.25)
        assert short.kept_bytes == pytest.approx(whole.kept_bytes)


def test_the_plan_of_a_short_step_is_as_fast_as_that_of_the_whole_step(traced: TracedStep) -> None:
    context = context_of(traced, ShardParallel(num_micro_batches=8))
    short = whole_plan(_best_plan(context))
    whole = _best_plan(dataclasses.replace(context, shortens=False))
    assert short.cost.total_s <= 1.01 * whole.cost.total_s


def test_layers_of_a_scan_are_shortened_when_they_are_cut() -> None:
    step = trace(step_of(CLIPPED, scanned_loss), *state_and_batch(CLIPPED, stacked=True))
    sketch = _best_plan(context_of(step, ShardParallel(num_micro_batches=4, remat="full")))
    assert isinstance(sketch, Sketch)
    assert whole_plan(sketch).cost.total_s == pytest.approx(sketch.cost.total_s, rel=0.02)


# ---- plans of the whole step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [PLAIN, CLIPPED], ids=["plain", "clipped"])
def test_a_step_with_the_plan_of_a_short_one_trains_as_jit(optimizer: optax.GradientTransformation) -> None:
    step, (state, batch) = step_of(optimizer), state_and_batch(optimizer)
    expected, expected_loss = jax.jit(step)(state, batch)

    parallel = minialpa.parallelize(step, method=Zero2Parallel(num_micro_batches=2), donate_argnums=())
    found, found_loss = parallel(state, batch)
    np.testing.assert_allclose(found_loss, expected_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)


def test_a_whole_step_that_needs_more_memory_is_solved_with_less_room(
    traced: TracedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = plan_step(traced, V100, ShardParallel(num_micro_batches=8).options())
    limit_bytes = 0.75 * max(free.cost.peak_bytes)
    option = minialpa.AutoShardingOption(memory_limit_bytes=limit_bytes)
    context = context_of(traced, ShardParallel(num_micro_batches=8, auto_sharding_option=option))
    sketch = _best_plan(context)
    assert isinstance(sketch, Sketch)

    # As if the short step predicted a tenth less.
    measured, rooms = whole_plans.mesh_memory, list[float]()

    def more(*args: Any, **kwargs: Any) -> Any:
        memory = measured(*args, **kwargs)
        return dataclasses.replace(memory, fixed_bytes=memory.fixed_bytes + 0.1 * limit_bytes)

    solve = whole_plans.solve_meshes

    def solving(context: Any, placed: Any, **kwargs: Any) -> Any:
        rooms.append(placed.stages[0].option.memory_limit_bytes)
        return solve(context, placed, **kwargs)

    monkeypatch.setattr(whole_plans, "mesh_memory", more)
    monkeypatch.setattr(whole_plans, "solve_meshes", solving)
    plan = whole_plan(sketch)
    assert rooms and max(rooms) < limit_bytes
    assert max(plan.cost.peak_bytes) <= limit_bytes
    assert plan.stages[0].option.memory_limit_bytes == limit_bytes


def test_a_step_that_differs_from_its_short_step_is_planned_as_a_whole(
    traced: TracedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> Any:
        raise NotExpandedError("by the test")

    options = ShardParallel(num_micro_batches=8).options()
    expected: Plan = plan_step(traced, V100, options)
    monkeypatch.setattr(whole_plans, "Expansion", refused)
    plan = plan_step(traced, V100, options)
    assert len(plan.stages[0].equation_specs) == len(expected.stages[0].equation_specs)
    assert plan.cost.total_s == pytest.approx(expected.cost.total_s, rel=0.02)


def test_the_next_best_attempt_is_the_plan_if_the_whole_step_of_the_best_does_not_fit(
    traced: TracedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(traced, ShardParallel(num_micro_batches=8))
    asked = dataclasses.replace(context, options=Zero3Parallel(num_micro_batches=4, remat="full").options())
    best, other = sorted((_best_plan(context), _best_plan(asked)), key=lambda plan: plan.cost.total_s)

    def without_the_best(plan: Plan) -> Plan:
        if plan.n_micro_batches == best.n_micro_batches:
            raise minialpa.InfeasibleError("by the test")
        return whole_plan(plan)

    monkeypatch.setattr(pipeline, "whole_plan", without_the_best)
    assert pipeline._whole(context, best).n_micro_batches == other.n_micro_batches


def test_few_layers_are_not_shortened() -> None:
    def short(params: Any, batch: Any) -> Any:
        return loss({**params, "layers": params["layers"][:4]}, batch)

    step = trace(step_of(PLAIN, short), *state_and_batch(PLAIN))
    assert not isinstance(_best_plan(context_of(step, ShardParallel())), Sketch)


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_a_collective_stands_for_several_that_wait_for_several() -> None:
    def one(n: int, after: int) -> Communication:
        return Communication(Collective("all-reduce", 8.0, (0,)), 1, 0, after=after, n=n)

    # The third waits for the first, which stands for two, and for the second.
    found = _in_loops([one(2, 0), one(1, 0b1), one(3, 0b11)], {})
    assert [each.after for each in found] == [0, 0, 0b11, 0b111, 0b111, 0b111]
    assert {each.n for each in found} == {1}


def test_values_that_wait_between_passes_wait_in_all_units() -> None:
    forward, backward = (Repeated(5, UnitPass(0, 1, direction)) for direction in ("forward", "backward"))
    # Values: 0 is the argument; the unit makes 1 and 2 forward, other units 3 to 22, and the unit 23 and 24 backward.
    chain = [Kernel(reads=(a,), writes=(b,)) for a, b in itertools.pairwise(range(25))]
    chain[22] = dataclasses.replace(chain[22], reads=(22, 1))
    places = {1: forward, 2: forward, 23: backward, 24: backward}
    units = Units(places=places, moved=frozenset(), arguments=frozenset())
    timeline = timeline_of(chain, [1.0] * 25, inputs=[0], results=[24], pairs=())

    # Value 1 is read in the backward pass, value 2 by the next unit alone.
    assert copies_of(timeline, chain, [0], units) == ((Buffer(1, 2, 22), 4),)
