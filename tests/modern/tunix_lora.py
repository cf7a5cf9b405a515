"""Low-rank adapters of a model of flax.nnx, trained by `nnx.jit` in a mesh context.

In the style of google/tunix tunix/sft/peft_trainer.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.modern.script import Script

mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


class Lora(nnx.Module):
    """A frozen product, and a trained one of low rank."""

    def __init__(self, n_in, n_out, spec, *, rngs, rank=2):
        normal = nnx.initializers.normal(0.3)
        self.kernel = nnx.Param(normal(rngs.params(), (n_in, n_out)), out_sharding=spec)
        self.a = nnx.LoRAParam(normal(rngs.params(), (n_in, rank)), out_sharding=(spec[0], None))
        self.b = nnx.LoRAParam(normal(rngs.params(), (rank, n_out)), out_sharding=(None, spec[1]))

    def __call__(self, x):
        return x @ self.kernel[...] + x @ self.a[...] @ self.b[...]


class FeedForward(nnx.Module):
    def __init__(self, width, *, rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.gate = Lora(width, 2 * width, ("fsdp", "tp"), rngs=rngs)
        self.up = Lora(width, 2 * width, ("fsdp", "tp"), rngs=rngs)
        self.down = Lora(2 * width, width, ("tp", "fsdp"), rngs=rngs)

    def __call__(self, x):
        y = self.norm(x)
        hidden = nnx.silu(self.gate(y)) * self.up(y)
        return x + self.down(jax.lax.with_sharding_constraint(hidden, P("fsdp", None, "tp")))


class Model(nnx.Module):
    def __init__(self, vocabulary=32, width=16, n_layers=2, *, rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.layers = nnx.List([FeedForward(width, rngs=rngs) for _ in range(n_layers)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


@nnx.jit
def create_model():
    model = Model(rngs=nnx.Rngs(0))
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model


def loss_of(model, tokens, mask):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return jnp.sum(losses * mask[:, 1:]) / jnp.sum(mask[:, 1:])


def train_step(model, optimizer, inputs):
    grad_of = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))
    loss, grads = grad_of(model, **inputs)
    optimizer.update(model, grads)
    return loss, optax.tree.norm(grads)


def make():
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        model = create_model()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-4), wrt=nnx.LoRAParam)
    step = nnx.jit(train_step, donate_argnames=("optimizer",))
    batches = []
    for _ in range(3):
        inputs = {"tokens": rng.integers(0, 32, (16, 9)), "mask": rng.integers(0, 2, (16, 9))}
        batches.append((jax.device_put(inputs, NamedSharding(mesh, P("fsdp"))),))
    return Script(
        step=step,
        in_place=(model, optimizer),
        batches=batches,
        context=lambda: jax.set_mesh(mesh),
    )


CHANGES = {
    'nnx.jit(train_step, donate_argnames=("optimizer",))': "minialpa.parallelize(train_step, method=method)",
}
