"""Seconds to trace and plan a step. Arguments are abstract and meshes are logical: no device is used."""

from __future__ import annotations

import time
from typing import Any

import jax

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from minialpa import ClusterSpec, LogicalMesh, models

CLUSTER = ClusterSpec.preset("a100-80gb", devices_per_host=8)
#: For models of many layers.
DEEP = ClusterSpec.preset("h100", num_hosts=8, devices_per_host=8)


@benchmark("plan_time")
def plan_time(size: Size) -> Rows:
    """Seconds to trace and plan small models, on logical meshes and as pipelines, and Llama 3 of 32 and 128 layers."""
    names = ("mlp", "gpt", "resnet", "bert") if size == "full" else ("mlp",)
    layer_numbers = (2, 4) if size == "full" else (2,)
    methods: dict[str, Any] = {
        f"shard {shape}": minialpa.ShardParallel(devices=LogicalMesh(shape)) for shape in ((8,), (2, 4))
    }
    for n in layer_numbers:
        methods[f"pipeline of {n} layers"] = minialpa.PipeshardParallel(
            devices=CLUSTER,
            num_micro_batches=4,
            layer_option=minialpa.AutoLayerOption(layer_num=n),
            stage_option="auto",
        )
    rows = [_row(name, label, method) for name in names for label, method in methods.items()]
    if size == "full":
        mesh = DEEP.logical_mesh((8, 8), (8, 8))
        for n_layers, scan in ((32, False), (32, True), (128, False), (128, True)):
            sizes: dict[str, Any] = {"n_layers": n_layers, "scan_layers": scan, "batch_size": 16, "seq_len": 512}
            label = f"shard (8, 8), {n_layers} layers{', scan' if scan else ''}"
            rows.append(_row("llama-3-8b", label, minialpa.ShardParallel(devices=mesh), **sizes))
    return rows


def _row(name: str, label: str, method: Any, **sizes: Any) -> dict[str, Any]:
    case = models.build(name, **sizes)
    state = jax.eval_shape(case.init, jax.ShapeDtypeStruct((), jax.random.key(0).dtype))
    batch = case.make_batch(0, case.batch_size)
    start = time.perf_counter()
    jax.make_jaxpr(case.train_step(jax.value_and_grad))(state, batch)
    jax_s = time.perf_counter() - start
    step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method, plan_cache=None)
    start = time.perf_counter()
    plan = step.plan(state, batch)
    total_s = time.perf_counter() - start
    return {
        "model": name,
        "method": label,
        "jax_trace_s": jax_s,
        "trace_and_plan_s": total_s,
        "stages": len(plan.stages),
        "optimal": all(stage.optimal for stage in plan.stages),
    }
