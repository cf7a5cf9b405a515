"""`CreateStateParallel`: a state with the numbers of plain jax, made where the training step reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import CreateStateParallel, ShardingError, ShardParallel, Zero3Parallel, models
from minialpa.runtime.arrays import BlockedArray
from tests import scanned_training as scanned
from tests.runtime.cluster.in_process_session import in_process_session


@pytest.fixture(autouse=True)
def _no_session_stays() -> Iterator[None]:
    yield
    minialpa.shutdown()


def numbers(leaf: Any) -> np.ndarray:
    """The value of a leaf; of random keys, their integers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return np.asarray(jax.random.key_data(leaf if isinstance(leaf, jax.Array) else leaf[...]))
    return np.asarray(leaf)


def assert_same_bits(state: Any, expected: Any) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for (path, found), wanted in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
        np.testing.assert_array_equal(numbers(found), numbers(wanted), err_msg=name)


def assert_read_in_place(step: Any, state: Any, batch: Any) -> None:
    """The step takes every leaf in place: placing the arguments makes no new array."""
    placed = step.preshard_dynamic_args(state, batch)[0]
    for (path, found), given in zip(jax.tree.leaves_with_path(placed), jax.tree.leaves(state), strict=True):
        assert found is given, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("blocks", "local"),
        pytest.param("blocks", "cluster", marks=pytest.mark.slow),
        pytest.param("zero3", "cluster", marks=pytest.mark.slow),
    ],
)
def test_a_state_has_the_bits_of_plain_jax_and_is_read_in_place(name: str, where: str) -> None:
    with in_process_session(1, 4) if where == "cluster" else nullcontext():
        step = minialpa.parallelize(scanned.train_step, method=scanned.METHODS[name])
        create = minialpa.parallelize(scanned.init, method=CreateStateParallel(step, (scanned.BATCH,)))
        key = jax.random.key(3)
        state = create(key)
        expected = jax.jit(scanned.init)(key)
        assert_same_bits(state, expected)
        assert_read_in_place(step, state, scanned.BATCH)
        if name == "blocks":
            assert isinstance(state["params"]["layers"]["up"], BlockedArray)

        compiled = step.get_last_executable()
        assert create.plan(key) == compiled.get_parallel_plan()
        _, loss = step(state, scanned.BATCH)
        assert step.get_last_executable() is compiled, "the step was compiled twice"
        np.testing.assert_allclose(float(loss), float(jax.jit(scanned.train_step)(expected, scanned.BATCH)[1]), 1e-4)
        assert not key.is_deleted(), "the state shares memory with the argument"


def test_a_flax_train_state_has_the_bits_of_plain_jax() -> None:
    case = models.build("mlp", batch_size=8, hidden=8)
    batch = case.make_batch(0, 8)
    step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=Zero3Parallel())
    create = minialpa.parallelize(case.init, method=CreateStateParallel(step, (batch,)))
    state = create(jax.random.key(0))
    assert_same_bits(state, jax.jit(case.init)(jax.random.key(0)))
    assert_read_in_place(step, state, batch)


def test_one_other_argument_may_be_given_by_itself() -> None:
    x, y = jnp.ones(2), jnp.ones(3)
    with_pair = minialpa.parallelize(lambda state, batch: state)
    with_both = minialpa.parallelize(lambda state, x, y: state)
    for given, expected in (({"x": x}, ({"x": x},)), (x, (x,)), ((x,), (x,)), ((x, y), ((x, y),)), ([x, y], ([x, y],))):
        assert CreateStateParallel(with_pair, given).other_args == expected
    assert CreateStateParallel(with_both, (x, y)).other_args == (x, y)
    assert CreateStateParallel(minialpa.parallelize(lambda state, x, y=0: state), (x, y)).other_args == (x, y)
    assert CreateStateParallel(minialpa.parallelize(lambda *args: args[0]), (x, y)).other_args == (x, y)


def test_a_state_that_the_step_cannot_take_is_refused_by_name() -> None:
    step = minialpa.parallelize(scanned.train_step, method=ShardParallel())
    with pytest.raises(ShardingError, match=r"`train_step` is a parallelized function.*got a function"):
        CreateStateParallel(scanned.train_step, (scanned.BATCH,))  # type: ignore[arg-type]
    create = minialpa.parallelize(scanned.init, method=CreateStateParallel(step, (scanned.BATCH,)), donate_argnums=(0,))
    with pytest.raises(ShardingError, match="`donate_argnums`"):
        create(jax.random.key(0))
    create = minialpa.parallelize(scanned.init, method=CreateStateParallel(step, (scanned.BATCH,)))
    with pytest.raises(ShardingError, match=r"`train_step\.export_specs`"):
        create.export_specs(jax.random.key(0))
