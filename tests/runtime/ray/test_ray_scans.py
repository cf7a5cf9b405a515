"""Stages that end inside a scan over layers, on a Ray cluster: blocks of rows stay on the workers of their stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa import DeletedArrayError, PipeshardParallel, ShardParallel, UniformStageOption
from minialpa.runtime.arrays import BlockedArray
from minialpa.runtime.cluster.cluster_executable import ClusterExecutable
from minialpa.runtime.cluster.distributed_array import DistributedArray
from minialpa.runtime.leaf_border import BlockedCalls
from minialpa.session import current_session
from minialpa.testing import assert_allclose
from tests.runtime.block_programs import LEAF, program
from tests.runtime.ray.ray_cluster import WORKER_ENV
from tests.test_unstacked_training import Perceptron, by_hand, pipeline

# tests/runtime/test_leaf_border.py and tests/test_unstacked_training.py have the short relatives, in one process.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]

BATCH = 16
TWO_STAGES = pipeline(UniformStageOption(2), 2)


@pytest.fixture(scope="module", autouse=True)
def _session(cluster: Cluster) -> None:
    minialpa.init(cluster="ray", address=cluster.address, num_hosts=2, devices_per_host=1, worker_env=WORKER_ENV)


def blocked_leaves(state: Any) -> list[BlockedArray]:
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, BlockedArray)]
    assert leaves
    return leaves


def blocks_of(state: Any) -> list[DistributedArray]:
    return [block for leaf in blocked_leaves(state) for block in leaf.blocks]


def steps(method: PipeshardParallel = TWO_STAGES) -> tuple[Any, Any, Any]:
    """A model of five scanned layers, its step on one device, and its step on the cluster."""
    case = Perceptron(5, again=True).case()
    expected_step = jax.jit(case.train_step(jax.value_and_grad))
    return case, expected_step, minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)


@pytest.mark.parametrize("is_presharded", [False, True])
def test_blocks_stay_on_the_workers(is_presharded: bool, key: jax.Array) -> None:
    case, expected_step, actual_step = steps()
    expected = actual = case.init(key)
    if is_presharded:
        actual = actual_step.preshard_dynamic_args(actual, case.make_batch(0, BATCH))[0]
        assert not any(block.held_here for block in blocks_of(actual))
    losses = []
    for i in range(3):
        batch = case.make_batch(i, BATCH)
        expected, metrics = expected_step(expected, batch)
        old, (actual, actual_metrics) = actual, actual_step(actual, batch)
        losses.append((actual_metrics, metrics))
        if i or is_presharded:
            assert all(leaf.is_deleted() for leaf in blocked_leaves(old))
            assert not any(block.held_here for block in blocks_of(old))
        assert not any(block.held_here for block in blocks_of(actual))
        for leaf in blocked_leaves(actual):
            assert len(leaf.blocks) == 2 and len({block.mesh_ids for block in leaf.blocks}) == 2
    for a, b in losses:
        assert_allclose(a, b, rtol=2e-4, atol=1e-6)
    assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("other", "is_fetched"),
    [
        (pipeline(by_hand([[0, 1], [2, 3, 4]]), 5), False),
        (TWO_STAGES, True),
    ],
    ids=["blocks on other stages", "blocks of other rows"],
)
def test_blocks_go_from_one_plan_to_another(other: PipeshardParallel, is_fetched: bool, key: jax.Array) -> None:
    """Workers send each other blocks that lie elsewhere. What is given stays the caller's."""
    case, expected_step, actual_step = steps(pipeline(by_hand([[0], [1, 2, 3, 4]]), 5))
    batch = case.make_batch(0, BATCH)
    state, _ = actual_step(case.init(key), batch)
    step = case.train_step(minialpa.value_and_grad)
    other_step = minialpa.parallelize(step, method=other, donate_argnums=())
    actual, _ = other_step(state, batch)
    assert any(block.held_here for block in blocks_of(state)) == is_fetched
    host = jax.device_get(state)
    assert [len(leaf.blocks) for leaf in blocked_leaves(state)] == [5] * len(blocked_leaves(state))
    assert not any(leaf.is_deleted() for leaf in blocked_leaves(state))
    expected, _ = expected_step(host, batch)
    assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)


