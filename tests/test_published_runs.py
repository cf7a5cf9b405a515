"""Names of GPUs and of trainers in a record of published runs say what the benchmark makes of them."""

from __future__ import annotations

import pytest

from benchmarks.published_runs.choices import choose, designs, split_totals_bytes
from benchmarks.published_runs.errors import NotBuiltError
from benchmarks.published_runs.gpus import chip_of, cluster_of_gpus, device_of, power_part
from benchmarks.published_runs.predict import plan_of, predict
from benchmarks.published_runs.record import run_of
from benchmarks.published_runs.trainers import Trainer, trainer_of


@pytest.mark.parametrize(
    "kind",
    [
        "V100-16GB",
        "A100-SXM-40GB",
        "A100-SXM-80GB",
        "A800-80GB",
        "H100-SXM-80GB",
        "H800",
        "H200-141GB",
        "GH200",
        "B200",
    ],
)
def test_a_gpu_has_figures_whatever_follows_its_name(kind: str) -> None:
    device = device_of(kind)
    assert device.kernels is not None
    assert device.flops_per_s("bfloat16") == device.flops_per_s("float16")


def test_a_name_says_where_a_gpu_differs_from_its_data_sheet() -> None:
    own, usual = device_of("H100-96GB-HBM2e-500W"), device_of("H100-SXM-80GB")
    assert own.memory_bytes == 95 * 2**30
    assert own.memory_bandwidth < usual.memory_bandwidth
    assert power_part("H100-96GB-HBM2e-500W") < power_part("H100-SXM-80GB") == 1


def test_an_unknown_gpu_is_left_out_with_its_name() -> None:
    with pytest.raises(NotBuiltError, match="MI300X"):
        chip_of("MI300X")


@pytest.mark.parametrize(
    ("notes", "bytes_per_s"),
    [("4x100 Gb/s", 50e9), ("4x100 Gb/s Omni-Path per node", 20.25e9), ("8xHDR IB per node", 200e9), ("", 200e9)],
)
def test_notes_say_what_a_host_sends(notes: str, bytes_per_s: float) -> None:
    cluster = cluster_of_gpus("A100-SXM-80GB", 2, 8, notes)
    assert 1 / cluster.inter_host.beta_s_per_byte == pytest.approx(bytes_per_s)


def test_links_of_export_versions_are_slower() -> None:
    export, usual = cluster_of_gpus("H800", 1, 8, ""), cluster_of_gpus("H100-SXM-80GB", 1, 8, "")
    assert export.intra_host.beta_s_per_byte == pytest.approx(9 / 4 * usual.intra_host.beta_s_per_byte)


def test_an_unknown_trainer_is_one_of_2024() -> None:
    assert trainer_of("somebody's trainer", "") == Trainer()


def test_notes_say_what_a_trainer_compiles_and_hides() -> None:
    assert trainer_of("torchtitan", "no compile").elementwise == "operators"
    assert trainer_of("torchtitan", "torch.compile").elementwise == "kernels"
    assert trainer_of("torchtitan", "2D + AsyncTP").hides_operators
    assert not trainer_of("torchtitan", "vanilla TP").hides_operators
    assert trainer_of("Megatron-DeepSpeed", "Jean Zay").blocked_s > trainer_of("Megatron-DeepSpeed", "").blocked_s == 0


ROW = {
    "system": "Megatron-DeepSpeed",
    "model": "gpt-104b",
    "layers": 64,
    "hidden": 11600,
    "seq": 2048,
    "global_batch": 2048,
    "gpus": 64,
    "gpu_kind": "A100-SXM-80GB",
    "gpus_per_node": 8,
    "dp": 4,
    "fsdp": None,
    "tp": 4,
    "pp": 4,
    "cp": 1,
    "ep": 1,
    "micro_batch": 1,
    "remat": None,
    "dtype": "bf16",
    "step_s": 100.0,
    "tokens_per_s_per_gpu": None,
    "tflops_per_gpu": None,
    "mfu": None,
    "params_b": 104,
    "notes": "heads 80",
    "source": "",
}


