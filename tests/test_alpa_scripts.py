"""Scripts as users of Alpa write them, flax and optax under Alpa's names, run here and compared with one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import minialpa as alpa
from minialpa import AutoLayerOption, PipeshardParallel, ShardParallel, models
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


def train_with_boundaries_by_hand() -> Any:
    """The executable of the step, which has trained as on one device."""
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
    assert all("HloModule" in text for text in executable.get_hlo_text())
    assert {spec.mesh_ids for spec in jax.tree.leaves(executable.get_input_placement_specs()[1])} == {(0,), (1,)}
    return executable


def test_an_mlp_with_boundaries_by_hand_trains_as_on_one_device() -> None:
    alpa.init(cluster="local")
    train_with_boundaries_by_hand()
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


# ---- an image classifier, epochs with a ragged end ------------------------------------------------------------------


def loader(sizes: tuple[int, ...]) -> Iterator[dict[str, np.ndarray]]:
    """An epoch of CIFAR-10 shapes: images of 32 x 32 x 3 whose label shifts their mean."""
    rng = np.random.default_rng(0)
    for n in sizes:
        label = rng.integers(0, 10, n).astype(np.int32)
        image = rng.standard_normal((n, 32, 32, 3), np.float32) + label[:, None, None, None] / 10
        yield {"image": image, "label": label}


EPOCHS = ((16, 16, 6), (24, 16))


def train(step: Any, case: Any) -> tuple[Any, list[float], list[int]]:
    """State, losses and numbers of right predictions after all epochs."""
    state = case.init(jax.random.key(0))
    losses, correct = [], []
    for sizes in EPOCHS:
        for batch in loader(sizes):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            correct.append(int(metrics["correct"]))
    return state, losses, correct


@pytest.fixture(scope="module")
def on_one_device() -> Any:
    case = models.build("resnet", filters=4, width_factor=1, stage_sizes=(1, 1), n_classes=10, learning_rate=0.05)
    with jax.numpy_dtype_promotion("standard"):
        return case, train(jax.jit(case.train_step(jax.value_and_grad)), case)


@pytest.mark.slow  # the next tests run scripts with a smaller model
@pytest.mark.parametrize(
    "method",
    [
        ShardParallel(),
        PipeshardParallel(num_micro_batches=1, layer_option=AutoLayerOption(layer_num=2), stage_option="uniform"),
    ],
    ids=["shard", "pipeshard"],
)
def test_a_wide_resnet_trains_over_a_ragged_batch_and_another_batch_size(method: Any, on_one_device: Any) -> None:
    case, (serial, expected, right) = on_one_device
    alpa.init()
    step = alpa.parallelize(case.train_step(alpa.value_and_grad), method=method)
    state, losses, correct = train(step, case)
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert correct == right
    assert_allclose(state.batch_stats, serial.batch_stats, rtol=1e-3, atol=1e-3)
    assert_allclose(state.params, serial.params, rtol=1e-2, atol=1e-3)
    assert len(step._executables) == len({n for sizes in EPOCHS for n in sizes})  # one for each batch size
