"""A transformer of equinox modules on an Explicit mesh of data x model, with `reshard` and a loss in `shard_map`.

In the style of marin-community/marin experiments/grug/base/model.py and train.py.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

BATCH = P("data", None, None)


@dataclasses.dataclass(frozen=True)
class GrugConfig:
    vocabulary: int = 32
    width: int = 16
    n_layers: int = 2
    n_heads: int = 2


def init_weight(key, shape, spec):
    return reshard(0.1 * jax.random.truncated_normal(key, -3, 3, shape), spec)


class Attention(eqx.Module):
    w_q: jax.Array
    w_k: jax.Array
    w_v: jax.Array
    w_o: jax.Array
    config: GrugConfig = eqx.field(static=True)

    @staticmethod
    def init(config, key):
        keys = jax.random.split(key, 4)
        d = config.width
        q, k, v = (init_weight(key, (d, d), P("data", "model")) for key in keys[:3])
        return Attention(q, k, v, init_weight(keys[3], (d, d), P("model", "data")), config)

    def __call__(self, x):
        def heads(w):
            y = jnp.einsum("bsh,hd->bsd", x, w, out_sharding=P("data", None, "model"))
            sharding = P("data", None, "model", None)
            return jnp.reshape(y, (*y.shape[:2], self.config.n_heads, -1), out_sharding=sharding)

        q, k, v = heads(self.w_q), heads(self.w_k), heads(self.w_v)
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k) / jnp.sqrt(q.shape[-1])
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
        seen = jnp.einsum("bnqk,bknd->bqnd", weights, v)
        joined = jnp.reshape(seen, (*seen.shape[:2], -1), out_sharding=P("data", None, "model"))
        return jnp.einsum("bsh,hd->bsd", joined, self.w_o, out_sharding=BATCH)


class Block(eqx.Module):
    attention: Attention
    norm_1: jax.Array
    norm_2: jax.Array
    up: jax.Array
    down: jax.Array

    @staticmethod
    def init(config, key):
        keys = jax.random.split(key, 3)
        d = config.width
        up = init_weight(keys[1], (d, 4 * d), P("data", "model"))
        down = init_weight(keys[2], (4 * d, d), P("model", "data"))
        return Block(Attention.init(config, keys[0]), jnp.ones(d), jnp.ones(d), up, down)

    def __call__(self, x):
        x = x + self.attention(rms_norm(x, self.norm_1))
        hidden = jax.nn.relu(jnp.einsum("bsh,hm->bsm", rms_norm(x, self.norm_2), self.up)) ** 2
        return x + jnp.einsum("bsm,mh->bsh", hidden, self.down, out_sharding=BATCH)


class Transformer(eqx.Module):
    embed: jax.Array
    blocks: tuple[Block, ...]
    unembed: jax.Array

    @staticmethod
    def init(config, key):
        keys = jax.random.split(key, config.n_layers + 2)
        embed = init_weight(keys[0], (config.vocabulary, config.width), P(None, None))
        unembed = init_weight(keys[1], (config.width, config.vocabulary), P(None, "model"))
        return Transformer(embed, tuple(Block.init(config, key) for key in keys[2:]), unembed)

    def __call__(self, tokens):
        x = self.embed.at[tokens].get(out_sharding=BATCH)
        for block in self.blocks:
            x = eqx.filter_checkpoint(block)(x)
        return x

    def next_token_loss(self, tokens, weight):
        labels = jnp.concatenate([tokens[:, 1:], tokens[:, :1] * 0], axis=1)
        return sharded_loss(self(tokens), reshard(self.unembed, P()), labels, weight)


def rms_norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


@jax.shard_map(in_specs=(BATCH, P(None, None), P("data", None), P("data", None)), out_specs=P())
def sharded_loss(hidden, unembed, labels, weight):
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ unembed, labels)
    total, n = jax.lax.psum(jnp.sum(losses * weight), "data"), jax.lax.psum(jnp.sum(weight), "data")
    return total / n


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GrugState:
    step: jax.Array
    params: Transformer
    opt_state: optax.OptState


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, eps=1e-4))


@jax.jit
def initial_state(key):
    params = Transformer.init(GrugConfig(), key)
    return GrugState(jnp.array(0, jnp.int32), params, optimizer.init(params))


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
    def loss_of(params):
        return params.next_token_loss(batch["tokens"], batch["weight"])

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    new_state = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
    return new_state, {"loss": loss, "grad_norm": optax.tree.norm(grads)}


@jax.jit
def eval_step(state, batch):
    return state.params.next_token_loss(batch["tokens"], batch["weight"])


def make():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        state = initial_state(jax.random.key(0))
        batches = []
        for _ in range(3):
            batch = {"tokens": rng.integers(0, 32, (16, 8)), "weight": rng.integers(0, 2, (16, 8)).astype(np.float32)}
            batches.append((jax.device_put(batch, P("data", None)),))
    return Script(
        step=train_step, state=(state,), batches=batches, context=lambda: jax.set_mesh(mesh), evaluate=eval_step
    )


CHANGES = {"@functools.partial(jax.jit, donate_argnums=0)": "@minialpa.parallelize(method=method)"}
