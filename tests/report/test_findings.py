"""Findings name the fault of a plan that has one, and stay silent about a plan without it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import AutoShardingOption, ClusterSpec, DataParallel, ManualStageOption, PipeshardParallel, ShardParallel
from minialpa.models import build
from minialpa.plan import Plan
from minialpa.report.findings import Finding, findings

GPUS = ClusterSpec.preset("a100-80gb", num_hosts=1, devices_per_host=4)
WIDTH = 2048


MESH = Mesh(np.array(jax.devices()[:4]), ("x",))


def reshards(state: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
    """`train_step` with examples split before each layer, and features after it."""

    def split(x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))

    return train_step(state, batch, lambda x: split(split(x, None, "x"), "x", None))


def train_step(
    state: dict[str, Any], batch: dict[str, jax.Array], between: Callable[[jax.Array], jax.Array] = lambda x: x
) -> tuple[dict[str, Any], jax.Array]:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for k in range(4):
            with jax.named_scope(f"block_{k}"):
                x = between(x + jnp.tanh(x @ params[f"up_{k}"]) @ params[f"down_{k}"])
            if k < 3:
                minialpa.mark_pipeline_boundary()
        return jnp.mean(x.astype(jnp.float32) ** 2)

    value, grads = minialpa.value_and_grad(loss)(state["params"])
    moments = [jax.tree.map(lambda m, g: 0.9 * m + g, moment, grads) for moment in state["opt"]]
    params = jax.tree.map(lambda p, m, v: p - 1e-3 * m - 1e-3 * v, state["params"], *moments)
    return {"params": params, "opt": moments}, value


def arguments(n_examples: int = 512) -> tuple[Any, Any]:
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    params = {f"{name}_{k}": weight for name in ("up", "down") for k in range(4)}
    state = {"params": params, "opt": [params, params]}
    return state, {"x": jax.ShapeDtypeStruct((n_examples, WIDTH), jnp.bfloat16)}


def planned(method: Any, n_examples: int = 512) -> Plan:
    return minialpa.plan(train_step, arguments(n_examples), cluster=GPUS, method=method)


def pipeline(layers: list[list[int]], sizes: list[int], n_micro_batches: int = 32) -> Plan:
    option = ManualStageOption(
        layers, [(1, n) for n in sizes], [(n,) for n in sizes], [{} for _ in sizes]
    )  # fmt: skip
    method = PipeshardParallel(num_micro_batches=n_micro_batches, layer_option="manual", stage_option=option)
    return planned(method, 4096)


def warnings_in(plan: Plan) -> dict[str, Finding]:
    return {one.topic: one for one in findings(plan) if one.level == "warning"}


def test_a_replicated_optimizer_is_found_with_its_bytes() -> None:
    faulty, good = planned(DataParallel()), planned(minialpa.Zero2Parallel())
    found = warnings_in(faulty)["replicated optimizer state"]
    # Two moments of 8 weights in bfloat16; each of 4 devices needs a quarter.
    n_bytes = 2 * 8 * WIDTH * WIDTH * 2
    assert f"{n_bytes / 1e6:.0f} MB on each device" in found.text and f"{n_bytes / 4e6:.3g} MB" in found.text
    assert "Zero2Parallel" in found.text
    assert "replicated optimizer state" not in warnings_in(good)


def test_a_stage_that_is_too_slow_is_found_by_its_number() -> None:
    faulty, good = pipeline([[0], [1, 2, 3]], [2, 2]), pipeline([[0, 1], [2, 3]], [2, 2])
    found = warnings_in(faulty)["slow stage"]
    assert found.text.startswith("Stage 1 takes") and found == findings(faulty)[0]
    assert "slow stage" not in warnings_in(good)


def test_little_memory_is_found_with_the_part_that_is_left() -> None:
    plan = planned(ShardParallel())
    peak = max(plan.cost.peak_bytes)
    option = AutoShardingOption(memory_limit_bytes=peak / 0.97)
    faulty = planned(ShardParallel(auto_sharding_option=option))
    found = warnings_in(faulty)["memory"]
    assert "3.0 % is left" in found.text or "is left" in found.text
    assert "memory" not in warnings_in(plan)


def test_an_exchange_of_tokens_is_not_called_a_fault_of_shardings() -> None:
    n_experts, width, n_tokens = 64, 1024, 8192

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            y = x
            for router, up, down in params:
                chosen = jax.lax.top_k(y @ router, 2)[1].reshape(-1)
                order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=n_experts)
                rows = jax.lax.ragged_dot(jax.nn.silu(jax.lax.ragged_dot(y[order // 2], up, sizes)), down, sizes)
                y = y + rows[jnp.argsort(order)].reshape(-1, 2, width).sum(1)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, grads = minialpa.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    shapes = ((width, n_experts), (n_experts, width, 4 * width), (n_experts, 4 * width, width))
    params = [tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes) for _ in range(4)]
    tokens = jax.ShapeDtypeStruct((n_tokens, width), jnp.bfloat16)
    hosts = ClusterSpec.preset("a100-80gb", num_hosts=4, devices_per_host=1)
    plan = minialpa.plan(step, (params, tokens), cluster=hosts, method=ShardParallel())
    texts = [one.text for one in findings(plan) if "by all-to-all" in one.text]
    assert texts and all(text.endswith("to the devices of their experts, and back.") for text in texts)


def test_a_resharding_in_each_layer_is_found_with_its_module_and_line() -> None:
    pinned = ShardParallel(auto_sharding_option=AutoShardingOption(shardings="pin"))
    plan = minialpa.plan(reshards, arguments(), cluster=GPUS, method=pinned)
    text = warnings_in(plan)["resharding in each layer"].text
    assert re.search(r"\d times by all-to-all in block_\S+ \(test_findings.py:\d+\)", text), text
    assert "resharding in each layer" not in warnings_in(planned(ShardParallel()))


def test_waiting_for_other_stages_is_found() -> None:
    faulty, good = pipeline([[0, 1], [2, 3]], [2, 2], 1), pipeline([[0, 1], [2, 3]], [2, 2], 64)
    assert "1 micro-batch in 2 stages" in warnings_in(faulty)["bubble"].text
    assert "bubble" not in warnings_in(good)


def test_work_that_all_devices_repeat_is_found() -> None:
    alone = AutoShardingOption(enable_auto_sharding=False)
    faulty = planned(ShardParallel(auto_sharding_option=alone))
    assert "repeat the same work in 23 of 23 operators" in warnings_in(faulty)["repeated work"].text
    assert "repeated work" not in warnings_in(planned(DataParallel()))


def test_idle_devices_and_float32_products_are_noted() -> None:
    topics = {one.topic for one in findings(pipeline([[0, 1], [2, 3]], [1, 1]))}
    assert "idle devices" in topics and "dtype" not in topics


def test_warnings_come_first_and_the_largest_first() -> None:
    found = findings(pipeline([[0], [1, 2, 3]], [2, 2], 1))
    levels = [one.level for one in found]
    assert levels == sorted(levels, reverse=True)
    shares = [one.share for one in found if one.level == "warning"]
    assert shares == sorted(shares, reverse=True) and len(shares) >= 2


def test_an_attention_without_a_kernel_is_a_slow_operator() -> None:
    def gpt(dtype: str) -> Plan:
        case = build("gpt", hidden=512, n_layers=2, n_heads=8, seq_len=1024, vocab_size=64, batch_size=64, dtype=dtype)
        state = jax.eval_shape(case.init, jax.random.key(0))
        step = case.train_step(minialpa.value_and_grad)
        return minialpa.plan(step, (state, case.make_batch(0, 64)), cluster=GPUS, method=DataParallel())

    text = warnings_in(gpt("float16"))["slow operator"].text
    assert re.search(r"attention.* in Gpt/block_0-1/attention .* at [\d.]+ % of the roofline of a100", text), text
    assert "slow operator" not in warnings_in(gpt("bfloat16"))
