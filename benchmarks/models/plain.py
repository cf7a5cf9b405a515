"""Models of plain pytrees, written with `jax.numpy` and optax alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.catalogue import (
    DATA,
    DATA_2,
    NONE,
    PIPE_2,
    PIPE_4,
    SEARCHED,
    SHARD,
    SHARD_2,
    USUAL,
    ZERO_2,
    ZERO_3,
    Training,
    model,
)
from benchmarks.models.common import (
    N_EXAMPLES,
    apply_dense,
    apply_tower,
    batches,
    cross_entropy,
    dense,
    floats,
    integers,
    minimise,
    minimise_noisy,
    next_token_loss,
    regression,
    tokens,
    towers,
)


def squared_error(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((apply_tower(params, batch["x"]) - batch["y"]) ** 2)


@model("jax optax", "MLP", "adam", (NONE, SHARD, DATA_2, ZERO_2, ZERO_3, PIPE_4, SEARCHED))
def mlp() -> Training:
    return minimise(squared_error, towers(16, 32, 32, 32, 4), optax.adam(1e-2), regression(16, 4))


@model("jax optax", "MLP in 64 bits", "adam", x64=True)
def mlp_x64() -> Training:
    data = jax.tree.map(lambda x: x.astype("float64"), regression(16, 4))
    params = jax.tree.map(lambda x: x.astype(jnp.float64), towers(16, 32, 32, 4))
    return minimise(squared_error, params, optax.adam(1e-2), data)


@model("jax optax", "MLP, parameters in bfloat16", "adamw", (SHARD, ZERO_2, PIPE_2))
def mlp_bfloat16() -> Training:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), towers(16, 32, 32, 4))
    data = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), regression(16, 4))
    return minimise(squared_error, params, optax.adamw(1e-2), data)


@model("jmp jax optax", "MLP in float16, dynamic loss scaling", "adam")
def mlp_loss_scaling() -> Training:
    import jmp

    policy, optimizer = jmp.get_policy("params=float32,compute=float16,output=float32"), optax.adam(1e-2)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, scale = state

        def loss_of(params: Any) -> jax.Array:
            half, x = policy.cast_to_compute((params, batch["x"]))
            return scale.scale(jnp.mean((policy.cast_to_output(apply_tower(half, x)) - batch["y"]) ** 2))

        loss, grads = jax.value_and_grad(loss_of)(params)
        grads = scale.unscale(grads)
        is_finite = jmp.all_finite(grads)
        updates, new_state = optimizer.update(grads, opt_state)
        found = (optax.apply_updates(params, updates), new_state)
        params, opt_state = jmp.select_tree(is_finite, found, (params, opt_state))
        return (params, opt_state, scale.adjust(is_finite)), scale.unscale(loss)

    params = towers(16, 32, 32, 4)
    state = params, optimizer.init(params), jmp.DynamicLossScale(jnp.float32(2.0**8), period=2)
    data = regression(16, 4)
    data[0]["y"] *= 1e6  # gradients overflow, so that the step is left out and the scale falls
    return Training(step=step, state=state, batches=data, eps=float(jnp.finfo(jnp.float16).eps))


# ---- sequences ------------------------------------------------------------------------------------------------------


def _attention(layer: Any, x: jax.Array, n_heads: int = 2) -> jax.Array:
    b, t, d = x.shape
    q, k, v = (apply_dense(layer[name], x).reshape(b, t, n_heads, -1) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (d / n_heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
    return apply_dense(layer["o"], jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, t, d))


def _norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _blocks(n_layers: int, d: int) -> list[Any]:
    widths = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "up": (d, 2 * d), "down": (2 * d, d)}
    return [
        {name: dense(*width, 10 * i + j) for j, (name, width) in enumerate(widths.items())} for i in range(n_layers)
    ]


def _block(layer: Any, x: jax.Array) -> jax.Array:
    x = x + _attention(layer, _norm(x))
    return x + apply_dense(layer["down"], jax.nn.gelu(apply_dense(layer["up"], _norm(x))))


@model("jax optax", "GPT by a loop over layers", "adamw, clipping, warm-up and cosine", (NONE, SHARD, ZERO_2, PIPE_4))
def gpt_loop() -> Training:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["ids"]]
        for layer in params["blocks"]:
            x = _block(layer, x)
        return next_token_loss(x @ params["embed"].T, batch["ids"])

    params = {"embed": jnp.asarray(floats(32, 16)), "blocks": _blocks(4, 16)}
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 1e-2, 2, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return minimise(loss, params, optimizer, tokens(32, 12))


@model("jax optax", "GPT by a scan over rematerialised layers", "lion", (SHARD, ZERO_3, PIPE_2))
def gpt_scan() -> Training:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["ids"]]
        x, _ = jax.lax.scan(lambda x, layer: (jax.checkpoint(_block)(layer, x), None), x, params["blocks"])
        return next_token_loss(x @ params["embed"].T, batch["ids"])

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *_blocks(4, 16))
    return minimise(loss, {"embed": jnp.asarray(floats(32, 16)), "blocks": stacked}, optax.lion(1e-3), tokens(32, 12))


def _gru(cell: Any, h: jax.Array, x: jax.Array) -> jax.Array:
    gates = jax.nn.sigmoid(apply_dense(cell["gates"], jnp.concatenate([x, h], -1)))
    z, r = jnp.split(gates, 2, -1)
    return (1 - z) * h + z * jnp.tanh(apply_dense(cell["new"], jnp.concatenate([x, r * h], -1)))


@model("jax optax", "two-way GRU with a CTC loss", "adam")
def rnn_ctc() -> Training:
    d = 16

    def direction(cell: Any, x: jax.Array, *, reverse: bool) -> jax.Array:
        def one(h: jax.Array, frame: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = _gru(cell, h, frame)
            return h, h

        start = jnp.zeros((x.shape[0], d))
        return jax.lax.scan(one, start, jnp.swapaxes(x, 0, 1), reverse=reverse)[1].swapaxes(0, 1)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = jnp.concatenate([direction(params[k], batch["x"], reverse=k == "back") for k in ("forth", "back")], -1)
        logits = apply_dense(params["out"], x)
        return jnp.mean(optax.ctc_loss(logits, batch["x_pad"], batch["labels"], batch["label_pad"]))

    def batch(s: int) -> Any:
        n_frames, n_labels = integers(4, N_EXAMPLES, 1, seed=s) + 9, integers(3, N_EXAMPLES, 1, seed=s + 1) + 2
        return {
            "x": floats(N_EXAMPLES, 12, 6, seed=s + 2),
            "x_pad": (jnp.arange(12) >= n_frames).astype(jnp.float32),
            "labels": integers(9, N_EXAMPLES, 4, seed=s + 3) + 1,
            "label_pad": (jnp.arange(4) >= n_labels).astype(jnp.float32),
        }

    cells = {
        k: {"gates": dense(6 + d, 2 * d, i), "new": dense(6 + d, d, i + 1)} for i, k in enumerate(("forth", "back"))
    }
    return minimise(loss, {**cells, "out": dense(2 * d, 10, 9)}, optax.adam(1e-2), batches(batch))


@model("jax optax", "state-space model by an associative scan", "adamw")
def state_space() -> Training:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["ids"]]
        for layer in params["layers"]:
            decay = jax.nn.sigmoid(apply_dense(layer["decay"], x))
            driven = apply_dense(layer["in"], x)
            _, h = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (decay, driven), axis=1)
            x = x + apply_dense(layer["out"], jax.nn.silu(h))
        return next_token_loss(x @ params["embed"].T, batch["ids"])

    layers = [{name: dense(16, 16, 3 * i + j) for j, name in enumerate(("decay", "in", "out"))} for i in range(2)]
    return minimise(loss, {"embed": jnp.asarray(floats(32, 16)), "layers": layers}, optax.adamw(1e-2), tokens(32, 12))


@model("jax optax", "long convolutions by FFT (Hyena)", "adam")
def hyena() -> Training:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["ids"]]
        for layer in params["layers"]:
            n = 2 * x.shape[1]
            filtered = jnp.fft.irfft(jnp.fft.rfft(x, n, axis=1) * jnp.fft.rfft(layer["filter"], n, axis=0), n, axis=1)
            x = x + apply_dense(layer["out"], filtered[:, : n // 2] * jax.nn.silu(apply_dense(layer["gate"], x)))
        return next_token_loss(x @ params["embed"].T, batch["ids"])

    layers = [
        {"filter": jnp.asarray(floats(12, 16, seed=i)) * 0.1, "gate": dense(16, 16, i), "out": dense(16, 16, i + 5)}
        for i in range(2)
    ]
    return minimise(loss, {"embed": jnp.asarray(floats(32, 16)), "layers": layers}, optax.adam(1e-2), tokens(32, 12))


# ---- experts, recommendations, sets ---------------------------------------------------------------------------------


@model("jax optax", "mixture of experts: top 2, capacities, balance loss", "adafactor")
def mixture() -> Training:
    n_experts, capacity, d = 4, 6, 16

    def routed(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each example dispatches its own tokens."""
        gates = jax.nn.softmax(x @ params["router"])
        best, chosen = jax.lax.top_k(gates, 2)
        mask = jax.nn.one_hot(chosen, n_experts)
        place = jnp.cumsum(mask.sum(2), 1)[:, :, None] * mask - 1
        slot = jax.nn.one_hot(place, capacity) * mask[..., None]
        dispatched = jnp.einsum("btkec,btd->ebcd", slot, x)
        hidden = jax.nn.relu(jnp.einsum("ebcd,edh->ebch", dispatched, params["up"]))
        out = jnp.einsum("ebch,ehd->ebcd", hidden, params["down"])
        y = jnp.einsum("btkec,btk,ebcd->btd", slot, best, out)
        balance = n_experts * jnp.sum(mask.sum(2).mean((0, 1)) * gates.mean((0, 1)))
        return x + y, balance

    def loss(params: Any, batch: Any) -> jax.Array:
        x, balances = params["embed"][batch["ids"]], []
        for layer in params["layers"]:
            x, balance = routed(layer, x)
            balances.append(balance)
        return next_token_loss(x @ params["embed"].T, batch["ids"]) + 0.01 * jnp.sum(jnp.stack(balances))

    def layer(i: int) -> Any:
        shapes = {"router": (d, n_experts), "up": (n_experts, d, 32), "down": (n_experts, 32, d)}
        return {k: jnp.asarray(floats(*shape, seed=i + j)) * 0.2 for j, (k, shape) in enumerate(shapes.items())}

    params = {"embed": jnp.asarray(floats(32, d)), "layers": [layer(0), layer(5)]}
    return minimise(loss, params, optax.adafactor(1e-2), tokens(32, 12))


