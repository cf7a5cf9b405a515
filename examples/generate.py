"""Trains a small GPT and generates text with a cache of keys and values, all on the meshes of the training step.

    python examples/generate.py                # two pipeline stages on the local devices
    python examples/generate.py --ray          # the hosts of a Ray cluster

`generate` is one call that loops over all tokens. `next_token` is one call for each token, which donates the cache.
Neither names a method: their arguments are on the meshes of `train_step`, so they run there.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa

VOCABULARY, LENGTH, HIDDEN, N_HEADS, N_LAYERS = 16, 16, 32, 4, 2

Cache = dict[str, jax.Array]


def init(key: jax.Array) -> dict[str, Any]:
    """Parameters of a decoder: embeddings of tokens and positions, blocks of attention and feed-forward, a head."""

    def normal(*shape: int) -> jax.Array:
        nonlocal key
        key, own = jax.random.split(key)
        return jax.random.normal(own, shape) * shape[0] ** -0.5

    def block() -> dict[str, jax.Array]:
        attention = {"qkv": normal(HIDDEN, 3 * HIDDEN), "out": normal(HIDDEN, HIDDEN)}
        return {**attention, "up": normal(HIDDEN, 4 * HIDDEN), "down": normal(4 * HIDDEN, HIDDEN)}

    return {
        "tokens": normal(VOCABULARY, HIDDEN),
        "positions": normal(LENGTH, HIDDEN),
        "blocks": [block() for _ in range(N_LAYERS)],
        "head": normal(HIDDEN, VOCABULARY),
    }


def empty_cache(n: int) -> list[Cache]:
    """Keys and values [n LENGTH heads size] of each block, for `n` texts."""
    shape = (n, LENGTH, N_HEADS, HIDDEN // N_HEADS)
    return [{"keys": jnp.zeros(shape), "values": jnp.zeros(shape)} for _ in range(N_LAYERS)]


def apply(params: Any, cache: list[Cache], tokens: jax.Array, start: Any) -> tuple[jax.Array, list[Cache]]:
    """Logits [n length VOCABULARY] of `tokens` [n length] at the positions from `start` on, and the cache with them."""
    n, length = tokens.shape
    positions = jax.lax.dynamic_slice_in_dim(params["positions"], start, length)
    x = params["tokens"][tokens] + positions[None]
    seen = jnp.arange(LENGTH)[None, :] <= (start + jnp.arange(length))[:, None]

    new = []
    for i, (block, kept) in enumerate(zip(params["blocks"], cache, strict=True)):
        if i:
            minialpa.mark_pipeline_boundary()
        query, key, value = jnp.split((_norm(x) @ block["qkv"]).reshape(n, length, N_HEADS, -1), 3, axis=-1)
        keys = jax.lax.dynamic_update_slice_in_dim(kept["keys"], key, start, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(kept["values"], value, start, axis=1)
        scores = jnp.einsum("nqhd,nkhd->nhqk", query, keys) * query.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -1e9), axis=-1)
        x = x + jnp.einsum("nhqk,nkhd->nqhd", weights, values).reshape(n, length, HIDDEN) @ block["out"]
        x = x + jax.nn.gelu(_norm(x) @ block["up"]) @ block["down"]
        new.append({"keys": keys, "values": values})
    return _norm(x) @ params["head"], new


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def train_step(params: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        logits, _ = apply(params, empty_cache(batch["tokens"].shape[0]), batch["tokens"], 0)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], axis=-1).mean()

    loss, grads = minialpa.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda w, g: w - 0.3 * g, params, grads), loss


def prefill(params: Any, cache: list[Cache], prompt: jax.Array) -> tuple[jax.Array, list[Cache]]:
    """The token [n 1] that follows each prompt, and the cache with the prompts."""
    logits, cache = apply(params, cache, prompt, 0)
    return logits[:, -1:].argmax(-1).astype(jnp.int32), cache


def next_token(params: Any, cache: list[Cache], token: jax.Array, position: jax.Array) -> tuple[jax.Array, list[Cache]]:
    """The token [n 1] after `token`, which is at `position`."""
    logits, cache = apply(params, cache, token, position)
    return logits.argmax(-1).astype(jnp.int32), cache


def generate(params: Any, cache: list[Cache], prompt: jax.Array) -> jax.Array:
    """All tokens [n LENGTH - length] after a prompt [n length]."""
    first, cache = prefill(params, cache, prompt)

    def one(carry: Any, position: jax.Array) -> tuple[Any, jax.Array]:
        token, cache = carry
        token, cache = next_token(params, cache, token, position)
        return (token, cache), token[:, 0]

    _, rest = jax.lax.scan(one, (first, cache), jnp.arange(prompt.shape[1], LENGTH - 1))
    return jnp.concatenate([first, rest.T], axis=1)


def main(steps: int = 60) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The trained parameters, and the texts of both ways to generate."""
    step = minialpa.parallelize(
        train_step,
        method=minialpa.PipeshardParallel(
            num_micro_batches=2, layer_option="manual", stage_option=minialpa.UniformStageOption(num_stages=N_LAYERS)
        ),
    )
    # Counting upwards, from any token.
    text = (np.arange(8)[:, None] * 2 + np.arange(LENGTH + 1)[None]) % VOCABULARY
    batch = {"tokens": text[:, :-1].astype(np.int32), "labels": text[:, 1:].astype(np.int32)}
    params = init(jax.random.key(0))
    for i in range(steps):
        params, loss = step(params, batch)
        if i % 20 == 19:
            print(f"step {i}: loss {float(loss):.4f}")

    prompt = batch["tokens"][:4, :6]
    # A cache is a state, not a batch that micro-batches cut.
    at_once = minialpa.parallelize(generate, batch_argnums=())(params, empty_cache(4), prompt)

    # Each call donates its cache.
    start = minialpa.parallelize(prefill, batch_argnums=())
    go_on = minialpa.parallelize(next_token, donate_argnums=(1,))
    token, cache = start(params, empty_cache(4), prompt)
    tokens = [np.asarray(token)]
    for position in range(prompt.shape[1], LENGTH - 1):
        token, cache = go_on(params, cache, token, np.int32(position))
        tokens.append(np.asarray(token))
    return params, np.asarray(at_once), np.concatenate(tokens, axis=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ray", action="store_true")
    flags = parser.parse_args()
    if flags.ray:
        minialpa.init(cluster="ray")
    _, at_once, one_by_one = main(flags.steps)
    print(at_once)
    assert (at_once == one_by_one).all()
