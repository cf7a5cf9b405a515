"""Proximal policy optimisation: a scan over epochs of shuffled minibatches, with environments sharded over devices.

In the style of luchris429/purejaxrl purejaxrl/ppo.py.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

N_EPOCHS, N_MINIBATCHES = 2, 2


class ActorCritic(nn.Module):
    n_actions: int = 4

    @nn.compact
    def __call__(self, x):
        hidden = nn.tanh(nn.Dense(32, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
        logits = nn.Dense(self.n_actions, kernel_init=nn.initializers.orthogonal(0.01))(hidden)
        hidden = nn.tanh(nn.Dense(32, kernel_init=nn.initializers.orthogonal(2**0.5))(x))
        return logits, nn.Dense(1)(hidden)[..., 0]


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


def advantages_of(trajectory, last_value, gamma=0.99, decay=0.95):
    def backwards(carry, step):
        advantage, next_value = carry
        delta = step.reward + gamma * next_value * (1 - step.done) - step.value
        advantage = delta + gamma * decay * (1 - step.done) * advantage
        return (advantage, step.value), advantage

    start = jnp.zeros_like(last_value), last_value
    _, advantages = jax.lax.scan(backwards, start, trajectory, reverse=True)
    return advantages, advantages + trajectory.value


def loss_fn(params, apply_fn, steps, advantages, targets, clip=0.2):
    logits, value = apply_fn(params, steps.obs)
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, steps.action[..., None], axis=-1)[..., 0]

    clipped = steps.value + jnp.clip(value - steps.value, -clip, clip)
    value_loss = 0.5 * jnp.maximum((value - targets) ** 2, (clipped - targets) ** 2).mean()

    ratio = jnp.exp(log_prob - steps.log_prob)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    actor_loss = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip, 1 + clip) * advantages).mean()
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
    return actor_loss + 0.5 * value_loss - 0.01 * entropy, (value_loss, actor_loss, entropy)


@jax.jit
def update(train_state, key, trajectory, last_obs):
    _, last_value = train_state.apply_fn(train_state.params, last_obs)
    advantages, targets = advantages_of(trajectory, last_value)

    def minibatch_step(train_state, minibatch):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        loss, grads = grad_fn(train_state.params, train_state.apply_fn, *minibatch)
        return train_state.apply_gradients(grads=grads), loss

    def epoch(carry, _):
        train_state, key = carry
        key, shuffle_key = jax.random.split(key)
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (trajectory, advantages, targets))
        order = jax.random.permutation(shuffle_key, len(batch[1]))
        shuffled = jax.tree.map(lambda x: jnp.take(x, order, axis=0), batch)
        minibatches = jax.tree.map(lambda x: x.reshape(N_MINIBATCHES, -1, *x.shape[1:]), shuffled)
        train_state, losses = jax.lax.scan(minibatch_step, train_state, minibatches)
        return (train_state, key), losses

    (train_state, key), losses = jax.lax.scan(epoch, (train_state, key), None, N_EPOCHS)
    return train_state, key, losses


def rollouts(mesh, n_updates=3, n_steps=4, n_envs=16):
    rng = np.random.default_rng(0)
    for _ in range(n_updates):
        shape = n_steps, n_envs
        trajectory = Transition(
            obs=rng.standard_normal((*shape, 6), np.float32),
            action=rng.integers(0, 4, shape),
            log_prob=np.full(shape, -np.log(4), np.float32),
            value=0.1 * rng.standard_normal(shape, np.float32),
            reward=rng.standard_normal(shape, np.float32),
            done=(rng.random(shape) < 0.2).astype(np.float32),
        )
        trajectory = jax.device_put(trajectory, NamedSharding(mesh, P(None, "env")))
        last_obs = jax.device_put(rng.standard_normal((n_envs, 6), np.float32), NamedSharding(mesh, P("env")))
        yield trajectory, last_obs


def make():
    mesh = jax.make_mesh((8,), ("env",), axis_types=(jax.sharding.AxisType.Auto,))
    network = ActorCritic()
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3, eps=1e-5))
    train_state = TrainState.create(
        apply_fn=network.apply, params=network.init(jax.random.key(0), jnp.zeros((1, 6))), tx=tx
    )
    train_state = jax.device_put(train_state, NamedSharding(mesh, P()))
    return Script(step=update, state=(train_state, jax.random.key(1)), batches=list(rollouts(mesh)))


CHANGES = {"@jax.jit\ndef update(": "@minialpa.parallelize(method=method, batch_argnums=())\ndef update("}