@model("jax optax", "recommendations: bags of embeddings, sums over segments", "adagrad")
def recommendations() -> Training:
    def loss(params: Any, batch: Any) -> jax.Array:
        n, length = batch["items"].shape
        rows = params["items"][batch["items"].reshape(-1)] * batch["weights"].reshape(-1, 1)
        bags = jax.ops.segment_sum(rows, jnp.repeat(jnp.arange(n), length), n)
        user = params["users"][batch["user"]]
        logit = apply_tower(params["tower"], jnp.concatenate([bags, user, bags * user], -1))[:, 0]
        return optax.sigmoid_binary_cross_entropy(logit, batch["clicked"]).mean()

    def batch(s: int) -> Any:
        return {
            "items": integers(40, N_EXAMPLES, 5, seed=s),
            "weights": floats(N_EXAMPLES, 5, seed=s + 1),
            "user": integers(20, N_EXAMPLES, seed=s + 2),
            "clicked": integers(2, N_EXAMPLES, seed=s + 3).astype("float32"),
        }

    params = {
        "items": jnp.asarray(floats(40, 8)),
        "users": jnp.asarray(floats(20, 8, seed=1)),
        "tower": towers(24, 16, 1),
    }
    return minimise(loss, params, optax.adagrad(1e-1), batches(batch))


