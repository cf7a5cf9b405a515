"""Stages in short memory are solved with larger or smaller limits until a solution fills the memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.extend.core import Var

import minialpa
from benchmarks.corpus import arguments
from benchmarks.planning import planned, traced_step
from minialpa import (
    AutoLayerOption,
    AutoShardingOption,
    ClusterSpec,
    LogicalMesh,
    PipeshardParallel,
    ShardParallel,
    models,
)
from minialpa.inter.search import stage_solve
from minialpa.inter.search.stage_in_memory import _LimitSearch, splits_of_examples, standard_plans
from minialpa.inter.search.stage_memory import mesh_usages
from minialpa.inter.staging.mesh_problem import ShardedView
from minialpa.inter.staging.staged_step import stage_step
from minialpa.intra.graph.decisions import Choice
from minialpa.intra.graph.memory_constraints import Usage, demands_of
from minialpa.intra.memory.xla.model import XLA_GPU
from minialpa.ir.equations import bytes_of
from minialpa.sharding import Spec

LIMIT = 1000.0


def limits_for(needs: Callable[[float], float], guess: float = 0.0) -> list[tuple[float, float]]:
    """The limits that are tried, each with the final bytes of its solution.

    needs: these bytes, by limit; inf if there is no solution.
    """
    search, tried = _LimitSearch(LIMIT), list[tuple[float, float]]()
    limit: float | None = search.first(guess)
    while limit is not None and len(tried) < 10:
        n_bytes = needs(limit)
        tried.append((round(limit, 6), n_bytes))
        limit = search.after_none(limit) if math.isinf(n_bytes) else search.after(limit, limit, n_bytes)
    return tried


def test_limit_shrinks_by_what_is_missing() -> None:
    assert limits_for(lambda limit: limit + 50) == [(1000, 1050), (950, 1000)]


def test_a_guess_that_fills_the_memory_is_the_only_solve() -> None:
    assert limits_for(lambda limit: limit + 45, guess=50) == [(950, 995)]


def test_a_guess_that_leaves_memory_is_followed_by_a_larger_limit() -> None:
    assert limits_for(lambda limit: limit, guess=300) == [(700, 700), (1000, 1000)]


def test_limits_are_interpolated_between_too_much_and_too_little() -> None:
    # Each counted byte needs two more beyond 400.
    tried = limits_for(lambda limit: 3 * limit - 800)
    assert tried[0] == (1000, 2200) and LIMIT * 0.99 <= tried[-1][1] <= LIMIT and len(tried) <= 4


@pytest.mark.parametrize("least", [500.0, 900.0])
def test_limits_stay_above_limits_without_a_solution(least: float) -> None:
    tried = limits_for(lambda limit: limit + 400 if limit >= least else math.inf)
    assert any(math.isinf(n_bytes) for _, n_bytes in tried) == (least > 600)
    assert min((n_bytes for _, n_bytes in tried), default=0.0) <= max(LIMIT, least + 400 + 50)


def test_a_guess_too_small_for_a_solution_is_followed_by_the_limit() -> None:
    assert limits_for(lambda limit: limit if limit > 960 else math.inf, guess=50) == [(950, math.inf), (1000, 1000)]
    assert limits_for(lambda _: math.inf) == [(1000, math.inf)]


def test_a_solution_below_its_limit_is_the_cheapest_with_a_larger_one() -> None:
    assert _LimitSearch(LIMIT).after(1000, 600, 700) is None


def plan_of(case: models.ModelCase, option: AutoShardingOption) -> minialpa.Plan:
    state = jax.eval_shape(case.init, jax.random.key(0))
    method = ShardParallel(devices=LogicalMesh((4,)), auto_sharding_option=option)
    return minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method).plan(
        state, case.make_batch(0, case.batch_size)
    )


def test_where_zero_3_fits_there_is_a_plan_that_is_no_slower() -> None:
    # Weights are gathered before the first product, which the limit does not count at first.
    case = models.build("resnet", batch_size=8, filters=4, stage_sizes=(1,), image_size=8)
    zero = plan_of(case, AutoShardingOption(force_zero_stage_3=True))
    limit = zero.stages[0].peak_bytes
    found = plan_of(case, AutoShardingOption(memory_limit_bytes=limit))
    assert found.stages[0].peak_bytes <= limit
    assert found.cost.total_s <= zero.cost.total_s


def test_known_shardings_of_a_stage_serve_where_they_keep_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle: the same pipeline, each stage of which is solved separately."""
    case = models.build("mlp", batch_size=512, hidden=64, n_layers=16)
    traced = traced_step(case.train_step(minialpa.value_and_grad), *arguments(case))
    cluster = ClusterSpec.preset("a100-80gb", num_hosts=4, devices_per_host=8)

    def plan(limit: float | None) -> minialpa.Plan:
        option = AutoShardingOption(memory_limit_bytes=limit)
        method = PipeshardParallel(
            num_micro_batches=16, layer_option=AutoLayerOption(layer_num=8), stage_option="uniform",
            default_auto_sharding_option=option,
        )  # fmt: skip
        return planned(traced, cluster, method)

    limit = 0.9 * max(stage.peak_bytes for stage in plan(None).stages)
    solved: list[int] = []
    solve = stage_solve._cheapest_solution
    monkeypatch.setattr(stage_solve, "_cheapest_solution", lambda *args: solved.append(1) or solve(*args))
    found, n_solved = plan(limit), len(solved)

    monkeypatch.setattr(stage_solve.StageSolver, "_cached_in_memory", lambda *args: None)
    each = plan(limit)
    assert n_solved < len(solved) - n_solved
    assert max(stage.peak_bytes for stage in found.stages) <= limit
    assert found.cost.total_s <= 1.005 * each.cost.total_s


