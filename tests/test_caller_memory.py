"""Steps keep the values of NumPy arrays at the trace or call, although a caller writes to the arrays later.

On CPUs, jax uses a NumPy array in place if it begins at a multiple of 64 bytes, as these do.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import minialpa
from minialpa.arrays import own_copy
from minialpa.inter.lower.exported_functions import array_type
from minialpa.runtime.cluster.distributed_array import DistributedArray

WIDTH = 64
METHODS = {
    "1 device": lambda: minialpa.ShardParallel(devices=jax.devices()[:1]),
    "pipeline": lambda: minialpa.PipeshardParallel(num_micro_batches=2, layer_option="manual", stage_option="uniform"),
}


def aligned(shape: tuple[int, ...], value: float) -> np.ndarray[Any, Any]:
    memory = np.empty(4 * int(np.prod(shape)) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : memory.size - 64 + start].view(np.float32).reshape(shape)
    array[...] = value
    return array


class Example:
    """A step that captures an array, returns captured ones and arguments, and takes long enough to be overtaken."""

    def __init__(self) -> None:
        self.captured = aligned((WIDTH, WIDTH), 0.01)
        self.state = {name: aligned((WIDTH, WIDTH), 0.02) for name in ("v", "w")}
        self.state["kept"] = aligned((WIDTH, WIDTH), 0.03)[::-2].T
        self.batch = {"x": aligned((WIDTH, WIDTH), 0.5)}

    def step(self, state: Any, batch: Any) -> Any:
        def loss_of(weights: Any) -> jax.Array:
            x = batch["x"] @ weights["w"]
            x, _ = jax.lax.scan(lambda x, _: (jax.jit(lambda x: jnp.tanh(x @ self.captured))(x), None), x, None, 30)
            minialpa.mark_pipeline_boundary()
            return jnp.mean((x @ weights["v"] + self.captured) ** 2)

        loss, grads = minialpa.value_and_grad(loss_of)(state)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
        return new, loss, state["kept"], batch["x"], jnp.asarray(self.captured)

    def expected(self) -> Any:
        copies = jax.tree.map(jnp.array, (self.state, self.batch))
        return jax.tree.map(np.array, jax.jit(self.step)(*copies))


def overwrite(*trees: Any) -> None:
    for leaf in jax.tree.leaves(trees):
        leaf[...] = 7.0


def check(results: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), results, expected)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_captured_array_may_be_changed_after_it_was_traced(method: Any) -> None:
    example = Example()
    expected = example.expected()
    step = minialpa.parallelize(example.step, method=method(), donate_argnums=())
    step.get_executable(example.state, example.batch)
    overwrite(example.captured)
    for _ in range(2):
        check(step(example.state, example.batch), expected)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_arguments_may_be_changed_as_soon_as_a_call_has_returned_or_placed_them(method: Any) -> None:
    example = Example()
    expected = example.expected()
    step = minialpa.parallelize(example.step, method=method())
    for _ in range(3):  # later calls know where arguments go, and lay them out in another way
        arguments = jax.tree.map(own_copy, (example.state, example.batch))
        results = step(*arguments)
        overwrite(arguments)
        check(results, expected)
    arguments = jax.tree.map(own_copy, (example.state, example.batch))
    placed = step.preshard_dynamic_args(*arguments)
    overwrite(arguments[0])
    check(step(*placed), expected)


def test_a_value_that_was_fetched_from_workers_cannot_be_written_to() -> None:
    """It stays what the workers have, and later steps may take it from here."""
    array = DistributedArray(Mock(), 0, array_type(np.zeros(3, np.float32)), ())
    array.keep(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(array)[0] = 7.0
    assert np.array(array).flags.writeable


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.int4])
def test_a_large_copy_has_the_values_and_is_used_in_place(dtype: Any) -> None:
    array = np.arange(3 << 18).reshape(3, -1).astype(dtype).T[::2]
    copy = own_copy(array)
    np.testing.assert_array_equal(copy, array)
    assert copy.dtype == array.dtype and copy.flags.c_contiguous
    assert copy.ctypes.data % 64 == 0 and not np.shares_memory(copy, array)
