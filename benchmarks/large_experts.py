"""A mixture of experts with 535B parameters on 192 H100s: the planner's plan beside the plan of a published run.

Dimensions and run are public (marin-community/marin, issues 8435 and 9277): 48 layers of width 6144, 48 heads of
queries and 12 of keys, 384 routed experts of 3072 x 3072, of which a token takes 8, and two shared experts; Muon in
bfloat16. Its authors chose 24 stages of 8 GPUs that share the experts, 1F1B with 48 micro-batches, and activations and
optimizer state in host memory: 174.4 s for 384 sequences of 65,536 tokens.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from minialpa import (
    AutoLayerOption,
    AutoParallel,
    ClusterSpec,
    InfeasibleError,
    PipeshardParallel,
    UniformStageOption,
)

PUBLISHED_S = 174.4
WIDTH, QUERIES, KEYS, HEAD, EXPERTS, TOP_K, INNER, VOCAB = 6144, 48, 12, 128, 384, 8, 3072, 128_256
#: Positions whose logits are in memory together.
_CHUNK = 1024


def _shapes() -> dict[str, tuple[int, ...]]:
    """Of the matrices of a layer."""
    return {
        "query": (WIDTH, QUERIES * HEAD),
        "key": (WIDTH, KEYS * HEAD),
        "value": (WIDTH, KEYS * HEAD),
        "out": (QUERIES * HEAD, WIDTH),
        "router": (WIDTH, EXPERTS),
        "enter": (WIDTH, INNER),
        "leave": (INNER, WIDTH),
        "gate": (EXPERTS, INNER, INNER),
        "up": (EXPERTS, INNER, INNER),
        "down": (EXPERTS, INNER, INNER),
        "shared_gate": (WIDTH, 2 * INNER),
        "shared_up": (WIDTH, 2 * INNER),
        "shared_down": (2 * INNER, WIDTH),
    }


def _norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)).astype(x.dtype)


def _attention(p: Any, x: Any) -> Any:
    b, s, _ = x.shape
    query, key, value = (
        (x @ p[name]).reshape(b, s, heads, HEAD) for name, heads in (("query", QUERIES), ("key", KEYS), ("value", KEYS))
    )
    return jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(b, s, -1) @ p["out"]


def _experts(p: Any, x: Any) -> Any:
    tokens = x.reshape(-1, WIDTH)
    weights, chosen = jax.lax.top_k(jax.nn.sigmoid((tokens @ p["router"]).astype(jnp.float32)), TOP_K)
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    rows = (tokens @ p["enter"])[order // TOP_K]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, p["gate"], sizes)) * jax.lax.ragged_dot(rows, p["up"], sizes)
    out = jax.lax.ragged_dot(hidden, p["down"], sizes)[jnp.argsort(order)].reshape(-1, TOP_K, INNER)
    return (jnp.sum(out * weights[..., None].astype(out.dtype), axis=1) @ p["leave"]).reshape(x.shape)


def _loss(params: Any, tokens: Any) -> Any:
    x = params["embed"][tokens]
    for p in params["layers"]:
        x = x + _attention(p, _norm(x))
        y = _norm(x)
        shared = (jax.nn.silu(y @ p["shared_gate"]) * (y @ p["shared_up"])) @ p["shared_down"]
        x = x + _experts(p, y) + shared
    x = _norm(x)

    def of_chunk(chunk: Any) -> Any:
        x, targets = chunk
        logits = (x @ params["head"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen, axis=-1)

    b, s = tokens.shape
    chunks = [array.reshape(b, s // _CHUNK, _CHUNK, *array.shape[2:]).swapaxes(0, 1) for array in (x, tokens)]
    return jnp.mean(jax.lax.map(jax.checkpoint(of_chunk), tuple(chunks)))


def _muon(w: Any, gradient: Any, memory: Any) -> Any:
    """Of a matrix, or a stack of matrices: (new weights, new memory)."""
    memory = (0.95 * memory + gradient.astype(memory.dtype)).astype(memory.dtype)
    size = jnp.sqrt(jnp.sum(jnp.square(memory.astype(jnp.float32)), (-2, -1), keepdims=True)) + 1e-7
    x = memory / size.astype(memory.dtype)
    for _ in range(5):
        a = x @ jnp.swapaxes(x, -1, -2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (w - 1e-3 * x.astype(w.dtype)).astype(w.dtype), memory


def train_step(state: Any, tokens: Any) -> Any:
    params, memory = state
    value, gradients = minialpa.value_and_grad(_loss)(params, tokens)
    new = jax.tree.map(_muon, params, gradients, memory)
    params, memory = (jax.tree.map(lambda _, pair, k=k: pair[k], params, new) for k in (0, 1))
    return (params, memory), value


def arguments(n_layers: int, batch: int, positions: int) -> Any:
    def array(shape: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    layers = [{name: array(shape) for name, shape in _shapes().items()} for _ in range(n_layers)]
    params = {"embed": array((VOCAB, WIDTH)), "head": array((WIDTH, VOCAB)), "layers": layers}
    return (params, params), jax.ShapeDtypeStruct((batch, positions), jnp.int32)


@benchmark("large_experts")
def large_experts(size: Size) -> Rows:
    """Predicted seconds of a step, with the planner's choices and with the choices of the published run."""
    n_layers, n_hosts, batch, positions = (48, 24, 384, 65_536) if size == "full" else (2, 2, 16, 1024)
    given = arguments(n_layers, batch, positions)
    cluster = ClusterSpec.preset("h100", num_hosts=n_hosts, devices_per_host=8)
    published = PipeshardParallel(
        num_micro_batches=2 * n_hosts,
        layer_option=AutoLayerOption(n_hosts, remat="offload"),
        stage_option=UniformStageOption(n_hosts, (1, 8)),
    )
    rows: Rows = []
    for name, method in (("published", published), ("planner", AutoParallel())):
        start = time.perf_counter()
        try:
            plan = minialpa.plan(train_step, given, cluster=cluster, method=method, batch_argnums=1)
        except InfeasibleError as error:
            rows.append(
                {"choices": name, "planning_s": time.perf_counter() - start, "error": str(error).partition("\n")[0]}
            )
            continue
        rows.append(
            {
                "choices": name,
                "step_s": plan.cost.total_s,
                "published_s": PUBLISHED_S,
                "stages": len(plan.stages),
                "meshes": " ".join(sorted({"x".join(map(str, stage.logical_shape)) for stage in plan.stages})),
                "micro_batches": plan.n_micro_batches,
                "schedule": plan.schedule,
                "remat": " ".join(sorted(set(plan.remat))),
                "device_gb": max(plan.cost.peak_bytes) / 1e9,
                "host_gb": max(stage.host_bytes for stage in plan.stages) / 1e9,
                "planning_s": time.perf_counter() - start,
            }
        )
    return rows
