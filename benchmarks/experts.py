"""Mixtures of experts without a token limit: plans beside programs that XLA compiles for H100s."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from minialpa import ClusterSpec, ShardParallel

#: (experts, experts of a token, width, width inside an expert, tokens, devices)
CASES = [
    (8, 2, 1024, 4096, 65536, 1),
    (8, 2, 1024, 4096, 65536, 8),
    (8, 2, 4096, 14336, 16384, 8),
    (8, 1, 2048, 8192, 32768, 4),
    (16, 4, 2048, 4096, 32768, 8),
    (32, 4, 2048, 1024, 65536, 8),
    (64, 8, 2048, 1024, 32768, 1),
    (64, 8, 2048, 1024, 32768, 8),
    (64, 6, 2048, 1408, 65536, 8),
    (128, 8, 2048, 768, 65536, 8),
    (128, 8, 4096, 1536, 32768, 8),
    (256, 8, 1024, 512, 65536, 8),
]


def experts_step(n_experts: int, top_k: int) -> Any:
    """A layer of experts with a gate, and its update."""

    def layer(p: Any, tokens: Any) -> Any:
        weights, chosen = jax.lax.top_k(jax.nn.softmax((tokens @ p["router"]).astype(jnp.float32)), top_k)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=n_experts)
        rows = tokens[order // top_k]
        hidden = jax.nn.silu(jax.lax.ragged_dot(rows, p["gate"], sizes)) * jax.lax.ragged_dot(rows, p["up"], sizes)
        out = jax.lax.ragged_dot(hidden, p["down"], sizes)[jnp.argsort(order)].reshape(-1, top_k, tokens.shape[-1])
        return jnp.sum(out * weights[..., None].astype(out.dtype), axis=1)

    def loss(p: Any, tokens: Any) -> Any:
        return jnp.mean(jnp.square((tokens + layer(p, tokens)).astype(jnp.float32)))

    def step(p: Any, tokens: Any) -> Any:
        value, gradients = minialpa.value_and_grad(loss)(p, tokens)
        return jax.tree.map(lambda w, g: (w - 1e-3 * g).astype(w.dtype), p, gradients), value

    return step


def arguments(n_experts: int, width: int, inner: int, tokens: int) -> Any:
    shapes = {
        "router": (width, n_experts),
        "gate": (n_experts, width, inner),
        "up": (n_experts, width, inner),
        "down": (n_experts, inner, width),
    }
    return (
        {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()},
        jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16),
    )


@benchmark("experts")
def experts(size: Size) -> Rows:
    """Layers of experts: planned seconds and bytes over those of compiled programs, arithmetic over routed rows."""
    rows: Rows = []
    for n_experts, top_k, width, inner, tokens, devices in CASES if size == "full" else [(4, 2, 64, 128, 1024, 2)]:
        step, given = experts_step(n_experts, top_k), arguments(n_experts, width, inner, tokens)
        cluster = ClusterSpec.preset("h100", devices_per_host=devices)
        plan = minialpa.plan(step, given, cluster=cluster, method=ShardParallel(), batch_argnums=1)
        (stage,) = plan.check(step, given).stages
        # Three products forward, and four in the derivative: the tokens need no gradient.
        routed = 7 * 2.0 * tokens * top_k * width * inner
        rows.append(
            {
                "experts": n_experts,
                "top_k": top_k,
                "width": width,
                "inner": inner,
                "tokens": tokens,
                "devices": devices,
                "planned_ms": 1e3 * stage.planned_s,
                "compiled_ms": 1e3 * stage.compiled_s,
                "seconds_ratio": stage.planned_s / stage.compiled_s,
                "bytes_ratio": stage.planned_bytes / stage.compiled_bytes,
                "flops_over_routed": plan.model_flops / routed,
            }
        )
    return rows