@model("jax optax", "word2vec, negatives drawn in the step", "sgd, momentum")
def word2vec() -> Training:
    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        center, context = params["in"][batch["center"]], params["out"][batch["context"]]
        negative = params["out"][jax.random.randint(key, (batch["center"].shape[0], 5), 0, 40)]
        good = jax.nn.log_sigmoid(jnp.sum(center * context, -1))
        bad = jax.nn.log_sigmoid(-jnp.einsum("bd,bnd->bn", center, negative)).sum(-1)
        return -jnp.mean(good + bad)

    data = batches(
        lambda s: {"center": integers(40, N_EXAMPLES, seed=s), "context": integers(40, N_EXAMPLES, seed=s + 1)}
    )
    params = {"in": jnp.asarray(floats(40, 8)), "out": jnp.asarray(floats(40, 8, seed=1))}
    return minimise_noisy(loss, params, optax.sgd(1e-1, momentum=0.9), data)


@model("jax optax", "point clouds: sorted by distance, k nearest neighbours", "radam")
def point_cloud() -> Training:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        distance = jnp.sum((x[:, :, None] - x[:, None]) ** 2, -1)
        near = jnp.argsort(distance, -1)[:, :, :4]
        neighbours = jax.vmap(lambda points, index: points[index])(x, near)
        edges = apply_tower(params["edge"], jnp.concatenate([neighbours, neighbours - x[:, :, None]], -1)).max(2)
        return cross_entropy(apply_tower(params["out"], edges.max(1)), batch["y"])

    data = batches(lambda s: {"x": floats(N_EXAMPLES, 10, 3, seed=s), "y": integers(4, N_EXAMPLES, seed=s + 1)})
    return minimise(loss, {"edge": towers(6, 16, 16), "out": towers(16, 16, 4, seed=7)}, optax.radam(1e-2), data)


