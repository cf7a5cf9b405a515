"""Methods by name as candidates of a search: the search succeeds where one of them does, and costs no more."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import minialpa
from benchmarks.corpus import Case, arguments
from benchmarks.planning import planned, traced_step
from minialpa import (
    AutoLayerOption,
    AutoParallel,
    AutoShardingOption,
    AutoStageOption,
    ClusterSpec,
    DataParallel,
    PipeshardParallel,
    Plan,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
)
from minialpa.errors import InfeasibleError
from minialpa.inter import by_name, pipeline
from minialpa.inter.build_plan import StageTooLargeError
from minialpa.inter.context import PlanningContext, compiler_of
from minialpa.inter.search import stage_in_memory, stage_solve
from minialpa.inter.search.stage_solve import StageSolver
from minialpa.methods import Method
from minialpa.options import DATA_PARALLEL_METHODS, PlanOptions
from minialpa.tracing.trace import TracedStep

GPUS = ClusterSpec.preset("v100-p3.16xlarge", num_hosts=1, devices_per_host=4)
CPUS = ClusterSpec.preset("cpu", num_hosts=1, devices_per_host=4)
BY_NAME = (ShardParallel, DataParallel, Zero2Parallel, Zero3Parallel)


def traced(model: str, **sizes: Any) -> TracedStep:
    built = Case(model, model, tuple(sizes.items())).build()
    return traced_step(built.train_step(minialpa.value_and_grad), *arguments(built))


@pytest.fixture(scope="module")
def mlp() -> TracedStep:
    return traced("mlp", batch_size=64, hidden=128, n_layers=3)


def searching(n: int | None, planned_steps: float, sharding: AutoShardingOption | None = None) -> Method:
    stages = AutoStageOption(planned_steps=planned_steps)
    if n is None:
        return AutoParallel(stage_option=stages, auto_sharding_option=sharding)
    layers = AutoLayerOption(remat="auto")
    return PipeshardParallel(
        num_micro_batches=n, layer_option=layers, stage_option=stages, default_auto_sharding_option=sharding
    )


def best_by_name(
    step: TracedStep, cluster: ClusterSpec, numbers: Sequence[int], sharding: AutoShardingOption | None = None
) -> Plan:
    methods = [cls(num_micro_batches=n, auto_sharding_option=sharding) for cls in BY_NAME for n in numbers]
    plans = []
    for method in methods:
        try:
            plans.append(planned(step, cluster, method))
        except InfeasibleError:
            continue
    return min(plans, key=lambda plan: plan.cost.total_s)


@pytest.mark.parametrize(
    "cluster, planned_steps, n",
    [(CPUS, 10_000, 4), (GPUS, math.inf, None)],
)
def test_no_method_by_name_is_faster(
    mlp: TracedStep, cluster: ClusterSpec, planned_steps: float, n: int | None
) -> None:
    found = planned(mlp, cluster, searching(n, planned_steps))
    assert found.cost.total_s <= best_by_name(mlp, cluster, (1, 2, 4) if n is None else (n,)).cost.total_s


def test_no_method_by_name_is_faster_in_short_memory() -> None:
    small = traced("mlp", batch_size=64, hidden=128, n_layers=2)
    free = planned(small, GPUS, ShardParallel(num_micro_batches=4))
    limit = 0.7 * max(free.cost.peak_bytes)
    short = AutoShardingOption(memory_limit_bytes=limit)
    found = planned(small, GPUS, searching(4, math.inf, short))
    assert max(found.cost.peak_bytes) <= limit
    assert found.cost.total_s <= best_by_name(small, GPUS, (4,), short).cost.total_s


def test_a_search_that_finds_nothing_takes_what_fits_by_name(mlp: TracedStep, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the number of micro-batches is open, also at the best number near one example for each device."""
    whole = pipeline._planned

    def only_by_name(context: Any) -> Plan:
        if context.options.layers is not None:
            raise InfeasibleError("nothing fits")
        return whole(context)

    monkeypatch.setattr(pipeline, "_planned", only_by_name)
    for n in (None, 4):
        found = planned(mlp, GPUS, searching(n, math.inf))
        assert found == dataclasses.replace(best_by_name(mlp, GPUS, (found.n_micro_batches,)), certificate=None)
        assert n in (None, found.n_micro_batches)

    nothing = AutoShardingOption(memory_limit_bytes=1000)
    with pytest.raises(InfeasibleError, match="nothing fits"):
        planned(mlp, GPUS, searching(4, math.inf, nothing))