def test_standard_plans_leave_alone_what_the_user_asks_for() -> None:
    mesh = LogicalMesh((2, 1))
    assert [option.force_batch_dim_to_mesh_dim for option in splits_of_examples(AutoShardingOption(), mesh)] == [0]
    for own in ({"force_zero_stage_3": True}, {"force_batch_dim_to_mesh_dim": 1}, {"enable_auto_sharding": False}):
        assert not list(standard_plans(AutoShardingOption(**own), mesh))  # type: ignore[arg-type]
    sharded = list(standard_plans(AutoShardingOption(allow_replicated_parameters=False), mesh))
    assert sharded and not any(option.allow_replicated_parameters for option in sharded)


def test_weights_count_as_an_equation_reads_them_where_they_are_gathered() -> None:
    weight, reader = Var(ShapedArray((8, 4), np.float32)), Var(ShapedArray((), np.float32))
    whole, rows, both = (Spec(dims) for dims in (((), ()), ((0,), ()), ((0, 1), ())))
    stored, read = Choice(0, (whole, rows, both)), Choice(1, (whole, rows, both))
    usage = Usage(weight, 1, 0, 3, reader=reader, if_gathered=True)
    (demand,) = demands_of([usage], {weight: stored}, (2, 2), lambda *key: {(weight, reader): read}.get(key))
    assert (demand.node, list(demand.n_bytes)) == (1, [128.0, 64.0, 0.0])


def test_the_limit_counts_the_memory_of_a_pass_whose_results_only_add_to_accumulators() -> None:
    # On GPUs, passes over micro-batches add all their results to accumulators.
    case = models.build("mlp", batch_size=64, hidden=64, n_layers=4)
    traced = traced_step(case.train_step(minialpa.value_and_grad), *arguments(case))
    staged = stage_step(traced, 4, (), (0,))
    view = ShardedView(LogicalMesh((4,)), adds_to_accumulators=True)
    usages = mesh_usages(staged, 0, ((1,),), view, compiler=XLA_GPU)
    made = {v for task in staged.tasks if task.per_micro_batch for eqn in task.eqns for v in eqn.outvars}
    assert sum(bytes_of(usage.var) for usage in usages if usage.var in made) > 4 * 16 * 64 * 4