# ---- losses on more than one example, or of more than one gradient --------------------------------------------------


@model("jax optax", "contrastive image and text towers", "lamb", (SHARD, DATA_2, PIPE_2))
def contrastive() -> Training:
    def loss(params: Any, batch: Any) -> jax.Array:
        a, b = apply_tower(params["image"], batch["image"]), apply_tower(params["text"], batch["text"])
        a, b = a / jnp.linalg.norm(a, axis=-1, keepdims=True), b / jnp.linalg.norm(b, axis=-1, keepdims=True)
        logits = jnp.exp(params["scale"]) * a @ b.T
        labels = jnp.arange(logits.shape[0])
        each = [optax.softmax_cross_entropy_with_integer_labels(one, labels) for one in (logits, logits.T)]
        return jnp.mean(each[0] + each[1])

    data = batches(lambda s: {"image": floats(N_EXAMPLES, 12, seed=s), "text": floats(N_EXAMPLES, 10, seed=s + 1)})
    params = {"image": towers(12, 32, 16), "text": towers(10, 32, 16, seed=5), "scale": jnp.float32(1.0)}
    return minimise(loss, params, optax.lamb(1e-2), data)


@model("jax optax", "GAN: two losses, two optimizers", "adam, rmsprop")
def gan() -> Training:
    first, second = optax.adam(1e-3, b1=0.5), optax.rmsprop(1e-3)

    def step(state: Any, batch: Any) -> Any:
        key, own = jax.random.split(state["key"])
        noise = jax.random.normal(own, (batch["x"].shape[0], 8))

        def critic_loss(critic: Any) -> jax.Array:
            real, fake = apply_tower(critic, batch["x"]), apply_tower(critic, apply_tower(state["maker"], noise))
            return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))

        def maker_loss(maker: Any, critic: Any) -> jax.Array:
            return jnp.mean(jax.nn.softplus(-apply_tower(critic, apply_tower(maker, noise))))

        loss, grads = jax.value_and_grad(critic_loss)(state["critic"])
        updates, critic_state = second.update(grads, state["critic_state"])
        critic = optax.apply_updates(state["critic"], updates)
        other, grads = jax.value_and_grad(maker_loss)(state["maker"], critic)
        updates, maker_state = first.update(grads, state["maker_state"])
        maker = optax.apply_updates(state["maker"], updates)
        new = {"maker": maker, "critic": critic, "maker_state": maker_state, "critic_state": critic_state, "key": key}
        return new, (loss, other)

    maker, critic = towers(8, 32, 12), towers(12, 32, 1, seed=3)
    state = {"maker": maker, "critic": critic, "maker_state": first.init(maker), "critic_state": second.init(critic)}
    return Training(step=step, state=state | {"key": jax.random.key(1)}, batches=regression(12, 1))


@model("jax optax", "Wasserstein GAN's critic with a gradient penalty", "adam")
def gradient_penalty() -> Training:
    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        share = jax.random.uniform(key, (batch["x"].shape[0], 1))
        between = share * batch["x"] + (1 - share) * batch["y"]
        slopes = jax.vmap(jax.grad(lambda x: apply_tower(params, x)[0]))(between)
        penalty = jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)
        return jnp.mean(apply_tower(params, batch["y"]) - apply_tower(params, batch["x"])) + 10 * penalty

    return minimise_noisy(loss, towers(12, 32, 32, 1), optax.adam(1e-3), regression(12, 12))


