"""Small programs in the style of Alpa's users: models, states and steps, and the same steps on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import minialpa
import minialpa.compat.alpa as alpa

HIDDEN, BATCH_SIZE = 16, 32


class Mlp(nn.Module):
    """Four dense layers; with `manual`, a pipeline boundary in the middle."""

    manual: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(4):
            x = nn.relu(nn.Dense(HIDDEN)(x))
            if i == 1 and self.manual:
                alpa.mark_pipeline_boundary()
        return x


def make_state_and_batch(manual: bool = False) -> tuple[TrainState, dict[str, jax.Array]]:
    key_x, key_y, key_model = jax.random.split(jax.random.PRNGKey(0), 3)
    batch = {
        "x": jax.random.normal(key_x, (BATCH_SIZE, HIDDEN)),
        "y": jax.random.normal(key_y, (BATCH_SIZE, HIDDEN)),
    }
    model = Mlp(manual)
    params = model.init(key_model, batch["x"])
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2)), batch


def step_with(value_and_grad: Callable[..., Any]) -> Callable[[TrainState, Any], tuple[TrainState, jax.Array]]:
    """The training step, with Alpa's or jax's `value_and_grad`."""

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        def loss_func(params: Any) -> jax.Array:
            out = state.apply_fn(params, batch["x"])
            return jnp.mean((out - batch["y"]) ** 2)

        loss, grads = value_and_grad(loss_func)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def train_and_compare(method: Any, manual: bool = False) -> Any:
    """Train two steps by the method and on one device, compare, and return the executable."""
    state, batch = make_state_and_batch(manual)
    serial = jax.jit(step_with(jax.value_and_grad))
    parallel = alpa.parallelize(step_with(alpa.value_and_grad), method=method)
    expected = actual = state
    for _ in range(2):
        expected, expected_loss = serial(expected, batch)
        actual, loss = parallel(actual, batch)
        alpa.testing.assert_allclose(loss, expected_loss)
    alpa.testing.assert_allclose(actual.params, expected.params)
    return parallel.get_last_executable()


def train_with_layers_and_stages_found() -> None:
    """With `import minialpa as alpa`: a step, and one on a smaller batch, as on one device."""
    state, batch = make_state_and_batch()
    layers = minialpa.AutoLayerOption(layer_num=2)
    method = minialpa.PipeshardParallel(num_micro_batches=4, layer_option=layers, stage_option="auto")
    step = minialpa.parallelize(step_with(minialpa.value_and_grad), method=method)
    serial = step_with(jax.value_and_grad)
    for n in (BATCH_SIZE, BATCH_SIZE // 2):
        examples = {name: x[:n] for name, x in batch.items()}
        (actual, loss), (expected, expected_loss) = step(state, examples), serial(state, examples)
        alpa.testing.assert_allclose((actual.params, loss), (expected.params, expected_loss))
