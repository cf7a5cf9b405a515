"""Loops with an exit for each example, over micro-batches and on meshes: the results of the serial run, in one pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import minialpa
from minialpa import DataParallel, ShardParallel
from minialpa.methods import Method
from minialpa.testing import assert_allclose
from tests.equivalence.layers import Layer
from tests.equivalence.losses import Loss, Term
from tests.equivalence.model import Model
from tests.equivalence.steps import Training, batch_argnums, make_args, make_step
from tests.helpers import split_equals_serial


def _n_loops(layer: str, method: Method) -> int:
    """The loops over micro-batches of a step with one layer, after a check of its results."""
    training = Training(Model("vector", (Layer(layer),)), Loss((Term("squared", "mean"),)))
    args = make_args(training)
    parallel = minialpa.parallelize(
        make_step(training), method=method, batch_argnums=batch_argnums(training), donate_argnums=()
    )
    assert_allclose(parallel(*args), jax.jit(make_step(training))(*args), rtol=2e-5, atol=1e-6)
    return parallel.get_last_executable().get_parallel_plan().n_loops


@pytest.mark.parametrize(("layer", "n_loops"), [("until_small", 1), ("solved", 1), ("halved_together", 2)])
def test_two_micro_batches_compute_the_step_in_one_pass_unless_examples_meet(layer: str, n_loops: int) -> None:
    assert _n_loops(layer, ShardParallel(jax.devices()[:1], 2)) == n_loops


@pytest.mark.parametrize("layer", ["halved_by_hand", "mapped"])
def test_devices_run_loops_of_their_own(layer: str) -> None:
    assert _n_loops(layer, DataParallel(jax.devices()[:4], 2)) == 1


def test_a_loop_over_the_batch_counts_the_iterations_of_the_last_example() -> None:
    def step(w: Any, x: Any) -> Any:
        def body(c: Any) -> Any:
            n, x = c
            return n + 1, jnp.where(jnp.abs(x) > 1, 0.5 * x, x)

        return lax.while_loop(lambda c: jnp.any(jnp.abs(c[1]) > 1), body, (0, x @ w))

    growing = np.linspace(0.3, 30, 32, dtype=np.float32).reshape(8, 4)
    assert split_equals_serial(step, np.eye(4, dtype=np.float32), growing).n_loops == 1
