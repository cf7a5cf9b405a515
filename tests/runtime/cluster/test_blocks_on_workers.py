"""Stages that end inside a scan over layers, on a cluster: blocks of rows stay on the workers of their stages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import DeletedArrayError, UniformStageOption
from minialpa.runtime.arrays import BlockedArray
from minialpa.runtime.cluster.cluster_executable import ClusterExecutable
from minialpa.runtime.cluster.distributed_array import DistributedArray
from minialpa.runtime.runner import BlockedCalls
from minialpa.session import current_session
from minialpa.testing import assert_allclose
from tests.runtime.block_programs import LEAF, program
from tests.scanned_training import perceptron
from tests.test_unstacked_training import pipeline

pytestmark = pytest.mark.usefixtures("runtime")

BATCH = 16


def blocked_leaves(state: Any) -> list[BlockedArray]:
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, BlockedArray)]
    assert leaves
    return leaves


def is_held_here(state: Any) -> bool:
    """Whether any block has come to this process."""
    return any(block.held_here for leaf in blocked_leaves(state) for block in leaf.blocks)


def test_blocks_stay_on_the_workers(key: jax.Array) -> None:
    case = perceptron(5, again=True)
    expected_step = jax.jit(case.train_step(jax.value_and_grad))
    actual_step = minialpa.parallelize(
        case.train_step(minialpa.value_and_grad), method=pipeline(UniformStageOption(2), 2)
    )
    expected = actual = case.init(key)
    actual = actual_step.preshard_dynamic_args(actual, case.make_batch(0, BATCH))[0]
    for i in range(3):
        batch = case.make_batch(i, BATCH)
        expected, metrics = expected_step(expected, batch)
        old, (actual, actual_metrics) = actual, actual_step(actual, batch)
        assert_allclose(actual_metrics, metrics, rtol=2e-4, atol=1e-6)
        assert all(leaf.is_deleted() for leaf in blocked_leaves(old)) and not is_held_here((old, actual))
        for leaf in blocked_leaves(actual):
            assert [block.copies[0].mesh.first_device for block in leaf.blocks] == [0, 2]
    assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)


# ---- programs made by hand -------------------------------------------------------------------------------------------


def on_workers(**changes: Any) -> BlockedCalls:
    made = program(**changes)
    return BlockedCalls(ClusterExecutable(current_session().runtime, made), made.blocks)


def test_donated_blocks_never_leave_the_workers_and_are_refused_later() -> None:
    step = on_workers()
    (old,) = step.place([LEAF])
    state = old
    for _ in range(3):
        (new,) = step([state])
        assert state.is_deleted() and not is_held_here((state, new))
        state = new
    np.testing.assert_array_equal(state, LEAF + 3)
    assert step.place([state])[0] is state
    for use in (step, step.place):
        with pytest.raises(DeletedArrayError, match="deleted or donated"):
            use([old])


def test_arrays_of_this_process_are_sent_in_blocks_and_stay() -> None:
    step = on_workers()
    for leaf in (LEAF, jnp.asarray(LEAF)):
        for _ in range(2):
            np.testing.assert_array_equal(step([leaf])[0], LEAF + 1)
        np.testing.assert_array_equal(leaf, LEAF)
    some = on_workers(read=(1,), donated=())  # no stage reads the first rows
    assert some.place([LEAF])[0] is LEAF
    np.testing.assert_array_equal(some([LEAF])[0], LEAF[2:] + 1)


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
def test_an_array_in_one_piece_is_cut_and_blocks_are_joined(is_donated: bool) -> None:
    one_piece = ClusterExecutable(current_session().runtime, program(rows=((0, 5),), read=(0,), donated=(0,)))
    (leaf,) = one_piece([LEAF - 1])
    assert isinstance(leaf, DistributedArray)
    (result,) = on_workers(donated=(0, 1) if is_donated else ())([leaf])
    assert leaf.is_deleted() == is_donated
    np.testing.assert_array_equal(one_piece([result])[0], LEAF + 2)
    assert result.is_deleted() and all(block.is_deleted() for block in result.blocks)
