"""Scripts as users of Alpa write them, flax and optax under Alpa's names, run here and compared with one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import minialpa as alpa
from minialpa import AutoLayerOption, PipeshardParallel, ShardParallel, models
from minialpa.testing import assert_allclose
from tests.compat.alpa_scripts import make_state_and_batch, step_with


@pytest.fixture(autouse=True)
def _as_in_a_script() -> Iterator[None]:
    """Users' programs run under jax's own dtype promotion, and start and end a session."""
    alpa.shutdown()
    with jax.numpy_dtype_promotion("standard"):
        yield
    alpa.shutdown()


def train_with_layers_and_stages_found() -> None:
    """A step, and one on a smaller batch, as on one device."""
    state, batch = make_state_and_batch()
    method = PipeshardParallel(num_micro_batches=4, layer_option=AutoLayerOption(layer_num=2), stage_option="auto")
    step = alpa.parallelize(step_with(alpa.value_and_grad), method=method)
    serial = step_with(jax.value_and_grad)
    for size in (32, 16):
        examples = jax.tree.map(lambda x, size=size: x[:size], batch)
        actual, expected = step(state, examples), serial(state, examples)
        assert_allclose((actual[0].params, actual[1]), (expected[0].params, expected[1]))


def test_an_mlp_with_layers_and_stages_found_trains_as_on_one_device() -> None:
    alpa.util.disable_tqdm_globally()
    alpa.init(cluster="local", num_nodes=2, num_devices_per_node=4)
    train_with_layers_and_stages_found()


# ---- an image classifier, epochs with a ragged end ------------------------------------------------------------------


EPOCHS = ((16, 16, 6), (24, 16))


def read_images(sizes: tuple[int, ...]) -> Iterator[dict[str, np.ndarray]]:
    """An epoch of CIFAR-10 shapes: images of 32 x 32 x 3 whose label shifts their mean."""
    rng = np.random.default_rng(0)
    for n in sizes:
        label = rng.integers(0, 10, n).astype(np.int32)
        image = rng.standard_normal((n, 32, 32, 3), np.float32) + label[:, None, None, None] / 10
        yield {"image": image, "label": label}


def train(step: Any, case: Any) -> tuple[Any, list[float], list[int]]:
    """State, losses and numbers of right predictions after all epochs."""
    state = case.init(jax.random.key(0))
    losses, correct = [], []
    for sizes in EPOCHS:
        for batch in read_images(sizes):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            correct.append(int(metrics["correct"]))
    return state, losses, correct


@pytest.mark.slow  # the test above runs a script with a smaller model
def test_a_wide_resnet_trains_over_a_ragged_batch_and_another_batch_size() -> None:
    case = models.build("resnet", filters=4, width_factor=1, stage_sizes=(1, 1), n_classes=10, learning_rate=0.05)
    serial, expected, right = train(jax.jit(case.train_step(jax.value_and_grad)), case)
    pipeline = PipeshardParallel(layer_option=AutoLayerOption(layer_num=2), stage_option="uniform")
    for method in (ShardParallel(), pipeline):
        step = alpa.parallelize(case.train_step(alpa.value_and_grad), method=method)
        state, losses, correct = train(step, case)
        np.testing.assert_allclose(losses, expected, rtol=1e-3)
        assert correct == right
        assert_allclose(state.batch_stats, serial.batch_stats, rtol=1e-3, atol=1e-3)
        assert_allclose(state.params, serial.params, rtol=1e-2, atol=1e-3)