def test_a_step_on_one_mesh_takes_the_blocks(key: jax.Array) -> None:
    case, expected_step, actual_step = steps()
    batch = case.make_batch(0, BATCH)
    state, _ = actual_step(case.init(key), batch)
    host = jax.device_get(state)
    step = case.train_step(minialpa.value_and_grad)
    actual, _ = minialpa.parallelize(step, method=ShardParallel())(state, batch)
    expected, _ = expected_step(host, batch)
    assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)
    assert all(leaf.is_deleted() for leaf in blocked_leaves(state))


def test_workers_hold_one_state(key: jax.Array) -> None:
    case, _, step = steps()
    state = case.init(key)
    held = []
    for i in range(6):
        state, metrics = step(state, case.make_batch(i, BATCH))
        float(metrics["loss"])
        runtime = step.get_last_executable().runner.runtime
        workers = [worker for mesh in runtime._meshes.values() for worker in mesh.workers]
        held.append([counts["arrays"] for counts in runtime.ask(workers, "counts")])
    assert held[2] == held[5], held


# ---- programs made by hand -------------------------------------------------------------------------------------------


def on_workers(**changes: Any) -> BlockedCalls:
    made = program(**changes)
    return BlockedCalls(ClusterExecutable(current_session().runtime, made), made.blocks)


def is_held_here(leaf: BlockedArray) -> bool:
    return any(block.held_here for block in leaf.blocks)


def test_donated_blocks_never_leave_the_workers() -> None:
    step = on_workers()
    (state,) = step.place([LEAF])
    for _ in range(3):
        (new,) = step([state])
        assert state.is_deleted() and not is_held_here(state) and not is_held_here(new)
        state = new
    assert [block.mesh_ids for block in state.blocks] == [(0,), (1,)]
    np.testing.assert_array_equal(state, LEAF + 3)
    assert step.place([state])[0] is state


@pytest.mark.parametrize("leaf", [LEAF, jnp.asarray(LEAF)], ids=["numpy", "jax"])
def test_arrays_of_this_process_are_sent_in_blocks(leaf: Any) -> None:
    step = on_workers()
    for _ in range(2):
        np.testing.assert_array_equal(step([leaf])[0], LEAF + 1)
    np.testing.assert_array_equal(leaf, LEAF)


@pytest.mark.parametrize("is_donated", [False, True])
@pytest.mark.parametrize(
    ("changes", "is_fetched"),
    [({"meshes": (1, 0)}, False), ({"rows": ((0, 4), (4, 5))}, True)],
    ids=["blocks on other stages", "blocks of other rows"],
)
def test_blocks_that_another_program_left(changes: dict[str, Any], is_fetched: bool, is_donated: bool) -> None:
    (state,) = on_workers().place([LEAF])
    (result,) = on_workers(**changes, donated=(0, 1) if is_donated else ())([state])
    assert state.is_deleted() == is_donated
    assert is_donated or is_held_here(state) == is_fetched
    np.testing.assert_array_equal(result, LEAF + 1)


@pytest.mark.parametrize("is_donated", [False, True])
def test_an_array_in_one_piece_is_cut(is_donated: bool) -> None:
    one_piece = on_workers(rows=((0, 5),), read=(0,), donated=())
    (leaf,) = one_piece([LEAF - 1])
    assert isinstance(leaf, DistributedArray)
    (result,) = on_workers(donated=(0, 1) if is_donated else ())([leaf])
    assert leaf.is_deleted() == is_donated
    np.testing.assert_array_equal(result, LEAF + 1)


def test_rows_that_no_stage_reads_stay_where_they_are() -> None:
    step = on_workers(read=(1,), donated=())
    assert step.place([LEAF])[0] is LEAF
    np.testing.assert_array_equal(step([LEAF])[0], LEAF[2:] + 1)


def test_blocks_that_were_given_away_are_refused() -> None:
    step = on_workers()
    (state,) = step.place([LEAF])
    step([state])
    for use in (step, step.place):
        with pytest.raises(DeletedArrayError, match="deleted or donated"):
            use([state])


def test_a_program_that_knows_no_blocks_uses_them_up() -> None:
    (state,) = on_workers().place([LEAF])
    one_piece = ClusterExecutable(current_session().runtime, program(rows=((0, 5),), read=(0,), donated=(0,)))
    np.testing.assert_array_equal(one_piece([state])[0], LEAF + 1)
    assert state.is_deleted() and all(block.is_deleted() for block in state.blocks)
