"""Explanations of plans: the cost of each alternative to a decision."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa import AutoShardingOption, ClusterSpec, PipeshardParallel, Plan, ShardParallel
from minialpa.inter.alternatives import forced_spec, named_values
from minialpa.inter.pipeline import plan_step
from minialpa.methods import Method, resolve_devices
from minialpa.sharding import specs_of
from minialpa.tracing.trace import TracedStep
from tests.helpers import trace
from tests.plans import make_args, train_step

#: Large enough that shards pay.
WIDTH, N_EXAMPLES = 1024, 512
ARGS = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_args(N_EXAMPLES, WIDTH))
CLUSTER = ClusterSpec.preset("a100-40gb", num_hosts=1, devices_per_host=8)
#: The work that GPUs hide depends on all shardings together, and the solver has only two prices for it. So a forced
#: alternative may be faster, by at most this fraction of these small steps, where half of the time is collectives.
_MISSED = 0.2
METHODS: dict[str, Method] = {
    "one axis": ShardParallel(devices=CLUSTER),
    "pipeline": PipeshardParallel(devices=CLUSTER, num_micro_batches=4, layer_option="manual"),
}


def planned(method: Method) -> tuple[TracedStep, Plan]:
    traced = trace(train_step, *ARGS)
    return traced, plan_step(traced, resolve_devices(method.devices).cluster, method.options())


def explained(what: str, method: Method, step: Any = train_step, args: Any = ARGS) -> str:
    return minialpa.explain(step, args, what, cluster=CLUSTER, method=method)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_forced_never_costs_less_and_the_chosen_spec_costs_the_same(name: str) -> None:
    traced, plan = planned(METHODS[name])
    assert all(stage.optimal for stage in plan.stages)
    for value, stage in named_values(traced, plan, ""):
        chosen = value.specs[value.mesh_ids.index(stage)]
        for spec in specs_of(value.shape, plan.stages[stage].logical_shape):
            found = forced_spec(traced, plan, value, stage, spec)
            if found.plan is None:
                assert spec != chosen and found.reason
            elif spec == chosen:
                assert found.plan.cost == plan.cost
            else:
                assert found.plan.cost.total_s >= plan.cost.total_s * (1 - _MISSED), (value.path, spec)
                assert found.plan.stages[stage].layers == plan.stages[stage].layers


def test_a_value_is_explained_by_a_table_with_the_chosen_spec_first() -> None:
    text = explained("params['w']", METHODS["one axis"])
    lines = text.splitlines()
    assert re.fullmatch(r"params\['w'\] float32\[1024, 1024\] on mesh 0 of shape \(8,\)", lines[0])
    assert lines[1].split()[:2] == ["per", "step"] and "chosen" in lines[2]
    assert len(lines) == 2 + 3 and all("+" in line or "same" in line for line in lines[3:])
    # A result goes with the argument that it replaces.
    text = explained("result", METHODS["one axis"])
    assert "result[1] float32[] on mesh 0" in text and "result[0]" not in text


def test_impossible_alternatives_are_reported_and_a_spec_may_be_fixed_where_nothing_else_is_sharded() -> None:
    def step(x: jax.Array, batch: jax.Array) -> jax.Array:
        return jnp.tanh(batch @ x)

    args = (jax.ShapeDtypeStruct((64, 12), jnp.float32), jax.ShapeDtypeStruct((16, 64), jnp.float32))
    text = explained("x", ShardParallel(), step, args)
    assert "no such sharding: dimension 1 of size 12 over axis 0 of length 8" in text
    text = explained("batch", ShardParallel(num_micro_batches=4), step, args)
    assert re.search(
        r"P\('x',?\) +not possible: `fixed_specs` for `batch` splits dimension 0 of an array of shape \(4, 64\)", text
    )

    alone = AutoShardingOption(enable_auto_sharding=False)
    text = explained("x", ShardParallel(auto_sharding_option=alone), step, args)
    assert re.search(r"P\(\) +[\d.]+ us +chosen", text)
    assert re.search(r"P\('x',?\) +[\d.]+ us +\+[\d.]+ us", text)  # gathered before it is read


def test_alternatives_that_do_not_fit_are_reported() -> None:
    peak = max(planned(METHODS["one axis"])[1].cost.peak_bytes)
    tight = AutoShardingOption(memory_limit_bytes=0.9 * peak)
    text = explained("params['w']", ShardParallel(auto_sharding_option=tight))
    assert re.search(r"P\(\) +does not fit: .* needs [\d.]+ .?B per device, [\d.]+ .?B above .* of [\d.]+ .?B$", text)


def test_many_values_are_cut_and_operators_are_listed() -> None:
    def step(state: list[jax.Array], batch: jax.Array) -> list[jax.Array]:
        return [x + 1.0 for x in state]

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    text = explained("state", ShardParallel(), step, ([x] * 6, x))
    assert "2 more values match. Give the full name of one value." in text
    assert re.search(r"matmul +columns over 4", explained("dot_general", METHODS["pipeline"]))
    text = explained("nothing", METHODS["one axis"])
    assert (
        text.startswith("No part of the plan is called `nothing`.") and "`micro-batches`, `remat`, `stages`, " in text
    )


def test_the_plan_as_a_whole_is_explained() -> None:
    pipeline = METHODS["pipeline"]
    stages = explained("stages", pipeline)
    assert re.search(r"2 stages, 4 micro-batches, remat none +\S+ \S+ +chosen", stages)
    assert "no pipeline, shape (8,)" in stages and "no pipeline, shape (2, 4)" in stages
    assert re.search(r"2 equal stages +\S+ \S+ +same", stages)
    assert "4 equal stages" in explained("stages", METHODS["one axis"])
    micro_batches = explained("micro-batches", pipeline)
    assert [n for n in (1, 2, 8, 16) if f"{n} micro-batch" in micro_batches] == [1, 2, 8, 16]
    remat = explained("remat", pipeline)
    assert "remat dots" in remat and "remat full" in remat
    assert "remat dots" in explained("remat", METHODS["one axis"])


def test_a_saved_plan_is_explained_by_its_function() -> None:
    plan = minialpa.plan(train_step, ARGS, cluster=CLUSTER, method=ShardParallel())
    parallel = minialpa.parallelize(train_step, method=Plan.from_json(plan.to_json()))
    assert parallel.explain("params['w']", *ARGS) == explained("params['w']", ShardParallel())
