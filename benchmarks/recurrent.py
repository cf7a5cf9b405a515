"""A speech recogniser as shapes, for planning: a convolution, a bidirectional recurrent encoder and a CTC loss.

The encoder is a scan over frames, or a loop that is `unrolled`: tens of thousands of almost equal equations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from minialpa.models.base import GradFn

#: Step, state and batch.
ShapedStep = tuple[Callable[[Any, Any], Any], Any, Any]


class Recogniser(nn.Module):
    """[b frames features 1] -> [b frames symbols]."""

    hidden: int
    n_layers: int
    n_symbols: int
    unrolled: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(32, (3, 3), strides=(1, 2))(x))
        x = x.reshape(*x.shape[:2], -1)
        for _ in range(self.n_layers):
            if self.unrolled:
                x = jnp.concatenate([self._loop(x, backwards=False), self._loop(x, backwards=True)], -1)
            else:
                forwards, backwards = (nn.RNN(nn.OptimizedLSTMCell(self.hidden)) for _ in range(2))
                both: Any = nn.Bidirectional(forwards, backwards)
                x = both(x)
        return nn.Dense(self.n_symbols)(x)

    def _loop(self, x: jax.Array, *, backwards: bool) -> jax.Array:
        cell = nn.OptimizedLSTMCell(self.hidden)
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        frames = range(x.shape[1])
        made = {}
        for t in reversed(frames) if backwards else frames:
            carry, made[t] = cell(carry, x[:, t])
        return jnp.stack([made[t] for t in frames], 1)


def recogniser_step(
    value_and_grad: GradFn,
    *,
    batch_size: int = 8,
    n_frames: int = 64,
    n_features: int = 64,
    hidden: int = 128,
    n_layers: int = 2,
    n_symbols: int = 32,
    n_labels: int = 16,
    unrolled: bool = False,
) -> ShapedStep:
    """A training step with Adam, and the shapes of its arguments."""
    model = Recogniser(hidden, n_layers, n_symbols, unrolled)
    optimizer = optax.adamw(1e-3)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = model.init(key, jnp.zeros((1, n_frames, n_features, 1)))
        return params, optimizer.init(params)

    def step(state: tuple[Any, Any], batch: dict[str, jax.Array]) -> tuple[tuple[Any, Any], jax.Array]:
        params, moments = state

        def loss_fn(params: Any) -> jax.Array:
            logits: Any = model.apply(params, batch["sound"])
            loss: jax.Array = optax.ctc_loss(logits, batch["silent"], batch["labels"], batch["unused"]).mean()
            return loss

        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            loss, grads = value_and_grad(loss_fn)(params)
            updates, moments = optimizer.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), loss

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    batch = {
        "sound": array(n_frames, n_features, 1),
        "silent": array(n_frames),
        "labels": array(n_labels, dtype=jnp.int32),
        "unused": array(n_labels),
    }
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = jax.eval_shape(init, jax.ShapeDtypeStruct((), jax.random.key(0).dtype))
    return step, state, batch
