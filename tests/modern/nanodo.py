"""A decoder with parameters sharded by their metadata, and a jitted step with shardings, constraints and donation.

In the style of google-deepmind/nanodo nanodo/train.py and nanodo/model.py.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script


class Mlp(nn.Module):
    d: int

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.normal(0.2), ("data", None))
        h = nn.gelu(nn.Dense(4 * self.d, use_bias=False, kernel_init=init)(x))
        return nn.Dense(self.d, use_bias=False, kernel_init=init)(h)


class Block(nn.Module):
    d: int
    h: int

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.normal(0.2), ("data", None, None))
        y = nn.LayerNorm(use_bias=False)(x)
        multilinear = functools.partial(
            nn.DenseGeneral, axis=-1, features=(self.h, self.d // self.h), kernel_init=init, use_bias=False
        )
        q, k, v = (multilinear(name=name)(y) for name in ("query", "key", "value"))
        weights = jnp.einsum("...qhd,...khd->...hqk", q / q.shape[-1] ** 0.5, k)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(mask, weights, jnp.finfo(jnp.float32).min))
        y = jnp.einsum("...hqk,...khd->...qhd", weights, v)
        x += nn.DenseGeneral(self.d, axis=(-2, -1), kernel_init=nn.initializers.normal(0.2), use_bias=False)(y)
        return x + Mlp(self.d)(nn.LayerNorm(use_bias=False)(x))


class TransformerDo(nn.Module):
    d: int = 16
    h: int = 2
    n: int = 2
    v: int = 32

    @nn.compact
    def __call__(self, tokens):
        init = nn.with_partitioning(nn.initializers.normal(0.2), (None, "data"))
        embed = nn.Embed(self.v, self.d, embedding_init=init)
        x = embed(tokens) + nn.Embed(8, self.d, name="positions")(jnp.arange(tokens.shape[1])[None])
        for _ in range(self.n):
            x = nn.remat(Block)(self.d, self.h)(x)
        return embed.attend(nn.LayerNorm(use_bias=False)(x))


def init_train_state(model, rng, mesh):
    def init(rng, inputs):
        tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, eps=1e-4)), 1)
        return TrainState.create(apply_fn=model.apply, params=model.init(rng, inputs)["params"], tx=tx)

    inputs = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    shardings = nn.get_sharding(jax.eval_shape(init, rng, inputs), mesh)
    return shardings, jax.jit(init, out_shardings=shardings)(rng, jnp.ones((1, 8), jnp.int32))


def _train_step(state, in_bxl, mesh=None):
    if mesh is not None:
        in_bxl = jax.lax.with_sharding_constraint(in_bxl, NamedSharding(mesh, P("data")))
    x, y = in_bxl[:, :-1], in_bxl[:, 1:]
    weights = jnp.where(y != 0, 1, 0).astype(jnp.float32)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        mean = jnp.sum(losses * weights) / jnp.sum(weights)
        return mean, {"tokens": jnp.sum(weights), "logits_norm": jnp.sqrt(jnp.mean(logits**2))}

    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = state.replace(step=state.opt_state.gradient_step + 1, params=params, opt_state=opt_state)
    norms = {"grads_norm": optax.tree.norm(grads), "updates_norm": optax.tree.norm(updates)}
    return state, {"train_loss": loss, **aux, **norms}


def _eval_step(state, in_bxl):
    logits = state.apply_fn({"params": state.params}, in_bxl[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, in_bxl[:, 1:]).mean()


def make():
    mesh = Mesh(mesh_utils.create_device_mesh((jax.device_count(),)), ("data",))
    shardings, state = init_train_state(TransformerDo(), jax.random.key(0), mesh)
    whole = NamedSharding(mesh, P())
    step_fn = jax.jit(
        functools.partial(_train_step, mesh=mesh),
        in_shardings=(shardings, whole),
        out_shardings=(shardings, whole),
        donate_argnames=("state", "in_bxl"),
    )
    eval_fn = jax.jit(_eval_step, in_shardings=(shardings, NamedSharding(mesh, P("data"))))
    tokens = np.random.default_rng(0).integers(0, 32, (3, 16, 9))
    batches = [(one.astype(np.int32),) for one in tokens]
    return Script(step=step_fn, state=(state,), batches=batches, evaluate=eval_fn)


CHANGES = {
    "    eval_fn = jax.jit(": ("    step_fn = minialpa.parallelize(step_fn, method=method)\n    eval_fn = jax.jit("),
}
