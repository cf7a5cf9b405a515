"""The border of a step and its program: leaves are split into blocks of rows without copies, and results are joined."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.arrays import RemoteArray
from minialpa.errors import DeletedArrayError
from minialpa.runtime.arrays import BlockedArray, LeafRows
from minialpa.runtime.local import LocalExecutable
from minialpa.runtime.runner import BlockedCalls, joined_leaves, split_leaves
from tests.runtime.block_programs import LEAF, ROWS, program

#: Leaf 0 is in blocks, leaf 1 is not.
BLOCKS = (ROWS, None)


class Elsewhere(RemoteArray):
    """A remote array that counts how often its value is fetched."""

    def __init__(self, value: Any) -> None:
        self.value, self.shape, self.dtype = value, value.shape, value.dtype
        self.n_fetched, self.deleted = 0, False

    def _fetch(self) -> Any:
        self.n_fetched += 1
        return self.value

    def block_until_ready(self) -> Elsewhere:
        return self

    def is_deleted(self) -> bool:
        return self.deleted

    def delete(self) -> None:
        self.deleted = True


def blocked(array: Any, *lengths: int) -> BlockedArray:
    stops = np.cumsum(lengths)
    return BlockedArray([jnp.asarray(array[stop - n : stop]) for n, stop in zip(lengths, stops, strict=True)])


# ---- splitting and joining -------------------------------------------------------------------------------------------


def test_blocks_that_fit_are_taken_unchanged() -> None:
    leaf, partly, other = blocked(LEAF, 2, 3), blocked(LEAF, 2, 1, 2), jnp.ones(3)
    first, second, third = split_leaves([leaf, other], BLOCKS)
    assert first is leaf.blocks[0] and second is leaf.blocks[1] and third is other
    first, second, _ = split_leaves([partly, LEAF], BLOCKS)
    assert first is partly.blocks[0] and isinstance(second, LeafRows)
    np.testing.assert_array_equal(second, LEAF[2:])


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray, Elsewhere, lambda x: blocked(x, 1, 3, 1)])
def test_rows_of_any_array_are_blocks(make: Any) -> None:
    leaf = make(LEAF)
    parts = split_leaves([leaf, leaf], BLOCKS)
    assert not isinstance(leaf, Elsewhere) or leaf.n_fetched == 0
    assert [part.shape for part in parts] == [(2, 2), (3, 2), (5, 2)] and parts[2] is leaf
    for part, (start, stop) in zip(parts, ROWS, strict=False):
        np.testing.assert_array_equal(np.asarray(part), LEAF[start:stop])
        assert part.dtype == LEAF.dtype
        if isinstance(leaf, np.ndarray | jax.Array):
            assert np.shares_memory(np.asarray(part), np.asarray(leaf))


def test_the_value_of_rows_shares_no_memory_with_the_array() -> None:
    leaf = jnp.asarray(LEAF)
    value = LeafRows(leaf, (2, 5))[...]
    assert isinstance(value, jax.Array)
    value.delete()
    np.testing.assert_array_equal(leaf, LEAF)


def test_rows_are_of_the_arrays_that_hold_the_data() -> None:
    leaf, local = Elsewhere(LEAF), jnp.asarray(LEAF)
    assert LeafRows(leaf, (0, 2)).stored_as == (leaf,)
    assert LeafRows(local, (0, 2)).stored_as == (local,)
    both = blocked(LEAF, 1, 4)
    assert LeafRows(both, (0, 2)).stored_as == both.blocks == both.stored_as


def test_typed_keys_have_rows_and_come_back_as_keys_of_jax() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    first, second = split_leaves([keys], (ROWS,))
    assert first.dtype == keys.dtype and second.shape == (3,)
    (joined,) = joined_leaves([first[...], second[...]], (ROWS,))
    assert joined.dtype == keys.dtype and joined.shape == (5,)
    assert jnp.array_equal(jax.random.key_data(joined), jax.random.key_data(keys))
    remote = BlockedArray([keys[:2], keys[2:]])
    assert len(list(remote)) == len(keys)
    assert jnp.array_equal(jax.random.key_data(pickle.loads(pickle.dumps(remote))), jax.random.key_data(keys))


def test_results_in_blocks_are_joined() -> None:
    parts = [jnp.zeros((2, 2)), jnp.ones((3, 2)), jnp.ones(4)]
    leaf, other = joined_leaves(parts, BLOCKS)
    assert isinstance(leaf, BlockedArray) and leaf.blocks == tuple(parts[:2]) and leaf.ranges == ROWS
    assert other is parts[2]
    assert joined_leaves(parts, ()) == parts


# ---- calls of a program ----------------------------------------------------------------------------------------------


def calls(**changes: Any) -> BlockedCalls:
    made = program(**changes)
    return BlockedCalls(LocalExecutable(made, jax.devices()), made.blocks)


@pytest.mark.parametrize(
    ("make", "n_devices"),
    [
        (np.array, 1),
        (jnp.array, 1),
        (jnp.array, 2),
        (Elsewhere, 1),
        (lambda x: blocked(x, 2, 3), 1),
        (lambda x: blocked(x, 4, 1), 2),
    ],
)
def test_no_call_takes_over_an_array_in_another_layout(make: Any, n_devices: int) -> None:
    leaf = make(LEAF)
    step = calls(n_devices=n_devices)
    for given in (leaf, leaf, step.place([leaf])[0]):
        (result,) = step([given])
        assert isinstance(result, BlockedArray) and result.ranges == ROWS
        np.testing.assert_array_equal(result, LEAF + 1)
        assert not isinstance(leaf, jax.Array | RemoteArray) or not leaf.is_deleted()
        np.testing.assert_array_equal(np.asarray(leaf), LEAF)


def test_one_block_may_be_in_two_places() -> None:
    """A donated block has one memory, which only one result can take over."""
    step = calls(rows=((0, 2), (2, 4)), meshes=(0, 0))
    block = step.place([LEAF[:4]])[0].blocks[0]
    (result,) = step([BlockedArray([block, block])])
    np.testing.assert_array_equal(result, np.concatenate([LEAF[:2], LEAF[:2]]) + 1)


def test_placed_blocks_are_where_the_stages_read_them() -> None:
    step = calls(n_devices=2)
    (state,) = step.place([LEAF])
    assert isinstance(state, BlockedArray)
    assert [block.sharding.device_set for block in state.blocks] == [set(jax.devices()[:2]), set(jax.devices()[2:4])]
    np.testing.assert_array_equal(state, LEAF)
    assert step.place([state])[0] is state


@pytest.mark.parametrize("make", [np.array, jnp.array, Elsewhere, lambda x: blocked(x, 4, 1)])
def test_a_leaf_with_rows_that_no_stage_reads(make: Any) -> None:
    step = calls(read=(1,), donated=(1,))
    leaf = make(LEAF)
    assert step.place([leaf])[0] is leaf
    (result,) = step([leaf])
    np.testing.assert_array_equal(result, LEAF[2:] + 1)
    state = blocked(LEAF, 2, 3)
    (placed,) = step.place([state])
    assert placed.blocks[0] is state.blocks[0]
    np.testing.assert_array_equal(placed, LEAF)


@pytest.mark.parametrize("make", [jnp.array, Elsewhere, lambda x: blocked(x, 2, 3), lambda x: blocked(x, 4, 1)])
def test_deleted_arrays_are_refused(make: Any) -> None:
    step, leaf = calls(), make(LEAF)
    leaf.delete()
    for use in (step, step.place):
        with pytest.raises(DeletedArrayError, match="has been deleted: it was donated to another call"):
            use([leaf])


def test_a_program_that_knows_no_blocks_leaves_them_to_the_caller() -> None:
    runner = LocalExecutable(program(rows=((0, 5),), read=(0,), donated=(0,)), jax.devices())
    state = blocked(LEAF, 2, 3)
    for _ in range(2):  # the second call must not take the fast path of whole leaves
        np.testing.assert_array_equal(runner([state])[0], LEAF + 1)
        np.testing.assert_array_equal(runner.place([state])[0], LEAF)
    assert not state.is_deleted()
    keeps = LocalExecutable(program(rows=((0, 5),), read=(0,), donated=()), jax.devices())
    for _ in range(2):
        np.testing.assert_array_equal(keeps([state])[0], LEAF + 1)