@model("jax optax", "model-agnostic meta-learning, two inner steps", "adam")
def meta_learning() -> Training:
    def adapted_loss(params: Any, task: Any) -> jax.Array:
        def fit(params: Any, _: None) -> tuple[Any, None]:
            grads = jax.grad(squared_error)(params, {"x": task["x"], "y": task["y"]})
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None

        adapted, _ = jax.lax.scan(fit, params, None, 2)
        return squared_error(adapted, {"x": task["x_test"], "y": task["y_test"]})

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jax.vmap(adapted_loss, (None, 0))(params, batch))

    def batch(s: int) -> Any:
        shapes = {"x": (5, 3), "y": (5, 2), "x_test": (4, 3), "y_test": (4, 2)}
        return {k: floats(N_EXAMPLES, *shape, seed=s + i) for i, (k, shape) in enumerate(shapes.items())}

    return minimise(loss, towers(3, 16, 16, 2), optax.adam(1e-2), batches(batch))


@model("jax optax", "physics-informed network: Laplacian by Hessians", "adam")
def physics_informed() -> Training:
    def loss(params: Any, batch: Any) -> jax.Array:
        def u(point: jax.Array) -> jax.Array:
            return apply_tower(params, point)[0]

        inside = jax.vmap(lambda p: jnp.trace(jax.hessian(u)(p)) - jnp.sin(p[0]))(batch["x"])
        return jnp.mean(inside**2) + jnp.mean(jax.vmap(u)(batch["y"]) ** 2)

    return minimise(loss, towers(2, 16, 16, 1), optax.adam(1e-3), regression(2, 2))


@model("jax optax", "VAE", "adabelief")
def vae() -> Training:
    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        mean, log_var = jnp.split(apply_tower(params["in"], batch["x"]), 2, -1)
        z = mean + jnp.exp(log_var / 2) * jax.random.normal(key, mean.shape)
        found = apply_tower(params["out"], z)
        divergence = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), -1)
        return jnp.mean(jnp.sum((found - batch["x"]) ** 2, -1) + divergence)

    return minimise_noisy(
        loss, {"in": towers(16, 32, 8), "out": towers(4, 32, 16, seed=3)}, optax.adabelief(1e-3), regression(16, 1)
    )


@model("jax optax", "proximal policy optimisation: advantages, ratios, entropy", "adam, clipping")
def policy_optimisation() -> Training:
    def loss(params: Any, batch: Any) -> jax.Array:
        logits, values = apply_tower(params["actor"], batch["x"]), apply_tower(params["critic"], batch["x"])[..., 0]

        def back(later: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            later = now[0] + 0.95 * later * now[1]
            return later, later

        deltas = batch["reward"] + 0.99 * jnp.roll(values, -1, 1) * batch["goes_on"] - values
        _, advantages = jax.lax.scan(back, jnp.zeros(values.shape[0]), (deltas.T, batch["goes_on"].T), reverse=True)
        advantages = jax.lax.stop_gradient(advantages.T)
        targets = jax.lax.stop_gradient(advantages + values)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        log_p = jax.nn.log_softmax(logits)
        own = jnp.take_along_axis(log_p, batch["action"][..., None], -1)[..., 0]
        ratio = jnp.exp(own - batch["log_p"])
        clipped = jnp.clip(ratio, 0.8, 1.2)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1).mean()
        policy = -jnp.minimum(ratio * advantages, clipped * advantages).mean()
        return policy + 0.5 * jnp.mean((values - targets) ** 2) - 0.01 * entropy

    def batch(s: int) -> Any:
        return {
            "x": floats(N_EXAMPLES, 6, 5, seed=s),
            "action": integers(3, N_EXAMPLES, 6, seed=s + 1),
            "log_p": -1.1 + 0.1 * floats(N_EXAMPLES, 6, seed=s + 2),
            "reward": floats(N_EXAMPLES, 6, seed=s + 3),
            "goes_on": (integers(5, N_EXAMPLES, 6, seed=s + 4) > 0).astype("float32"),
        }

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
    return minimise(loss, {"actor": towers(5, 16, 3), "critic": towers(5, 16, 1, seed=4)}, optimizer, batches(batch))


