"""The benchmark of published runs: parts of plans at any rates, layouts of trainers, and constants of left-out runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planning import planned
from benchmarks.published_runs.fit import fitted, leave_out_scales, leave_out_systems, seconds_of
from benchmarks.published_runs.parts import Parts, parts_of, total_s
from benchmarks.published_runs.predict import cluster_of, method_of, parts_of_run, plan_of, predict, traced
from benchmarks.published_runs.record import Run, run_of
from minialpa import ClusterSpec
from minialpa.cluster import KernelRates, LinkSpec

_ROW: dict[str, Any] = {
    "system": "nobody", "model": "gpt-tiny", "params_b": 0.01, "layers": 4, "hidden": 256, "seq": 256,
    "global_batch": 64, "gpus": 16, "gpu_kind": "H100-SXM-80GB", "gpus_per_node": 8, "dp": 4, "fsdp": None, "tp": 2,
    "pp": 2, "cp": 1, "ep": 1, "micro_batch": 2, "remat": "full", "dtype": "bf16", "tokens_per_s_per_gpu": None,
    "tflops_per_gpu": None, "mfu": None, "step_s": 1.0, "notes": "heads 4; vocab 512",
}  # fmt: skip
_LLAMA = _ROW | {
    "system": "torchtitan", "model": "llama3-8b", "layers": 32, "hidden": 4096, "seq": 8192, "dp": 1, "pp": 1,
    "gpu_kind": "H100-96GB-HBM2e-500W", "remat": "selective",
}  # fmt: skip
#: Published runs. Sources: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 3, and
#: benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md; huggingface/nanotron, docs/benchmark_summary.svg;
#: mosaicml/llm-foundry, scripts/train/benchmarking/README.md.
_PUBLISHED = {
    "groups that share weights": _LLAMA
    | {"gpus": 128, "fsdp": 128, "tp": 1, "global_batch": 256, "step_s": 2.923, "notes": "no compile"},
    "tensor parallelism": _LLAMA
    | {"gpus": 64, "fsdp": 8, "tp": 8, "global_batch": 96, "micro_batch": 12, "step_s": 2.807, "notes": "vanilla TP"},
    "a pipeline": _ROW
    | {
        "system": "nanotron", "model": "llama-like-3.57b", "layers": 28, "hidden": 3072, "seq": 4096, "gpus": 8,
        "tp": 1, "global_batch": 256, "remat": None, "step_s": None, "mfu": 0.4668, "notes": "mlp 8192, vocab 131072",
    },
    "micro-batches": _ROW
    | {
        "system": "llm-foundry", "model": "mpt-760m", "layers": 24, "hidden": 1536, "seq": 4096, "global_batch": 192,
        "gpus": 8, "gpu_kind": "A100-SXM-80GB", "dp": 1, "fsdp": 8, "tp": 1, "pp": 1, "micro_batch": 12,
        "remat": "none", "step_s": 3.594, "notes": "",
    },
}  # fmt: skip
#: A layout that moves other bytes, such as whole weights in place of shards, comes to twice the error or more.
_MOST_ERROR = 0.15


@pytest.mark.parametrize("layout", _PUBLISHED)
def test_layout_of_a_published_run_takes_about_its_seconds(layout: str) -> None:
    found = predict(run_of(0, _PUBLISHED[layout]))
    assert found.error is not None, found.failure
    assert abs(found.error) < _MOST_ERROR, found


@pytest.fixture(scope="module")
def run() -> Run:
    return run_of(0, _ROW)


@pytest.fixture(scope="module")
def parts(run: Run) -> Parts:
    return parts_of(traced(run), plan_of(run), hides_update=False, plan_s=0.0)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"sustained": 0.3},
        {"launch_s": 1e-4},
    ],
)
def test_parts_at_other_rates_are_the_seconds_of_a_plan_at_these_rates(
    run: Run, parts: Parts, change: dict[str, float]
) -> None:
    def changed(kernels: KernelRates) -> KernelRates:
        return dataclasses.replace(kernels, **change)

    cluster = cluster_of(run, changed)
    plan = planned(traced(run), cluster, method_of(run, cluster))
    assert total_s(parts, cluster) == pytest.approx(plan.cost.total_s, rel=1e-3)


def test_file_of_parts_has_their_seconds(run: Run, parts: Parts, tmp_path: Path) -> None:
    first = predict(run, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert predict(run, tmp_path) == first
    # Eight micro-batches are planned as four: two for each stage.
    assert first.step_s == pytest.approx(total_s(parts, cluster_of(run)), rel=1e-3)
    other = dataclasses.replace(run, batch=128, n_micro_batches=16)
    assert isinstance(found := parts_of_run(other, tmp_path), Parts)
    assert len(list(tmp_path.iterdir())) == 1
    assert found.n_micro_batches == 16


def test_tokens_go_to_each_host_once_and_no_weights_move() -> None:
    row = _ROW | {
        "model": "qwen3-30b-a3b", "layers": 2, "hidden": 256, "gpus": 16, "dp": 16, "tp": 1, "pp": 1, "ep": 16,
        "global_batch": 32, "micro_batch": 1,
    }  # fmt: skip
    run = run_of(0, row)
    plan = plan_of(run)
    experts = run.model.experts
    assert experts is not None
    # One example of bfloat16 per device goes to each of two hosts, there to `per_token` experts, and back.
    token_bytes = 2 * run.model.seq * run.model.hidden
    sent = {(0,): 2 * token_bytes, (1,): experts.per_token * token_bytes}
    moved = {one.axes for one in plan.collectives if one.kind == "all-to-all" and one.n_bytes == sent[one.axes]}
    assert moved == {(0,), (1,)}
    weights = 2 * run.model.n_layers * experts.n * experts.inner * run.model.hidden
    assert all(one.n_bytes < weights for one in plan.collectives if one.kind == "all-gather")


def test_positions_of_context_parallelism_are_in_rings_and_its_devices_share_weights() -> None:
    row = _LLAMA | {"layers": 2, "hidden": 512, "seq": 4096, "gpus": 16, "fsdp": 2, "tp": 2, "global_batch": 8}
    run = run_of(0, row | {"cp": 4, "micro_batch": 4, "remat": "full"})
    assert run.model.axes == {"examples": 2, "context": 4, "operators": 2}
    plan = plan_of(run)
    assert {one.axes for one in plan.collectives if one.kind == "collective-permute"} == {(1,)}
    query = next(one for one in plan.input_specs if one.path == "[0][0]['blocks']['query']")
    assert [tuple(spec) for spec in query.partition_specs] == [(None, ("x", "y"), "z")]
    cluster = cluster_of(run)
    found = parts_of(traced(run), plan, hides_update=False, plan_s=0.0)
    assert total_s(found, cluster) == pytest.approx(plan.cost.total_s, rel=1e-3)


def test_fit_finds_the_rates_of_runs(run: Run, parts: Parts) -> None:
    constants = {"h100": 0.5, "memory_efficiency": 1.2}
    large = dataclasses.replace(parts, n_micro_batches=4096)
    measured = [dataclasses.replace(run, step_s=seconds_of(run, one, constants)) for one in (parts, large)]
    found = fitted(list(zip(measured, (parts, large), strict=True)))
    seconds = [seconds_of(one, own, found) for one, own in zip(measured, (parts, large), strict=True)]
    assert seconds == pytest.approx([one.step_s for one in measured], rel=1e-3)
    assert found["h100"] != pytest.approx(0.8, rel=0.05)  # the start


def test_left_out_runs_are_in_no_training(run: Run, parts: Parts) -> None:
    others = [dataclasses.replace(run, system=name, n_hosts=hosts) for name, hosts in (("a", 1), ("b", 64), ("b", 2))]
    runs = [(one, parts) for one in others]
    for split in (*leave_out_systems(runs), *leave_out_scales(runs, 128)):
        assert len(split.training) + len(split.tested) == 3
        assert all(one not in split.training for one in split.tested)
    assert [len(split.tested) for split in leave_out_systems(runs)] == [1, 2]
    assert [one.n_gpus for one, _ in leave_out_scales(runs, 128)[0].tested] == [512]


def test_ring_of_a_collective_takes_its_further_steps() -> None:
    cluster = ClusterSpec.preset("h100", num_hosts=4)
    slow = dataclasses.replace(
        cluster,
        intra_host=LinkSpec(cluster.intra_host.alpha_s, cluster.intra_host.beta_s_per_byte, 1.0),
        inter_host=LinkSpec(cluster.inter_host.alpha_s, cluster.inter_host.beta_s_per_byte, 100.0),
    )
    # (logical shape, steps inside a host and between hosts, without the first step of each axis)
    for shape, steps in (((32,), [(28, 2)]), ((4, 8), [(0, 2), (6, 0)]), ((2, 16), [(0, 0), (14, 0)])):
        plain, with_steps = (one.logical_mesh((4, 8), shape).alpha for one in (cluster, slow))
        assert [b - a for a, b in zip(plain, with_steps, strict=True)] == pytest.approx(
            [inside + 100 * between for inside, between in steps]
        )
    assert ClusterSpec.from_json(slow.to_json()) == slow
    assert ClusterSpec.from_json(cluster.to_json().replace(',\n  "step_s": 0.0', "")) == cluster
