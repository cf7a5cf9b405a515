"""Models of flax linen, flax nnx, equinox and haiku."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.catalogue import DATA, DATA_2, PIPE_1, PIPE_2, PIPE_4, SHARD, ZERO_2, ZERO_3, Training, model
from benchmarks.models.common import (
    N_EXAMPLES,
    batches,
    cross_entropy,
    floats,
    images,
    minimise,
    minimise_noisy,
    next_token_loss,
    regression,
    tokens,
)

KEY = jax.random.key


# ---- flax linen -----------------------------------------------------------------------------------------------------


@model("flax optax", "linen: ResNet with batch statistics", "sgd, Nesterov momentum", (SHARD, DATA, ZERO_3, PIPE_1))
def linen_resnet() -> Training:
    import flax.linen as nn

    class Block(nn.Module):
        features: int
        strides: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            norm = lambda: nn.BatchNorm(use_running_average=False, momentum=0.9)  # noqa: E731
            y = nn.relu(norm()(nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)))
            y = norm()(nn.Conv(self.features, (3, 3), use_bias=False)(y))
            return nn.relu(y + nn.Conv(self.features, (1, 1), self.strides, use_bias=False)(x))

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for features, strides in ((8, 1), (16, 2)):
                x = Block(features, strides)(x)
            return nn.Dense(4)(x.mean((1, 2)))

    net, optimizer = ResNet(), optax.sgd(1e-2, 0.9, nesterov=True)
    variables = net.init(KEY(0), jnp.zeros((1, 8, 8, 3)))

    def step(state: Any, batch: Any) -> Any:
        params, statistics, opt_state = state

        def loss_of(params: Any) -> Any:
            known = {"params": params, "batch_stats": statistics}
            logits, new = net.apply(known, batch["x"], mutable=["batch_stats"])
            return cross_entropy(logits, batch["y"]), new["batch_stats"]

        (loss, statistics), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), statistics, opt_state), loss

    params = variables["params"]
    state = params, variables["batch_stats"], optimizer.init(params)
    return Training(step=step, state=state, batches=images(8, 4))


@model("flax optax", "linen: vision transformer with dropout", "adamw", (SHARD, DATA_2, PIPE_4))
def linen_vit() -> Training:
    import flax.linen as nn

    class Vit(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(16, (4, 4), 4)(x).reshape(x.shape[0], -1, 16)
            first = self.param("first", nn.initializers.zeros, (1, 1, 16))
            x = jnp.concatenate([jnp.tile(first, (x.shape[0], 1, 1)), x], 1)
            x = x + self.param("place", nn.initializers.normal(0.02), (1, x.shape[1], 16))
            for _ in range(4):
                y = nn.LayerNorm()(x)
                x = x + nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False)(y, y)
                y = nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
                x = x + nn.Dropout(0.1, deterministic=False)(y)
            return nn.Dense(4)(nn.LayerNorm()(x)[:, 0])

    net = Vit()
    params = net.init({"params": KEY(0), "dropout": KEY(1)}, jnp.zeros((1, 8, 8, 3)))

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        return cross_entropy(net.apply(params, batch["x"], rngs={"dropout": key}), batch["y"])

    return minimise_noisy(loss, params, optax.adamw(1e-3), images(8, 4))


@model("flax optax", "linen: transformer, nn.scan over remat layers, masks", "adamw", (SHARD, ZERO_3, PIPE_2))
def linen_scan() -> Training:
    import flax.linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            y = nn.RMSNorm()(x)
            x = x + nn.SelfAttention(2)(y, mask)
            return x + nn.Dense(16)(nn.silu(nn.Dense(32)(nn.RMSNorm()(x)))), None

    class Gpt(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            embed = nn.Embed(32, 16)
            x, mask = embed(ids), nn.combine_masks(nn.make_causal_mask(ids), nn.make_attention_mask(ids > 0, ids > 0))
            layers = nn.scan(
                nn.remat(Layer), {"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=4
            )
            x, _ = layers()(x, mask)
            return embed.attend(x)

    net = Gpt()
    data = tokens(32, 12)
    params = net.init(KEY(0), data[0]["ids"])
    return minimise(lambda p, b: next_token_loss(net.apply(p, b["ids"]), b["ids"]), params, optax.adamw(1e-3), data)


@model("flax optax", "linen: LSTM encoder and decoder, teacher forcing", "adam, clipping")
def linen_seq2seq() -> Training:
    import flax.linen as nn

    class Seq2Seq(nn.Module):
        @nn.compact
        def __call__(self, source: Any, target: Any) -> Any:
            embed = nn.Embed(20, 12)
            encoder = nn.RNN(nn.OptimizedLSTMCell(16), return_carry=True)
            carry, _ = encoder(embed(source), seq_lengths=jnp.sum(source > 3, -1) + 1)
            return nn.Dense(20)(nn.RNN(nn.OptimizedLSTMCell(16))(embed(target), initial_carry=carry))

    net = Seq2Seq()
    data = batches(
        lambda s: {k: v[0]["ids"] for k, v in zip(("source", "target"), (tokens(20, 7), tokens(20, 6)), strict=True)}
    )
    params = net.init(KEY(0), data[0]["source"], data[0]["target"])

    def loss(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(net.apply(params, batch["source"], batch["target"]), batch["target"])

    return minimise(loss, params, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), data)


@model("flax optax", "linen: diffusion, U-Net with group norm and skip connections", "adam, average of parameters")
def linen_diffusion() -> Training:
    import flax.linen as nn

    class Block(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x: Any, t: Any) -> Any:
            y = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))
            y = y + nn.Dense(self.features)(t)[:, None, None]
            y = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(4)(y)))
            return y + (x if x.shape[-1] == self.features else nn.Dense(self.features)(x))

    class Unet(nn.Module):
        @nn.compact
        def __call__(self, x: Any, t: Any) -> Any:
            waves = t[:, None] * jnp.exp(-jnp.arange(8) / 2.0)
            t = nn.silu(nn.Dense(16)(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1)))
            first = Block(8)(nn.Conv(8, (3, 3))(x), t)
            x = Block(16)(nn.avg_pool(first, (2, 2), (2, 2)), t)
            flat = nn.GroupNorm(4)(x).reshape(x.shape[0], -1, 16)
            x = x + nn.SelfAttention(2)(flat).reshape(x.shape)
            x = nn.ConvTranspose(8, (2, 2), (2, 2))(x)
            return nn.Conv(3, (3, 3))(Block(8)(jnp.concatenate([x, first], -1), t))

    net = Unet()
    params = net.init(KEY(0), jnp.zeros((1, 8, 8, 3)), jnp.zeros(1))
    betas = jnp.cumprod(1 - jnp.linspace(1e-4, 0.1, 100))

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        one, other = jax.random.split(key)
        t = jax.random.randint(one, (batch["x"].shape[0],), 0, 100)
        noise = jax.random.normal(other, batch["x"].shape)
        share = betas[t][:, None, None, None]
        noisy = jnp.sqrt(share) * batch["x"] + jnp.sqrt(1 - share) * noise
        found: Any = net.apply(params, noisy, t.astype(jnp.float32))
        return jnp.mean((found - noise) ** 2)

    return minimise_noisy(loss, params, optax.adam(1e-3), images(8, 4))


@model("flax optax", "linen: spectral norm, weight norm, instance norm, partial batch", "adam", (SHARD, DATA))
def linen_norms() -> Training:
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.SpectralNorm(nn.Dense(16))(x, update_stats=True)
            x = nn.WeightNorm(nn.Dense(16))(nn.tanh(x))
            return nn.Dense(4)(nn.InstanceNorm()(x[..., None])[..., 0])

    net: Any = Net()
    optimizer = optax.adam(1e-2)
    variables = net.init(KEY(0), jnp.zeros((1, 8)))

    def step(state: Any, batch: Any) -> Any:
        params, others, opt_state = state

        def loss_of(params: Any) -> Any:
            found: Any = net.apply({"params": params, **others}, batch["x"], mutable=list(others))
            return jnp.mean((found[0] - batch["y"]) ** 2), found[1]

        (loss, others), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), others, opt_state), loss

    params = variables.pop("params")
    return Training(step=step, state=(params, variables, optimizer.init(params)), batches=regression(8, 4))


# ---- flax nnx -------------------------------------------------------------------------------------------------------


@model("flax optax", "nnx: MLP with dropout and batch norm, split and merged", "adam", (SHARD, DATA, PIPE_1))
def nnx_mlp() -> Training:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.last = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)
            self.norm, self.dropout = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
    graph, state = nnx.split((net, optimizer))

    def step(state: Any, batch: Any) -> Any:
        net, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(batch["x"]) - batch["y"]) ** 2))(net)
        optimizer.update(net, grads)
        return nnx.state((net, optimizer)), loss

    return Training(step=step, state=state, batches=regression(8, 4))


@model("flax optax", "nnx: transformer, vmapped and scanned layers, rotary", "adamw", (SHARD, ZERO_2, PIPE_2))
def nnx_transformer() -> Training:
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
            self.norms = nnx.List([nnx.RMSNorm(16, rngs=rngs), nnx.RMSNorm(16, rngs=rngs)])

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
            return x + self.down(nnx.gelu(self.up(self.norms[1](x))))

    class Gpt(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(32, 16, rngs=rngs)

            @nnx.split_rngs(splits=4)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def layers(rngs: Any) -> Layer:
                return Layer(rngs)

            self.layers = layers(rngs)

        def __call__(self, ids: Any) -> Any:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: Any, layer: Any) -> Any:
                return layer(x)

            return self.embed.attend(run(self.embed(ids), self.layers))

    net = Gpt(nnx.Rngs(0))
    graph, params = nnx.split(net)

    def loss(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(nnx.merge(graph, params)(batch["ids"]), batch["ids"])

    return minimise(loss, params, optax.adamw(1e-3), tokens(32, 12))


# ---- equinox --------------------------------------------------------------------------------------------------------


@model("equinox optax", "convolutions and dropout, vmapped over examples", "adam")
def equinox_cnn() -> Training:
    import equinox as eqx

    keys = jax.random.split(KEY(0), 3)
    net = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 8, 3, padding=1, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.GroupNorm(2, 8),
            eqx.nn.Dropout(0.2),
            eqx.nn.Conv2d(8, 8, 3, key=keys[1]),
            eqx.nn.AdaptiveAvgPool2d(1),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(8, 4, key=keys[2]),
        ]
    )
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        net, keys = eqx.combine(params, static), jax.random.split(key, batch["x"].shape[0])
        return cross_entropy(jax.vmap(net)(jnp.moveaxis(batch["x"], -1, 1), key=keys), batch["y"])

    return minimise_noisy(loss, params, optax.adam(1e-2), images(8, 4))


@model("equinox optax", "GRU and attention over sequences, vmapped", "rmsprop")
def equinox_sequences() -> Training:
    import equinox as eqx

    class Net(eqx.Module):
        embed: Any
        cell: Any
        attention: Any
        out: Any

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 4)
            self.embed, self.cell = eqx.nn.Embedding(32, 16, key=keys[0]), eqx.nn.GRUCell(16, 16, key=keys[1])
            self.attention = eqx.nn.MultiheadAttention(2, 16, key=keys[2])
            self.out = eqx.nn.Linear(16, 32, key=keys[3])

        def __call__(self, ids: Any) -> Any:
            def one(h: Any, x: Any) -> Any:
                h = self.cell(x, h)
                return h, h

            _, x = jax.lax.scan(one, jnp.zeros(16), jax.vmap(self.embed)(ids))
            n = ids.shape[0]
            return jax.vmap(self.out)(x + self.attention(x, x, x, jnp.tril(jnp.ones((n, n), bool))))

    # The attention has a flag among its leaves, which has no gradient.
    params, static = eqx.partition(Net(KEY(0)), eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(jax.vmap(eqx.combine(params, static))(batch["ids"]), batch["ids"])

    return minimise(loss, params, optax.rmsprop(1e-2), tokens(32, 10))


@model("equinox optax", "batch norm with a state", "adamw", (SHARD, DATA, PIPE_1))
def equinox_batch_norm() -> Training:
    import equinox as eqx

    class Net(eqx.Module):
        first: Any
        norm: Any
        last: Any

        def __call__(self, x: Any, state: Any) -> Any:
            x, state = self.norm(self.first(x), state)
            return self.last(jax.nn.relu(x)), state

    one, other = jax.random.split(KEY(0))
    net = Net(
        eqx.nn.Linear(8, 16, key=one), eqx.nn.BatchNorm(16, "batch", mode="batch"), eqx.nn.Linear(16, 4, key=other)
    )
    (params, static), norms = eqx.partition(net, eqx.is_inexact_array), eqx.nn.State(net)
    optimizer = optax.adamw(1e-2)

    def step(state: Any, batch: Any) -> Any:
        params, norms, opt_state = state

        def loss_of(params: Any) -> Any:
            net = eqx.combine(params, static)
            y, new = jax.vmap(net, (0, None), (0, None), axis_name="batch")(batch["x"], norms)
            return jnp.mean((y - batch["y"]) ** 2), new

        (loss, norms), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), norms, opt_state), loss

    return Training(step=step, state=(params, norms, optimizer.init(params)), batches=regression(8, 4))


@model("diffrax equinox optax", "neural ODE, adaptive steps, adjoint by checkpoints", "adabelief")
def neural_ode() -> Training:
    import diffrax
    import equinox as eqx

    net = eqx.nn.MLP(3, 3, 16, 2, jax.nn.softplus, key=KEY(0))

    def solved(net: Any, start: Any) -> Any:
        found = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, net: net(y)), diffrax.Tsit5(), 0.0, 1.0, 0.1, start, args=net,
            saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 5)),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6), max_steps=64,
        )  # fmt: skip
        return found.ys

    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> jax.Array:
        net = eqx.combine(params, static)
        return jnp.mean((jax.vmap(solved, (None, 0))(net, batch["x"]) - batch["y"]) ** 2)

    data = batches(lambda s: {"x": floats(N_EXAMPLES, 3, seed=s), "y": floats(N_EXAMPLES, 5, 3, seed=s + 1)})
    return minimise(loss, params, optax.adabelief(1e-2), data)


@model("diffrax equinox optax", "neural SDE, fixed steps, Brownian tree", "adam")
def neural_sde() -> Training:
    import diffrax
    import equinox as eqx

    net = eqx.nn.MLP(3, 3, 16, 1, jnp.tanh, key=KEY(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        net = eqx.combine(params, static)

        def solved(start: Any, key: Any) -> Any:
            noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (3,), key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, y, a: net(y)),
                diffrax.ControlTerm(lambda t, y, a: 0.1 * jnp.diag(jnp.tanh(y)), noise),
            )
            return diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, 0.1, start, max_steps=16).ys[-1]

        ends = jax.vmap(solved)(batch["x"], jax.random.split(key, batch["x"].shape[0]))
        return jnp.mean((ends - batch["y"]) ** 2)

    return minimise_noisy(loss, params, optax.adam(1e-2), regression(3, 3))


# ---- haiku ----------------------------------------------------------------------------------------------------------


def _haiku(function: Any, loss_of: Any, optimizer: Any, data: list[Any]) -> Training:
    """loss_of: maps the results of `function(batch)` and the batch to the loss."""
    import haiku as hk

    net = hk.transform_with_state(function)
    params, others = net.init(KEY(0), data[0])

    def step(state: Any, batch: Any) -> Any:
        params, others, opt_state, key = state
        key, own = jax.random.split(key)

        def loss(params: Any) -> Any:
            found, new = net.apply(params, others, own, batch)
            return loss_of(found, batch), new

        (value, others), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), others, opt_state, key), value

    return Training(step=step, state=(params, others, optimizer.init(params), KEY(1)), batches=data)


@model("dm-haiku optax", "ResNet with batch statistics", "sgd, momentum", (SHARD, DATA, PIPE_1))
def haiku_resnet() -> Training:
    import haiku as hk

    def net(batch: Any) -> Any:
        config = {"blocks_per_group": (1, 1, 1, 1), "channels_per_group": (4, 8, 8, 8), "bottleneck": False}
        return hk.nets.ResNet(num_classes=4, resnet_v2=True, **config)(batch["x"], is_training=True)

    return _haiku(net, lambda y, b: cross_entropy(y, b["y"]), optax.sgd(1e-2, 0.9), images(16, 4))


@model("dm-haiku optax", "LSTM with dropout over a dynamic unroll", "adam")
def haiku_lstm() -> Training:
    import haiku as hk

    def net(batch: Any) -> Any:
        x = hk.Embed(32, 16)(batch["ids"])
        core = hk.DeepRNN([hk.LSTM(16), jax.nn.relu, hk.LSTM(16)])
        x, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)
        return hk.Linear(32)(hk.dropout(hk.next_rng_key(), 0.1, x))

    return _haiku(net, lambda y, b: next_token_loss(y, b["ids"]), optax.adam(1e-2), tokens(32, 10))


@model("dm-haiku optax", "VQ-VAE, codes by moving averages", "adam", (SHARD, DATA))
def haiku_vqvae() -> Training:
    import haiku as hk

    def net(batch: Any) -> Any:
        z = hk.Conv2D(8, 4, 2)(batch["x"])
        found = hk.nets.VectorQuantizerEMA(8, 16, 0.25, 0.99)(z, is_training=True)
        return hk.Conv2DTranspose(3, 4, 2)(found["quantize"]), found["loss"]

    def loss(found: Any, batch: Any) -> Any:
        return jnp.mean((found[0] - batch["x"]) ** 2) + found[1]

    return _haiku(net, loss, optax.adam(1e-3), images(8, 4))


@model("dm-haiku optax", "transformer, layer_stack", "adamw", (SHARD, ZERO_2, PIPE_2))
def haiku_stack() -> Training:
    import haiku as hk

    def net(batch: Any) -> Any:
        embed = hk.Embed(32, 16)
        n = batch["ids"].shape[1]
        mask = jnp.tril(jnp.ones((1, 1, n, n), bool))

        def layer(x: Any) -> Any:
            y = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(2, 8, w_init=hk.initializers.VarianceScaling(0.5))(y, y, y, mask)
            return x + hk.nets.MLP([32, 16], activation=jax.nn.gelu)(hk.LayerNorm(-1, True, True)(x))

        return hk.experimental.layer_stack(4)(layer)(embed(batch["ids"])) @ embed.embeddings.T

    return _haiku(net, lambda y, b: next_token_loss(y, b["ids"]), optax.adamw(1e-3), tokens(32, 10))