def test_runs_of_other_dimensions_are_not_compared() -> None:
    same = run_of(1, {**ROW, "dp": 2, "pp": 8})
    assert run_of(0, ROW).group == same.group
    for changed in ({"notes": "heads 58"}, {"seq": 4096}, {"hidden": 11680}, {"gpus": 128, "dp": 8}):
        assert run_of(0, ROW).group != run_of(2, {**ROW, **changed}).group


@pytest.mark.parametrize(("params_b", "pp", "n_layers"), [(200, 8, 80), (194, 6, 78), (195, 11, 77), (183, 12, 72)])
def test_a_model_without_a_number_of_layers_has_as_many_in_each_stage(params_b: int, pp: int, n_layers: int) -> None:
    row = {**ROW, "layers": None, "hidden": 14400, "params_b": params_b, "pp": pp, "notes": "heads 96; vocab ~250k"}
    assert run_of(0, row).model.n_layers == n_layers


SMALL = {**ROW, "layers": 4, "hidden": 512, "gpus": 4, "gpus_per_node": 4, "global_batch": 8, "notes": "heads 4"}


def test_designs_use_all_devices_and_divide_the_model_and_the_batch() -> None:
    run = run_of(0, {**SMALL, "dp": 2, "tp": 1, "pp": 2})
    found = list(designs(run))
    degrees = [(design.dp, design.tp, design.pp, design.n_micro_batches) for design in found]
    assert len(set(degrees)) == len(degrees) and (2, 1, 2, 4) not in degrees
    assert {(4, 1, 1, 2), (4, 1, 1, 1), (1, 1, 4, 8), (2, 2, 1, 4), (1, 4, 1, 1), (1, 2, 2, 2)} <= set(degrees)
    for design in found:
        assert design.dp * design.tp * design.pp == run.n_gpus and design.n_micro_batches >= design.pp
        assert run.batch % (design.dp * design.n_micro_batches) == 0


def test_the_best_design_is_chosen_of_those_that_fit() -> None:
    run = run_of(0, {**SMALL, "gpus": 2, "gpus_per_node": 2, "global_batch": 2, "dp": 1, "tp": 2, "pp": 1})
    choice = choose(run)
    assert choice.theirs.run is run and choice.n_designs == 4
    # Data parallelism sends gradients once; tensor parallelism sends activations in each layer.
    assert choice.ours.run.dp == 2 and choice.ours.fits
    assert choice.ratio is not None and choice.ratio > 1.0


def test_totals_that_a_plan_splits_are_told_from_whole_ones() -> None:
    large = {"layers": 8, "hidden": 1024, "seq": 256, "notes": "heads 8; vocab 1000"}
    run = run_of(0, {**SMALL, **large, "global_batch": 32, "dp": 4, "tp": 1, "pp": 1})
    plenty, little = plan_of(run), plan_of(run, 1.2e9)
    assert max(plenty.cost.peak_bytes) > 1.2e9 >= max(little.cost.peak_bytes)
    assert split_totals_bytes(run, plenty, 0) == 0
    assert 0.1 < split_totals_bytes(run, little, 0) / (4 * run.model.n_weights) < 1


def seconds(**changed: object) -> float:
    found = predict(run_of(0, {**SMALL, "gpus": 1, "dp": 1, "tp": 1, "pp": 1, **changed})).step_s
    assert found is not None
    return found


def test_heads_that_tensor_cores_do_not_take_are_slow() -> None:
    # 64 and 60 features of a head; the products of weights are as fast.
    assert seconds(hidden=960, notes="heads 16") > 1.1 * seconds(hidden=960, notes="heads 15")


def test_products_start_later_where_the_host_waits_for_each_kernel() -> None:
    assert seconds(notes="heads 4; Jean Zay") > seconds(notes="heads 4")


def test_a_run_that_ran_is_planned_in_as_little_more_memory_as_is_enough() -> None:
    # All that a device has to keep is 18 bytes for each of 1.2 10^9 parameters, and activations.
    row = {**SMALL, "layers": 24, "hidden": 2048, "gpus": 1, "dp": 1, "tp": 1, "pp": 1, "gpu_kind": "A100-SXM-20GB"}
    found = predict(run_of(0, row))
    memory_bytes = device_of("A100-SXM-20GB").memory_bytes
    assert not found.fits and memory_bytes < found.peak_bytes <= 4 * memory_bytes
