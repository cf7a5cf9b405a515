"""The joint search finds the best plan of the table, keeps memory limits, and places stages on available hosts."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import (
    AutoLayerOption,
    AutoParallel,
    AutoShardingOption,
    AutoStageOption,
    ClusterSpec,
    ManualStageOption,
    PipeshardParallel,
    ShardingError,
    UniformStageOption,
    VerifyError,
    models,
)
from minialpa.inter.context import compiler_of
from minialpa.inter.layers.forward import assign_layers, balanced_runs, natural_layers, sublayers_of
from minialpa.inter.pipeline import plan_step
from minialpa.inter.schedule.simulate import simulate
from minialpa.inter.search.joint_search import StageSearch
from minialpa.inter.search.stage_bounds import StageBounds
from minialpa.inter.search.stage_cost import SublayerCosts, load_costs
from minialpa.inter.search.sublayer_solver import SublayerSearch
from minialpa.inter.search.submeshes import Space, candidates, first_views, may_start, skip_to, transfer_seconds
from minialpa.options import Remat
from minialpa.plan import verify_plan
from minialpa.tracing.trace import TracedStep
from tests.helpers import descent_step, trace

V100 = ClusterSpec.preset("v100-p3.16xlarge", num_hosts=1, devices_per_host=4)


def mlp(n_layers: int = 4, hidden: int = 2048, batch: int = 64) -> TracedStep:
    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    args = [jax.ShapeDtypeStruct((hidden, hidden), jnp.float32)] * n_layers
    return trace(
        descent_step(loss_fn, minialpa.value_and_grad), args, jax.ShapeDtypeStruct((batch, hidden), jnp.float32)
    )


def bounds_of(
    traced: TracedStep, cluster: ClusterSpec, numbers: tuple[int, ...], remats: tuple[Remat, ...] = ("none",)
) -> StageBounds:
    layers = assign_layers(traced, AutoLayerOption())
    space = Space(
        micro_batches=numbers,
        remats=remats,
        candidates=tuple(candidates(cluster, AutoStageOption())),
        schedule="1f1b",
        use_all_devices=False,
        tolerance=0.01,
    )
    search = SublayerSearch(
        traced=traced,
        layer_of_group=layers,
        cluster=cluster,
        compiler=compiler_of(cluster),
        space=space,
        option=AutoShardingOption(),
    )
    return StageBounds(search)


@pytest.mark.parametrize("memory_bytes", [16e9, 9e7])
def test_the_search_finds_what_the_whole_table_holds(memory_bytes: float) -> None:
    device = dataclasses.replace(V100.device, memory_bytes=memory_bytes)
    cluster = dataclasses.replace(V100, device=device)
    traced = mlp()
    lazy, full = bounds_of(traced, cluster, (1, 2, 8)), bounds_of(traced, cluster, (1, 2, 8))
    search = StageSearch(lazy, lambda what, done, total: None)
    found, certificate = search.best(), search.certificate
    seconds = {}
    for n in full.numbers:
        for c in range(len(full.columns)):
            for sublayer in range(full.sublayers.n_sublayers):
                while not full.tables[n].solved[sublayer, c]:
                    full.raise_bound(n, sublayer, c)
        try:
            seconds[n] = full.choose(n).seconds
        except minialpa.InfeasibleError:
            seconds[n] = np.inf
    least = min(seconds.values())
    assert least * (1 - 1e-9) <= found.seconds <= least * 1.02
    assert lazy.sublayers.n_solved == certificate.n_costs < full.sublayers.n_solved
    bound_s = certificate.bound_s
    assert found.seconds * 0.98 <= bound_s <= min(seconds[n] for n in certificate.n_micro_batches) * (1 + 1e-9)


@pytest.mark.parametrize("memory_bytes", [16e9, 1.2e8])
def test_views_near_the_first_ones_lead_to_the_best_of_all(memory_bytes: float) -> None:
    device = dataclasses.replace(V100.device, memory_bytes=memory_bytes)
    cluster = dataclasses.replace(V100, num_hosts=4, device=device)
    traced = mlp(4, 4096, 4096)
    few, every = bounds_of(traced, cluster, (1, 4)), bounds_of(traced, cluster, (1, 4))
    for n in every.numbers:
        assert every.open_all_views(n) and not every.open_all_views(n)
    found = [StageSearch(bounds, lambda what, done, total: None).best() for bounds in (few, every)]
    assert found[0].seconds <= found[1].seconds * 1.02
    assert few.sublayers.n_solved <= every.sublayers.n_solved


def test_a_step_that_fits_in_a_late_view_alone_is_planned() -> None:
    """Only one axis, which splits each matrix over all devices, fits, and the search does not try it at first."""
    device = dataclasses.replace(V100.device, memory_bytes=16e9)
    cluster = dataclasses.replace(V100, num_hosts=4, device=device)
    bounds = bounds_of(mlp(1, 4096, 64), cluster, (1,))
    tables = bounds.tables[1]
    late = np.array([c.logical_shape == (8, 2) for c in bounds.space.candidates])
    assert not tables.is_open[late].any()
    for c, column in enumerate(bounds.columns.columns):
        if not late[column.candidate]:
            bounds.columns.memory_bytes[c] = 1e6
    found = StageSearch(bounds, lambda what, done, total: None).best()
    assert [stage.candidate.logical_shape for stage in found.stages] == [(8, 2)]


def test_the_first_views_of_a_submesh() -> None:
    cluster = ClusterSpec.preset("h100", num_hosts=16, devices_per_host=8)
    every = candidates(cluster, AutoStageOption())

    def first(submesh: tuple[int, int], n_examples: int) -> list[tuple[int, ...]]:
        is_first = first_views(every, cluster.devices_per_host, n_examples)
        return [c.logical_shape for c, one in zip(every, is_first, strict=True) if one and c.submesh == submesh]

    assert first((1, 8), 4) == [(8,), (2, 4), (4, 2)]  # all
    assert first((16, 8), 4) == [(128,), (4, 32), (16, 8)]
    assert first((16, 8), 1024) == [(128,), (16, 8)]


def test_the_slow_host_gets_fewer_layers() -> None:
    fast, slow = ClusterSpec.preset("h100").device, V100.device
    cluster = ClusterSpec(2, 1, slow, V100.intra_host, V100.intra_host, host_devices=(slow, fast))
    method = PipeshardParallel(
        num_micro_batches=16, layer_option=AutoLayerOption(layer_num=8), stage_option="auto", devices=cluster
    )
    step = mlp(8, hidden=4096, batch=4096)
    plan = plan_step(step, cluster, method.options())
    counts = [len(stage.layers) for stage in plan.stages]
    assert [stage.first_device for stage in plan.stages] == [0, 1] and counts[0] < counts[1]
    assert ClusterSpec.from_json(cluster.to_json()) == cluster


def test_hosts_of_three_devices_and_stages_inside_hosts() -> None:
    cluster = dataclasses.replace(V100, num_hosts=2, devices_per_host=3)
    choices = candidates(cluster, AutoStageOption("all", "same_as_physical"))
    assert [c.submesh for c in choices] == [(1, 1), (1, 2), (1, 3), (2, 3)]
    assert may_start(cluster, choices).astype(int).tolist() == [
        [1, 1, 1, 1, 1, 1],
        [1, 1, 0, 1, 1, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 0],
    ]
    assert skip_to(cluster).tolist() == [3, 2, 3, 6, 5, 6]
    seconds = transfer_seconds(cluster, np.array([3.1e9]))
    between, inside = 2 * 2e-5 + 1.0, 2 * 6e-6 + 3.1 / 120
    assert seconds[0] == pytest.approx([between, inside, inside] * 2)


def test_manual_stages_that_cross_hosts_are_refused() -> None:
    cluster = dataclasses.replace(V100, num_hosts=2, devices_per_host=3)
    option = ManualStageOption([[0], [1], [2]], [(1, 2)] * 3, [(2,)] * 3)
    method = PipeshardParallel(cluster, layer_option=AutoLayerOption(layer_num=3), stage_option=option)
    with pytest.raises(ShardingError, match="submesh of stage 2, 1 x 2 devices, does not fit on the devices from 6 on"):
        plan_step(mlp(3), cluster, method.options())


def test_a_logical_mesh_leaves_nothing_to_search() -> None:
    mesh = minialpa.LogicalMesh((2, 2))
    step = minialpa.parallelize(lambda w, x: w, method=AutoParallel(devices=mesh))
    with pytest.raises(ShardingError, match="compares mesh shapes, but `devices` is a LogicalMesh of one shape"):
        step.plan(np.ones(4), np.ones(4))


def traced_model(name: str, **sizes: Any) -> TracedStep:
    case = models.build(name, **sizes)
    state = jax.eval_shape(case.init, jax.random.key(0))
    return trace(case.train_step(minialpa.value_and_grad), state, case.make_batch(0, case.batch_size))


def test_layers_are_the_blocks_of_a_model_and_its_head() -> None:
    """A head with the cost of three blocks is one more layer; a layer costs as much as the blocks inside it."""
    traced = traced_model("gpt", n_layers=8, hidden=64, vocab_size=6400)
    assert natural_layers(traced) == 17  # two for each block, to have at least 16
    layers = assign_layers(traced, AutoLayerOption(layer_num=4))
    sublayers, layer_of_sublayer = sublayers_of(traced, layers)
    assert sorted(set(sublayers)) == list(range(len(layer_of_sublayer))) and len(layer_of_sublayer) >= 17
    assert [layer_of_sublayer[sublayer] for sublayer in sublayers] == list(layers)


def test_the_schedule_with_the_shortest_bubble_is_chosen_where_the_bubble_is_large() -> None:
    cluster = dataclasses.replace(V100, num_hosts=2, devices_per_host=1)
    traced = mlp(8, hidden=4096, batch=512)
    one_run = PipeshardParallel(
        num_micro_batches=2, layer_option=AutoLayerOption(), stage_option=AutoStageOption(), devices=cluster
    )
    free = AutoParallel(num_micro_batches=2, layer_option=AutoLayerOption())
    plain = plan_step(traced, cluster, one_run.options())
    plan = plan_step(traced, cluster, free.options())
    assert plain.schedule == "1f1b" and plan.schedule == "zb"
    assert simulate(plan).total_s < 0.9 * simulate(plain).total_s
    verify_plan(plan)

    # Here the split of backward passes is worth more than more runs of layers in each stage.
    interleaved = PipeshardParallel(
        devices=cluster,
        num_micro_batches=2,
        pipeline_schedule="1f1b-interleaved",
        layer_option=AutoLayerOption(),
        stage_option=UniformStageOption(num_stages=2, num_chunks=2),
    )
    assert simulate(plan).total_s <= simulate(plan_step(traced, cluster, interleaved.options())).total_s


@pytest.mark.parametrize("n_runs", [1, 3])
def test_balanced_runs_are_as_light_as_can_be(n_runs: int) -> None:
    weights = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]

    def heaviest(runs: list[tuple[int, ...]]) -> float:
        return max(sum(weights[i] for i in run) for run in runs)

    cuts = itertools.combinations(range(1, len(weights)), n_runs - 1)
    bounds = [(0, *cut, len(weights)) for cut in cuts]
    all_runs = [[tuple(range(a, b)) for a, b in itertools.pairwise(bound)] for bound in bounds]
    found = balanced_runs(weights, n_runs)
    assert found in all_runs and heaviest(found) == min(map(heaviest, all_runs))


def test_costs_on_disk_are_used_again_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.json"
    method = AutoParallel(
        layer_option=AutoLayerOption(), stage_option=AutoStageOption(cached_costs=str(path)), devices=V100
    )
    traced = mlp()
    first = plan_step(traced, V100, method.options())

    def refuse(*args: Any) -> Any:
        raise AssertionError("solves again")

    monkeypatch.setattr(SublayerCosts, "_solve", refuse)
    assert plan_step(traced, V100, method.options()) == first
    path.write_text("[]")
    with pytest.raises(VerifyError, match="has no costs of a search"):
        plan_step(traced, V100, method.options())
    path.write_text('{"version": 0}')
    assert load_costs(str(path)) == {}
