"""A pipeline in `shard_map`: each device of an axis holds one layer, and micro-batches move on by `ppermute`.

In the style of jax-ml/jax docs/notebooks/shard_map.md (pipeline parallelism).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

N_STAGES, N_MICRO_BATCHES = 4, 4
mesh = jax.make_mesh((2, N_STAGES), ("data", "stage"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P("stage"), P(None, "data")), out_specs=P(None, "data"), check_vma=False
)
def pipeline(layers, x):
    """layers: the weights of the layer of one stage; x: (micro-batches, examples, width)."""
    here, weights = jax.lax.axis_index("stage"), layers[0]
    last, forward = N_STAGES - 1, [(i, (i + 1) % N_STAGES) for i in range(N_STAGES)]

    def tick(carry, i):
        arrived, results = carry
        arrived = jnp.where(here == 0, x[jnp.minimum(i, N_MICRO_BATCHES - 1)], arrived)
        out = arrived + jnp.tanh(arrived @ weights)
        done = jnp.maximum(i - last, 0)
        results = results.at[done].set(jnp.where(i >= last, out, results[done]))
        return (jax.lax.ppermute(out, "stage", forward), results), None

    start = jnp.zeros_like(x[0]), jnp.zeros_like(x)
    (_, results), _ = jax.lax.scan(tick, start, jnp.arange(N_MICRO_BATCHES + last))
    return jax.lax.psum(jnp.where(here == last, results, 0.0), "stage")


@jax.jit
def train_step(params, momentum, batch):
    def loss_of(params):
        x = (batch["x"] @ params["in"]).reshape(N_MICRO_BATCHES, -1, params["in"].shape[1])
        y = pipeline(params["layers"], x).reshape(len(batch["x"]), -1)
        return jnp.mean((y @ params["out"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss


def make(width=16):
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = {"in": (8, width), "out": (width, 8), "layers": (N_STAGES, width, width)}
    params = {name: 0.2 * jax.random.normal(key, size) for key, (name, size) in zip(keys, sizes.items(), strict=True)}
    specs = {"in": P(), "out": P(), "layers": P("stage")}
    params = {name: jax.device_put(value, NamedSharding(mesh, specs[name])) for name, value in params.items()}
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(3):
        batch = {"x": rng.standard_normal((16, 8), np.float32), "y": rng.standard_normal((16, 8), np.float32)}
        batches.append((jax.device_put(batch, NamedSharding(mesh, P("data"))),))
    return Script(step=train_step, state=(params, jax.tree.map(jnp.zeros_like, params)), batches=batches)


CHANGES = {"@jax.jit\n": "@minialpa.parallelize(method=method)\n"}
