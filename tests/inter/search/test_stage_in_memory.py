"""Stages in short memory are solved with ever less room until one solution fits, or at once where the room is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.core import ShapedArray
from jax.extend.core import Var

import minialpa
from minialpa import AutoShardingOption, LogicalMesh, ShardParallel, models
from minialpa.errors import InfeasibleError
from minialpa.inter.search import stage_in_memory
from minialpa.inter.search.stage_in_memory import splits_of_examples, standard_plans
from minialpa.intra.graph.decisions import Choice
from minialpa.intra.graph.memory_constraints import MemoryLimit, Usage, demands_of
from minialpa.sharding import Spec

LIMIT = 1000.0
#: Something is counted; what it is does not matter here.
COUNTED = MemoryLimit(LIMIT, (Usage(None, 1, 0, 1),))  # type: ignore[arg-type]


def solve(patch: pytest.MonkeyPatch, needs: Callable[[float], float], guess: float) -> tuple[Any, list[float]]:
    """The bytes that the solution needs, and the rooms that were tried. needs: bytes that the solution for a room
    takes in the end; inf if there is none."""
    rooms: list[float] = []

    def solved(_: Any, room: MemoryLimit, __: float) -> Any:
        rooms.append(room.limit_bytes)
        n_bytes = needs(room.limit_bytes)
        if math.isinf(n_bytes):
            raise InfeasibleError("Nothing fits; see `memory_limit_bytes`.")
        memory = SimpleNamespace(needed=n_bytes, peak_bytes=lambda _: n_bytes, largest=())
        return SimpleNamespace(sharding=SimpleNamespace(counted_bytes=room.limit_bytes), memory=memory)

    patch.setattr(stage_in_memory, "_solved", solved)
    patch.setattr(stage_in_memory, "needed", lambda memory, _: memory.needed)
    stage: Any = SimpleNamespace(solver=None)
    found = stage_in_memory._within_limit(stage, AutoShardingOption(), ((1,),), COUNTED, guess)
    return found.memory.needed, rooms


def test_room_shrinks_by_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert solve(monkeypatch, lambda room: room + 50, 0.0) == (1000.0, [1000.0, 950.0])


def test_a_guess_that_fits_is_the_only_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert solve(monkeypatch, lambda room: room + 45, 50.0) == (995.0, [950.0])


@pytest.mark.parametrize(
    "needs",
    [lambda room: room, lambda room: room + 60, lambda room: room if room > 960 else math.inf],
    ids=["leaves much", "does not fit", "too little room"],
)
def test_a_wrong_guess_changes_nothing(monkeypatch: pytest.MonkeyPatch, needs: Callable[[float], float]) -> None:
    needed, rooms = solve(monkeypatch, needs, 50.0)
    without, usual_rooms = solve(monkeypatch, needs, 0.0)
    assert (needed, rooms) == (without, [950.0, *usual_rooms])


def test_a_guess_is_taken_in_the_end_if_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(room: float) -> float:
        return 900.0 if room == 700.0 else 2000.0

    assert solve(monkeypatch, needs, 300.0)[0] == 900.0
    with pytest.raises(InfeasibleError, match="smallest plan found needs"):
        solve(monkeypatch, needs, 0.0)


def plan_of(case: models.ModelCase, option: AutoShardingOption) -> minialpa.Plan:
    state = jax.eval_shape(case.init, jax.random.key(0))
    method = ShardParallel(devices=LogicalMesh((4,)), auto_sharding_option=option)
    return minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method).plan(
        state, case.make_batch(0, case.batch_size)
    )


def test_where_zero_3_fits_there_is_a_plan_that_is_no_slower() -> None:
    # Weights are gathered before anything else runs, which the limit does not count at first.
    case = models.build("resnet", batch_size=8, filters=4, stage_sizes=(1,), image_size=8)
    zero = plan_of(case, AutoShardingOption(force_zero_stage_3=True))
    limit = zero.stages[0].peak_bytes
    found = plan_of(case, AutoShardingOption(memory_limit_bytes=limit))
    assert found.stages[0].peak_bytes <= limit
    assert found.cost.total_s <= zero.cost.total_s


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