@model("jax optax", "DQN with a target network and double Q", "adam, target by incremental update")
def deep_q() -> Training:
    optimizer = optax.adam(1e-3)

    def step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            q = jnp.take_along_axis(apply_tower(params, batch["x"]), batch["action"][:, None], 1)[:, 0]
            best = jnp.argmax(apply_tower(params, batch["next"]), 1)
            later = jnp.take_along_axis(apply_tower(state["target"], batch["next"]), best[:, None], 1)[:, 0]
            return optax.huber_loss(q, jax.lax.stop_gradient(batch["reward"] + 0.9 * later)).mean()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        target = optax.incremental_update(params, state["target"], 0.1)
        target = optax.periodic_update(params, target, state["n"], 2)
        return {"params": params, "target": target, "opt_state": opt_state, "n": state["n"] + 1}, loss

    def batch(s: int) -> Any:
        shapes = {"x": (5,), "next": (5,), "reward": ()}
        found = {k: floats(N_EXAMPLES, *shape, seed=s + i) for i, (k, shape) in enumerate(shapes.items())}
        return found | {"action": integers(3, N_EXAMPLES, seed=s + 5)}

    params = towers(5, 32, 3)
    state = {"params": params, "target": params, "opt_state": optimizer.init(params), "n": jnp.int32(0)}
    return Training(step=step, state=state, batches=batches(batch))


@model("jax optax", "NeRF: rays, hierarchical samples, volume rendering", "adam, exponential decay")
def nerf() -> Training:
    def rendered(params: Any, rays: jax.Array, depth: jax.Array) -> tuple[jax.Array, jax.Array]:
        points = rays[:, None, :3] + depth[..., None] * rays[:, None, 3:]
        waves = jnp.concatenate([f(points * 2.0**i) for i in range(3) for f in (jnp.sin, jnp.cos)], -1)
        out = apply_tower(params, waves)
        alpha = 1 - jnp.exp(-jax.nn.relu(out[..., 3]) * jnp.diff(depth, append=depth[:, -1:] + 0.1, axis=-1))
        weights = alpha * jnp.cumprod(jnp.concatenate([jnp.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], -1), -1)
        return jnp.einsum("rs,rsc->rc", weights, jax.nn.sigmoid(out[..., :3])), weights

    def loss(params: Any, batch: Any) -> jax.Array:
        coarse = jnp.broadcast_to(jnp.linspace(0.5, 2.0, 6), (batch["x"].shape[0], 6))
        color, weights = rendered(params["coarse"], batch["x"], coarse)
        share = jnp.cumsum(jax.lax.stop_gradient(weights) + 1e-3, -1)
        share = share / share[:, -1:]
        place = jax.vmap(lambda cdf: jnp.searchsorted(cdf, jnp.linspace(0.05, 0.95, 6)))(share)
        fine = jnp.sort(
            jnp.concatenate([coarse, jnp.take_along_axis(coarse, jnp.clip(place, 0, 5), -1) + 0.01], -1), -1
        )
        finer, _ = rendered(params["fine"], batch["x"], fine)
        return jnp.mean((color - batch["y"]) ** 2) + jnp.mean((finer - batch["y"]) ** 2)

    params = {"coarse": towers(18, 32, 4), "fine": towers(18, 32, 4, seed=7)}
    return minimise(loss, params, optax.adam(optax.exponential_decay(1e-2, 1, 0.9)), regression(6, 3))


# ---- optimizers -----------------------------------------------------------------------------------------------------


@model(
    "jax optax", "MLP, private gradients of each example", "dpsgd (noise and clipping)", (SHARD, DATA, DATA_2, PIPE_2)
)
def private_gradients() -> Training:
    optimizer = optax.contrib.dpsgd(1e-1, 1.0, 0.5, 3)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def one(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return squared_error(params, {"x": x[None], "y": y[None]})

        losses, grads = jax.vmap(jax.value_and_grad(one), (None, 0, 0))(params, batch["x"], batch["y"])
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), losses.mean()

    params = towers(16, 32, 4)
    return Training(step=step, state=(params, optimizer.init(params)), batches=regression(16, 4))


