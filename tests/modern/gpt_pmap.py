"""A GPT with replicated state: each device computes its gradients in `pmap`, and `pmean` averages them.

In the style of jenkspt/gpt-jax train.py.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from tests.modern.script import Script


class Gpt(nn.Module):
    vocabulary: int = 32
    width: int = 16
    n_layers: int = 2

    @nn.compact
    def __call__(self, tokens, deterministic):
        embed = nn.Embed(self.vocabulary, self.width)
        x = embed(tokens) + nn.Embed(8, self.width)(jnp.arange(tokens.shape[1])[None])
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.n_layers):
            attention = nn.MultiHeadDotProductAttention(2, use_bias=False, deterministic=True)
            x = x + attention(nn.LayerNorm(use_bias=False)(x), mask=mask)
            y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm(use_bias=False)(x)))
            x = x + nn.Dropout(0.1)(nn.Dense(self.width)(y), deterministic=deterministic)
        return embed.attend(nn.LayerNorm(use_bias=False)(x))


@partial(jax.pmap, axis_name="batch")
def train_step(state, tokens, dropout_key):
    dropout_key = jax.random.fold_in(dropout_key, state.step)

    def loss_fn(params):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        logits = state.apply_fn({"params": params}, inputs, False, rngs={"dropout": dropout_key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    loss = jax.lax.pmean(loss, axis_name="batch")
    return loss, state.apply_gradients(grads=grads)


@partial(jax.pmap, axis_name="batch")
def eval_step(state, tokens, _):
    logits = state.apply_fn({"params": state.params}, tokens[:, :-1], True)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jax.lax.pmean(losses, axis_name="batch")


def no_decay_for_vectors(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def make():
    model = Gpt()
    params = jax.jit(model.init, static_argnums=2)(jax.random.key(0), jnp.ones((1, 8), jnp.int32), True)["params"]
    tx = optax.chain(optax.add_decayed_weights(1e-2, mask=no_decay_for_vectors), optax.adam(3e-3, eps=1e-4))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    n = jax.local_device_count()
    replicated = jax.tree.map(lambda x: jnp.stack([x] * n), state)
    keys = jax.random.split(jax.random.key(1), n)
    tokens = np.random.default_rng(0).integers(0, 32, (3, n, 2, 9)).astype(np.int32)
    batches = [(one, keys) for one in tokens]
    return Script(step=train_step, state=(replicated,), batches=batches, state_comes="last", evaluate=eval_step)


CHANGES = {
    '@partial(jax.pmap, axis_name="batch")\ndef train_step(': (
        '@minialpa.parallelize(method=method, batch_argnums=1)\n@partial(jax.pmap, axis_name="batch")\ndef train_step('
    ),
}
