"""On GPUs a pass adds its results to the accumulators of the step, in the same program."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
from minialpa import AutoLayerOption, ClusterSpec, PipeshardParallel, ShardParallel, models
from minialpa.methods import Method
from minialpa.programs.program import Accumulate, Run
from minialpa.testing import assert_allclose
from tests.runtime.cluster.in_process_session import in_process_session

GPUS = ClusterSpec.preset("h100", devices_per_host=4)
SHARD = ShardParallel(GPUS, num_micro_batches=4)
PIPELINE = PipeshardParallel(GPUS, num_micro_batches=4, layer_option=AutoLayerOption(2), stage_option="uniform")


def test_a_step_equals_the_one_that_adds_apart_and_writes_accumulators_in_place() -> None:
    case = models.build("mlp", batch_size=16, hidden=8)
    batch = case.make_batch(0, case.batch_size)

    def trained(method: Method) -> tuple[minialpa.Executable, object, object]:
        step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
        state, metrics = step(case.init(jax.random.key(0)), batch)
        return step.get_last_executable(), state.opt_state, metrics

    inside, state, metrics = trained(SHARD)
    program = inside.program
    assert not any(isinstance(x, Accumulate) for x in program.instructions)
    # The same device under the name of a device that adds in separate programs.
    cpus = dataclasses.replace(GPUS, device=dataclasses.replace(GPUS.device, name="cpu"))
    outside, expected, wanted = trained(dataclasses.replace(SHARD, devices=cpus))
    assert any(isinstance(x, Accumulate) for x in outside.program.instructions)
    assert_allclose(metrics, wanted, rtol=1e-5, atol=1e-6)
    # First and second moments of Adam: gradients and their squares, of which float32 keeps seven digits.
    assert_allclose(state, expected, rtol=1e-4, atol=1e-6)

    # The results of one micro-batch are the donated arguments of the next one.
    number = next(i for i, f in enumerate(program.functions) if f.name == "step0")
    runs = [x for x in program.instructions if isinstance(x, Run) and x.function == number]
    assert len(runs) == 4
    for one, following in itertools.pairwise(runs):
        given = {following.inputs[k] for k in program.functions[number].donated}
        accumulators = set(one.outputs) & set(following.inputs)
        assert accumulators and accumulators <= given


def test_values_that_are_no_sums_are_combined_apart() -> None:
    """A maximum over the examples has no accumulator that begins with 0."""

    def step(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = batch @ w
            return jnp.mean(y**2), jnp.max(y)

        (_, largest), gradient = minialpa.value_and_grad(loss, has_aux=True)(w)
        return w - 0.1 * gradient, largest

    w, batch = -jnp.ones((8, 4)), np.abs(np.random.default_rng(0).normal(size=(16, 8))).astype(np.float32)
    new, largest = minialpa.parallelize(step, method=SHARD, batch_argnums=(1,))(w, batch)
    assert float(largest) < 0
    assert_allclose((new, largest), jax.jit(step)(w, batch), rtol=1e-5, atol=1e-6)


def test_workers_start_accumulators_at_zero() -> None:
    case = models.build("mlp", batch_size=16, hidden=8)
    batch = case.make_batch(0, 16)
    state = case.init(jax.random.key(0))
    expected, wanted = jax.jit(case.train_step(jax.value_and_grad))(state, batch)
    with in_process_session(1, 4):
        step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=PIPELINE)
        state, metrics = step(state, batch)
        assert_allclose(metrics, wanted, rtol=1e-4, atol=1e-6)
        assert_allclose(state.params, expected.params, rtol=1e-4, atol=1e-5)