@model("jax optax", "MLP, sharpness-aware", "contrib.sam (opaque)", (SHARD, DATA_2, PIPE_2))
def sharpness_aware() -> Training:
    optimizer = optax.contrib.sam(
        optax.sgd(1e-1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), opaque_mode=True, reset_state=False
    )

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        grad = jax.grad(squared_error)

        def again(params: Any, _: Any) -> Any:
            return grad(params, batch)

        updates, opt_state = optimizer.update(grad(params, batch), opt_state, params, grad_fn=again)
        return (optax.apply_updates(params, updates), opt_state), squared_error(params, batch)

    params = towers(16, 32, 4)
    return Training(step=step, state=(params, optimizer.init(params)), batches=regression(16, 4))


@model("jax optax", "MLP, updated every second step", "MultiSteps(adam)", (SHARD, ZERO_2, PIPE_2))
def multi_steps() -> Training:
    optimizer = optax.MultiSteps(optax.adam(1e-2), 2)
    return minimise(squared_error, towers(16, 32, 4), optimizer, regression(16, 4))


@model("jax optax", "MLP, three optimizers by label, masks, frozen leaves", "partition", (SHARD, ZERO_3, PIPE_2))
def by_label() -> Training:
    rules = {"first": optax.adam(1e-2), "middle": optax.sgd(1e-2, 0.9), "last": optax.set_to_zero()}
    params = dict(zip(rules, towers(16, 32, 32, 4), strict=True))
    by_name = optax.partition(rules, {name: name for name in rules})
    decay = optax.masked(optax.add_decayed_weights(1e-3), jax.tree.map(lambda x: x.ndim > 1, params))

    def loss(params: Any, batch: Any) -> jax.Array:
        # By name, because jax sorts the keys of dicts.
        return squared_error([params[name] for name in rules], batch)

    return minimise(loss, params, optax.chain(decay, by_name), regression(16, 4))


@model("jax optax", "MLP, averages of parameters, non-finite steps left out", "apply_if_finite(adam), params_ema")
def averaged() -> Training:
    optimizer, average = optax.apply_if_finite(optax.adam(1e-2), 3), optax.ema(0.9)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, ema_state, _ = state
        value, grads = jax.value_and_grad(squared_error)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        ema, ema_state = average.update(params, ema_state)
        return (params, opt_state, ema_state, ema), value

    params, data = towers(16, 32, 4), regression(16, 4)
    data[1]["x"][0, 0] = float("nan")
    return Training(step=step, state=(params, optimizer.init(params), average.init(params), params), batches=data)


def _with_optimizer(name: str, optimizer: Any, methods: tuple[str, ...] = USUAL) -> None:
    """A row of a small network for each optimizer that does more than arithmetic leaf by leaf."""

    def build() -> Training:
        return minimise(squared_error, towers(16, 32, 4), optimizer(), regression(16, 4))

    build.__name__ = "mlp_" + name.partition("(")[0].partition(",")[0].removeprefix("contrib.")
    model("jax optax", "MLP", name, methods)(build)


_with_optimizer("contrib.muon", lambda: optax.contrib.muon(1e-2))
_with_optimizer("contrib.schedule_free_adamw", lambda: optax.contrib.schedule_free_adamw(1e-2))
_with_optimizer("contrib.prodigy", lambda: optax.contrib.prodigy(1.0))
_with_optimizer("contrib.dadapt_adamw", lambda: optax.contrib.dadapt_adamw(1.0))
_with_optimizer("contrib.mechanize(adam)", lambda: optax.contrib.mechanize(optax.adam(1e-2)))
_with_optimizer("contrib.ademamix", lambda: optax.contrib.ademamix(1e-2))
_with_optimizer("sm3, adaptive clipping", lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sm3(1e-2)))
_with_optimizer("noisy_sgd", lambda: optax.noisy_sgd(1e-2), (SHARD, DATA, PIPE_2))
_with_optimizer("yogi, centralised", lambda: optax.chain(optax.centralize(), optax.yogi(1e-2)), (SHARD_2, ZERO_3))


@model("jax optax", "logistic regression", "lbfgs with a line search", (SHARD, DATA))
def line_search() -> Training:
    optimizer = optax.lbfgs(memory_size=3)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def loss_of(params: Any) -> jax.Array:
            return optax.sigmoid_binary_cross_entropy(apply_tower(params, batch["x"]), batch["y"] > 0).mean()

        value, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value, grad=grads, value_fn=loss_of)
        return (optax.apply_updates(params, updates), opt_state), value

    params = towers(16, 4)
    return Training(step=step, state=(params, optimizer.init(params)), batches=regression(16, 4))
