"""Scripts as users of Alpa write them, flax and optax under Alpa's names, run here and compared with one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import minialpa as alpa
from minialpa import AutoLayerOption, PipeshardParallel
from minialpa.testing import assert_allclose


@pytest.fixture(autouse=True)
def _as_in_a_script() -> Iterator[None]:
    """Users' programs run under jax's own dtype promotion, and start and end a session."""
    alpa.shutdown()
    with jax.numpy_dtype_promotion("standard"):
        yield
    alpa.shutdown()


# ---- a pipelined MLP ------------------------------------------------------------------------------------------------


class FourLayers(nn.Module):
    """Two halves of two dense layers each, the border marked by hand."""

    hidden: int
    manual: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for half in range(2):
            x = nn.relu(nn.Dense(self.hidden * 2)(x))
            x = nn.relu(nn.Dense(self.hidden)(x))
            if half == 0 and self.manual:
                alpa.mark_pipeline_boundary()
        return x


DIM, BATCH_SIZE = 16, 64


def make_problem(manual: bool) -> tuple[TrainState, dict[str, jax.Array]]:
    key_x, key_w, key_model = jax.random.split(jax.random.PRNGKey(0), 3)
    x = jax.random.normal(key_x, (BATCH_SIZE, DIM))
    batch = {"x": x, "y": x @ jax.random.normal(key_w, (DIM, DIM))}
    model = FourLayers(hidden=DIM, manual=manual)
    params = model.init(key_model, x)
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(learning_rate=1e-3)), batch


def train_step(state: TrainState, batch: Any, grad: Any) -> TrainState:
    def loss_func(params: Any) -> jax.Array:
        out = state.apply_fn(params, batch["x"])
        return jnp.mean((out - batch["y"]) ** 2)

    new: TrainState = state.apply_gradients(grads=grad(loss_func)(state.params))
    return new


def test_an_mlp_with_boundaries_by_hand_trains_as_on_one_device() -> None:
    alpa.init(cluster="local")
    state, batch = make_problem(manual=True)

    @alpa.parallelize(method=PipeshardParallel(num_micro_batches=4, layer_option="manual"))
    def pipelined_step(state: TrainState, batch: Any) -> TrainState:
        return train_step(state, batch, alpa.grad)

    expected, actual = state, state
    for _ in range(2):
        expected = train_step(expected, batch, jax.grad)
        actual = pipelined_step(actual, batch)
    assert_allclose(actual.params, expected.params, atol=5e-3)
    assert_allclose(actual.opt_state, expected.opt_state, atol=5e-3)
    assert int(actual.step) == 2
    executable = pipelined_step.get_last_executable()
    executable.sync()
    assert len(executable.get_parallel_plan().stages) == 2
    alpa.shutdown()


def train_with_layers_and_stages_found() -> None:
    """A step, and one on a smaller batch, as on one device."""
    state, batch = make_problem(manual=False)
    method = PipeshardParallel(num_micro_batches=4, layer_option=AutoLayerOption(layer_num=2), stage_option="auto")
    step = alpa.parallelize(lambda state, batch: train_step(state, batch, alpa.grad), method=method)
    expected = train_step(state, batch, jax.grad)
    assert_allclose(step(state, batch).params, expected.params, atol=5e-3)
    smaller = jax.tree.map(lambda x: x[:32], batch)
    assert_allclose(step(state, smaller).params, train_step(state, smaller, jax.grad).params, atol=5e-3)


def test_an_mlp_with_layers_and_stages_found_trains_as_on_one_device() -> None:
    alpa.util.disable_tqdm_globally()
    alpa.init(cluster="local", num_nodes=2, num_devices_per_node=4)
    train_with_layers_and_stages_found()
    alpa.shutdown()