def test_large_steps_try_methods_by_name_only_without_another_plan(
    mlp: TracedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, tried, fails = pipeline._planned, [], False

    def noted(context: Any) -> Plan:
        tried.append("search" if context.options.layers is not None else "by name")
        if fails and tried[-1] == "search":
            raise InfeasibleError("nothing fits")
        return whole(context)

    monkeypatch.setattr(pipeline, "_planned", noted)
    monkeypatch.setattr(by_name, "_LARGE_EQUATIONS", 0)
    found = planned(mlp, GPUS, searching(4, math.inf))
    assert set(tried) == {"search"} and found.n_micro_batches == 4
    fails = True
    assert planned(mlp, GPUS, searching(4, math.inf)).n_micro_batches == 4 and "by name" in tried


def test_a_single_stage_is_tried_with_far_fewer_micro_batches(mlp: TracedStep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it loses with the number of the search, and with half of that."""
    whole, by_number = pipeline._planned, {n: planned(mlp, GPUS, ShardParallel(num_micro_batches=n)) for n in (8, 64)}
    cost = dataclasses.replace(by_number[64].cost, total_s=1.001 * by_number[8].cost.total_s)
    assert planned(mlp, GPUS, ShardParallel(num_micro_batches=32)).cost.total_s > cost.total_s

    def with_many_micro_batches(context: Any) -> Plan:
        is_search = context.options.layers is not None
        return dataclasses.replace(by_number[64], cost=cost) if is_search else whole(context)

    monkeypatch.setattr(pipeline, "_planned", with_many_micro_batches)
    found = planned(mlp, GPUS, searching(None, math.inf))
    assert found.cost.total_s <= best_by_name(mlp, GPUS, (1, 2, 4, 8)).cost.total_s


def test_only_what_is_not_faster_is_given_up(mlp: TracedStep) -> None:
    """The oracle: the plan for a caller without a plan. The compute of free shardings gives up every method."""
    n_given_up, least_s = 0, 0.0
    reference_s = planned(mlp, GPUS, ShardParallel(num_micro_batches=4)).cost.total_s
    for cls in BY_NAME:
        options = cls(num_micro_batches=4).options()
        solver = StageSolver(compiler_of(GPUS))
        given_up_s = [0.0]
        for part in (0.1, 0.3, 0.8, 1.01):
            below_s = part * reference_s
            with contextlib.suppress(InfeasibleError):
                try:
                    pipeline._planned(asking(mlp, GPUS, options, solver, below_s))
                except StageTooLargeError as error:
                    given_up_s += [below_s] * error.is_too_slow
                    least_s = max(least_s, below_s) if error.by_compute and cls is ShardParallel else least_s
        with contextlib.suppress(InfeasibleError):
            found = pipeline._planned(asking(mlp, GPUS, options, solver, math.inf))
            assert found.cost.total_s >= max(*given_up_s, least_s)
        n_given_up += len(given_up_s) - 1
    assert n_given_up > 0 and least_s > 0


def test_what_a_bound_rules_out_is_solved_once_and_never_measured(
    mlp: TracedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, known = Zero3Parallel(num_micro_batches=4).options(), StageSolver(compiler_of(GPUS))
    pipeline._planned(asking(mlp, GPUS, options, known, math.inf))
    bound_s = max(one.bound_s for one in known._solutions.values())
    calls: dict[str, int] = {}
    for module, name in ((stage_solve, "_cheapest_solution"), (stage_in_memory, "mesh_memory")):
        monkeypatch.setattr(module, name, counting(getattr(module, name), calls, name))

    solver = StageSolver(compiler_of(GPUS))
    for part in (1.0, 0.999):
        with pytest.raises(StageTooLargeError, match="another plan takes") as error:
            pipeline._planned(asking(mlp, GPUS, options, solver, part * bound_s))
        assert error.value.is_too_slow
    assert calls == {"_cheapest_solution": 1}


def counting(function: Callable[..., Any], calls: dict[str, int], name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        return function(*args, **options)

    return call


def test_variants_that_change_the_step_are_candidates(mlp: TracedStep) -> None:
    narrow = traced("mlp", batch_size=16, hidden=32, n_layers=2, dtype="bfloat16")
    solver = StageSolver(compiler_of(CPUS))
    for step, n, casts in ((mlp, 4, False), (narrow, 1, False), (narrow, 4, True)):
        options = ShardParallel(num_micro_batches=n).options()
        assert by_name._open_variants(asking(step, CPUS, options, solver, math.inf), n) == (False, casts, False)


def asking(
    step: TracedStep, cluster: ClusterSpec, options: PlanOptions, solver: StageSolver, below_s: float
) -> PlanningContext:
    return PlanningContext(
        traced=step,
        cluster=cluster,
        solver=solver,
        options=options,
        logical_mesh=None,
        report=lambda what, done, total: None,
        below_s=below_s,
    )


def test_methods_by_name_stand_for_their_options() -> None:
    names = {cls.__name__: cls for cls in BY_NAME[1:]}
    assert list(names) == list(DATA_PARALLEL_METHODS)
    found = list(by_name.shardings_by_name(AutoShardingOption(), AutoStageOption()))
    assert found == [AutoShardingOption(), *(cls().options().sharding for cls in names.values())]


@pytest.mark.parametrize(
    "given, auto, n_methods",
    [
        (AutoShardingOption(prefer_reduce_scatter=True), AutoStageOption(), 3),  # not DataParallel
        (AutoShardingOption(allow_replicated_parameters=False), AutoStageOption(), 2),  # ZeRO-3
        (AutoShardingOption(force_batch_dim_to_mesh_dim=0), AutoStageOption(), 1),
        (AutoShardingOption(), AutoStageOption(submesh_logical_shape_space="same_as_physical"), 0),
    ],
)
def test_what_the_user_asks_for_is_kept(given: AutoShardingOption, auto: AutoStageOption, n_methods: int) -> None:
    found = list(by_name.shardings_by_name(given, auto))
    assert len(found) == n_methods
    for name in given.set_names:
        assert all(getattr(option, name) == getattr(given, name) for option in found)
