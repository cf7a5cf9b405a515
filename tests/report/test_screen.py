"""The summary of a plan fits one screen, shows equal layers once, and its numbers are the plan's."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import minialpa
from minialpa import AutoLayerOption, ClusterSpec, DataParallel, PipeshardParallel, ShardParallel, UniformStageOption
from minialpa.models import build
from minialpa.plan import Plan
from minialpa.plan.text import ranges_text
from minialpa.report.figures import stage_memory, throughput, time_parts
from minialpa.report.groups import equal_layers
from minialpa.report.words import LEGEND, number_text, percent_text

CLUSTER = ClusterSpec.preset("h100", num_hosts=2, devices_per_host=4)
METHODS = {
    "shard": ShardParallel(num_micro_batches=2),
    "data": DataParallel(),
    "pipeline": PipeshardParallel(
        num_micro_batches=8, layer_option=AutoLayerOption(layer_num=8), stage_option=UniformStageOption(8)
    ),
}


@functools.cache
def gpt_plan(method: str) -> Plan:
    case = build("gpt", hidden=256, n_layers=8, n_heads=4, seq_len=64, vocab_size=128)
    state = jax.eval_shape(case.init, jax.random.key(0))
    step = case.train_step(minialpa.value_and_grad)
    return minialpa.plan(step, (state, case.make_batch(0, 64)), cluster=CLUSTER, method=METHODS[method])


@functools.cache
def scan_plan() -> Plan:
    """Twelve layers in a scan, and no modules but named scopes."""

    def step(params: dict[str, jax.Array], x: jax.Array) -> Any:
        def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            with jax.named_scope("mlp"):
                return jnp.tanh(h @ w), None

        def loss(p: dict[str, jax.Array]) -> jax.Array:
            h, _ = jax.lax.scan(layer, x, p["w"])
            with jax.named_scope("head"):
                return jnp.mean((h @ p["v"]) ** 2)

        value, grads = minialpa.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    w, v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((12, 256, 256), (256, 8)))
    args = ({"w": w, "v": v}, jax.ShapeDtypeStruct((64, 256), jnp.float32))
    return minialpa.plan(step, args, cluster=CLUSTER, method=ShardParallel())


PLANS = [*(functools.partial(gpt_plan, name) for name in METHODS), scan_plan]


@pytest.mark.parametrize("make", PLANS)
def test_the_summary_fits_one_screen(make: Any) -> None:
    lines = make().summary().splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("make", PLANS)
def test_every_word_for_a_sharding_is_in_the_legend(make: Any) -> None:
    *above, legend = re.split(r"^Words: ", make().summary(), flags=re.MULTILINE)
    used = set(re.findall(r"(\w+) over \d+", above[0]))
    assert used or "in full: " in legend
    assert all(f"{word} over n" in legend for word in used)
    assert used <= {word.removesuffix(" over n") for word in LEGEND}


def test_equal_layers_are_one_row_with_the_names_and_lines_of_the_model() -> None:
    text = gpt_plan("shard").summary()
    assert (
        len(re.findall(r"^block_0-7/attention/qkv +matmul +examples over 8 +[\d.]+ % +layers.py:\d+$", text, re.M)) == 1
    )
    assert "block_3" not in text and text.startswith("Plan of Gpt for 2 x 4 h100 devices: 1 stage")
    assert "S0" not in text and "axis" not in text


def test_a_layer_of_a_scan_counts_once_for_each_iteration() -> None:
    ops = [op for op in scan_plan().stages[0].operators if op.module == "mlp"]
    assert {op.times for op in ops} == {12} and len(ops) == 3 and {op.part for op in ops} == {"forward", "backward"}
    flops = 2 * 64 * (3 * 12 * 256 * 256 + 3 * 256 * 8)
    assert scan_plan().model_flops == flops
    assert sum(op.times * op.flops for op in scan_plan().stages[0].operators) == flops


@pytest.mark.parametrize("make", PLANS)
def test_parts_of_time_and_memory_add_up_to_the_cost(make: Any) -> None:
    plan = make()
    assert sum(time_parts(plan).values()) == pytest.approx(1.0)
    for k, stage in enumerate(plan.stages):
        memory = stage_memory(plan, k)
        assert sum(memory.parts.values()) == pytest.approx(stage.peak_bytes, rel=1e-6)
        assert memory.limit_bytes == 80e9
    rates = throughput(plan)
    assert rates.examples == plan.n_examples / plan.cost.total_s
    peak = plan.cluster.n_devices * plan.cluster.device.flops_per_s(rates.dtype)
    assert rates.utilisation == plan.model_flops / (plan.cost.total_s * peak)


def test_weights_optimizer_and_examples_are_told_apart() -> None:
    plan = gpt_plan("data")
    role = {value.path: role for value, role in zip(plan.inputs, plan.roles, strict=True)}
    assert {r for path, r in role.items() if ".params[" in path} == {"weights"}
    assert {r for path, r in role.items() if "opt_state" in path} == {"optimizer"}
    assert {r for path, r in role.items() if path.startswith("batch")} == {"batch"}
    assert throughput(plan).tokens == 64 * 64 / plan.cost.total_s
    # Every device of a data parallel plan holds all weights.
    n_bytes = sum(4 * math.prod(v.shape) for v, r in zip(plan.inputs, plan.roles, strict=True) if r == "weights")
    assert stage_memory(plan, 0).parts["weights"] == n_bytes


def test_each_collective_names_its_array_module_and_line() -> None:
    plan = gpt_plan("data")
    sums = [one for one in plan.collectives if one.kind == "all-reduce" and one.module]
    assert sums and all(one.array in ("gradient", "reduce_sum", "div") or one.part == "backward" for one in sums)
    assert {one.module for one in sums} >= {f"Gpt/block_{k}/attention/qkv" for k in range(8)}
    assert all(re.fullmatch(r"\w+\.py:\d+", one.line) for one in sums)
    assert not any("minialpa" in one.line or one.line.startswith("accumulators") for one in plan.collectives)


def test_the_picture_of_a_pipeline_has_a_lane_for_each_stage() -> None:
    text = gpt_plan("pipeline").summary(full=True)
    lanes = re.findall(r"^  stage (\d)  ([ ▒█░]+)$", text, re.M)
    assert [int(k) for k, _ in lanes] == list(range(8))
    # Each stage starts after the one before it, and the first one ends last.
    starts = [len(lane) - len(lane.lstrip()) for _, lane in lanes]
    ends = [len(lane.rstrip()) for _, lane in lanes]
    assert starts == sorted(starts) and starts[0] < starts[-1] and ends[0] == max(ends) >= 80


def test_explain_finds_modules_lines_operations_arrays_and_topics() -> None:
    plan = gpt_plan("pipeline")
    module = plan.explain("block_3/feed_forward/up")
    assert "matmul (backward)" in module and "block_3/feed_forward/up" in module and "block_2" not in module
    line = next(op.line for op in plan.stages[0].operators if op.module.endswith("feed_forward/up"))
    assert "feed_forward/up" in plan.explain(line) and "qkv" not in plan.explain(line)
    assert "attention" in plan.explain("matmul") and "opt_state" in plan.explain("opt_state")
    assert plan.explain("memory").count("of 80 GB on each device") == 8
    assert plan.explain("stage 5").startswith("Stage 5: layer 5, ")
    assert "times per step" in gpt_plan("data").explain("communication")
    assert "Do you mean `attention`" in plan.explain("atention")
    assert plan.explain("stage 9").startswith("No part of the plan is called `stage 9`.")


@given(st.lists(st.integers(0, 40), min_size=1))
def test_ranges_name_each_number_once(numbers: list[int]) -> None:
    named: list[int] = []
    for part in ranges_text(numbers).split(", "):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(set(numbers))


def test_groups_hold_names_that_differ_in_numbers_alone() -> None:
    names = ["a_0/b", "a_1/b", "a_0/c", "a_2/b", "d"]
    groups = equal_layers(names, lambda name: name, lambda name: None)
    assert [(group.name, len(group.members)) for group in groups] == [("a_0-2/b", 3), ("a_0/c", 1), ("d", 1)]


def test_numbers_are_short() -> None:
    assert [number_text(n) for n in (548_912, 1234.5, 12.34)] == ["549,000", "1,230", "12.3"]
    assert [percent_text(p) for p in (0.451, 0.0123, 0.00078, 0.998, 1.0)] == [
        "45 %",
        "1.2 %",
        "0.078 %",
        "99.8 %",
        "100 %",
    ]
