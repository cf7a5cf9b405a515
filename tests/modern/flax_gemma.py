"""A transformer of flax linen with logical axis names for parameters and activations.

In the style of google/flax examples/gemma/train.py and examples/lm1b/models.py with logical partitioning.
"""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

RULES = (("batch", "data"), ("embed", None), ("heads", "model"), ("mlp", "model"), ("vocab", "model"))


def dense(features, names, **options):
    init = nn.with_logical_partitioning(nn.initializers.normal(0.2), names)
    return nn.DenseGeneral(features, use_bias=False, kernel_init=init, **options)


class Block(nn.Module):
    width: int
    n_heads: int

    @nn.compact
    def __call__(self, x):
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        shape = (self.n_heads, self.width // self.n_heads)
        y = nn.RMSNorm(name="before_attention")(x)
        q, k, v = (dense(shape, ("embed", "heads", "kv"), name=name)(y) for name in "qkv")
        q = nn.with_logical_constraint(q, ("batch", "length", "heads", "kv"))
        y = nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(x[..., 0]))
        x = x + dense(self.width, ("heads", "kv", "embed"), name="out", axis=(-2, -1))(y)

        y = nn.RMSNorm(name="before_mlp")(x)
        gate = dense(2 * self.width, ("embed", "mlp"), name="gate")(y)
        hidden = nn.gelu(gate) * dense(2 * self.width, ("embed", "mlp"), name="up")(y)
        hidden = nn.with_logical_constraint(hidden, ("batch", "length", "mlp"))
        return x + dense(self.width, ("mlp", "embed"), name="down")(hidden)


class Transformer(nn.Module):
    vocabulary: int = 32
    width: int = 16
    n_heads: int = 2
    n_layers: int = 2

    @nn.compact
    def __call__(self, tokens):
        init = nn.with_logical_partitioning(nn.initializers.normal(0.2), ("vocab", "embed"))
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=init, name="embed")
        x = embed(tokens) * jnp.sqrt(self.width)
        for i in range(self.n_layers):
            x = Block(self.width, self.n_heads, name=f"block_{i}")(x)
        return nn.with_logical_constraint(embed.attend(nn.RMSNorm(name="last")(x)), ("batch", "length", "vocab"))


def create_state(model, tx, key):
    variables = model.init(key, jnp.ones((1, 8), jnp.int32))
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)


def train_step(state, batch):
    def loss_of(params):
        logits = state.apply_fn({"params": params}, batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def eval_step(state, batch):
    logits = state.apply_fn({"params": state.params}, batch["inputs"])
    return jnp.sum(jnp.argmax(logits, axis=-1) == batch["targets"])


def make():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    init = functools.partial(create_state, Transformer(), optax.adamw(1e-2, eps=1e-4))
    names = nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0)))
    shardings = nn.logical_to_mesh_sharding(names, mesh, RULES)
    of_batch = NamedSharding(mesh, P("data"))
    with mesh, nn.logical_axis_rules(RULES):
        state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    step = jax.jit(train_step, in_shardings=(shardings, of_batch), out_shardings=(shardings, None), donate_argnums=0)

    evaluate = jax.jit(eval_step, in_shardings=(shardings, of_batch))
    rng = np.random.default_rng(0)
    text = rng.integers(0, 32, (3, 16, 9))
    batches = [({"inputs": one[:, :-1], "targets": one[:, 1:]},) for one in text]

    @contextlib.contextmanager
    def context():
        with mesh, nn.logical_axis_rules(RULES):
            yield

    return Script(step=step, state=(state,), batches=batches, context=context, evaluate=evaluate)


CHANGES = {
    "jax.jit(train_step, in_shardings=(shardings, of_batch), out_shardings=(shardings, None), donate_argnums=0)": (
        "minialpa.parallelize(train_step, method=method)"
    ),
}
