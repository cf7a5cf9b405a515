"""A transformer on a mesh with Explicit axes, with parameters and optimizer state in Refs.

In the style of jax-ml/jax docs/the-training-cookbook.py.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from tests.modern.script import Script


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Config:
    n_layers: int = 2
    vocabulary: int = 32
    length: int = 8
    width: int = 16
    n_heads: int = 2
    learning_rate: float = 1e-2
    beta_1: float = 0.9
    beta_2: float = 0.99


SPECS = {
    "embedding": jax.P(None, None),
    "qkv": jax.P(None, "fsdp", None, None),
    "out": jax.P(None, None, "fsdp"),
    "up": jax.P("fsdp", None),
    "down": jax.P(None, "fsdp"),
}
SEQUENCE, HEADS = jax.P("fsdp", None, None), jax.P("fsdp", None, None, None, None)


def init_params(config, key):
    normal = jax.nn.initializers.normal(0.1)
    keys = iter(jax.random.split(key, 2 + 4 * config.n_layers))
    d, head = config.width, config.width // config.n_heads
    params = {
        "embedding": normal(next(keys), (config.vocabulary, d), jnp.float32, SPECS["embedding"]),
        "unembedding": normal(next(keys), (d, config.vocabulary), jnp.float32, SPECS["up"]),
        "layers": [],
    }
    for _ in range(config.n_layers):
        params["layers"].append(
            {
                "qkv": normal(next(keys), (3, d, config.n_heads, head), jnp.float32, SPECS["qkv"]),
                "out": normal(next(keys), (config.n_heads, head, d), jnp.float32, SPECS["out"]),
                "up": normal(next(keys), (d, 2 * d), jnp.float32, SPECS["up"]),
                "down": normal(next(keys), (2 * d, d), jnp.float32, SPECS["down"]),
            }
        )
    return params


def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def apply_model(config, params, tokens):
    x = params["embedding"].at[tokens].get(out_sharding=SEQUENCE)
    for layer in params["layers"]:
        qkv = jnp.einsum("bsd,cdnh->bscnh", rms_norm(x), layer["qkv"], out_sharding=HEADS)
        seen = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x += jnp.einsum("bsnh,nhd->bsd", seen, layer["out"], out_sharding=SEQUENCE)
        hidden = jax.nn.gelu(jnp.einsum("bsd,df->bsf", rms_norm(x), layer["up"], out_sharding=SEQUENCE))
        x += jnp.einsum("bsf,fd->bsd", hidden, layer["down"], out_sharding=SEQUENCE)
    return jnp.einsum("bsd,dv->bsv", x, params["unembedding"], out_sharding=SEQUENCE)


def init_moments(param):
    return {"mu": jnp.zeros_like(param), "nu": jnp.zeros_like(param), "count": jnp.array(0)}


def update(config, param, grad, moments):
    moments["count"][...] += 1
    moments["mu"][...] = config.beta_1 * moments["mu"][...] + (1 - config.beta_1) * grad
    moments["nu"][...] = config.beta_2 * moments["nu"][...] + (1 - config.beta_2) * grad**2
    mean = moments["mu"][...] / (1 - config.beta_1 ** moments["count"][...])
    square = moments["nu"][...] / (1 - config.beta_2 ** moments["count"][...])
    param[...] -= config.learning_rate * mean / (jnp.sqrt(square) + 1e-3)


@jax.jit
def init_train_state(config, key):
    params = init_params(config, key)
    return {"params": params, "moments": jax.tree.map(init_moments, params)}


@jax.jit
def train_step(config, train_state, batch):
    def loss_of(params):
        logits = apply_model(config, params, batch["inputs"])
        labels = jax.nn.one_hot(batch["targets"], config.vocabulary)
        return -(labels * jax.nn.log_softmax(logits)).sum(axis=-1).mean()

    params = jax.tree.map(jax.ref.get, train_state["params"])
    loss, grads = jax.value_and_grad(loss_of)(params)
    jax.tree.map(functools.partial(update, config), train_state["params"], grads, train_state["moments"])
    return {"loss": loss}


@jax.jit
def eval_step(config, train_state, batch):
    logits = apply_model(config, jax.tree.map(jax.ref.get, train_state["params"]), batch["inputs"])
    return jnp.mean(jnp.argmax(logits, axis=-1) == batch["targets"])


def get_batches(config, n_steps=3, batch_size=16):
    rng = np.random.default_rng(0)
    for _ in range(n_steps):
        text = rng.integers(0, config.vocabulary, (batch_size, config.length + 1))
        batch = {"inputs": text[:, :-1], "targets": text[:, 1:]}
        yield (jax.tree.map(lambda x: jax.make_array_from_process_local_data(jax.P("fsdp"), x), batch),)


def make():
    config = Config()
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        train_state = jax.tree.map(jax.new_ref, init_train_state(config, jax.random.key(0)))
        batches = list(get_batches(config))
    return Script(
        step=train_step,
        in_place=(config, train_state),
        batches=batches,
        context=lambda: jax.set_mesh(mesh),
        evaluate=eval_step,
    )


CHANGES = {"@jax.jit\ndef train_step(": "@minialpa.parallelize(method=method)\ndef train_step("}
