"""Attention over 8 devices at long sequences: the chosen split, and memory and time beside XLA:GPU's program.

The step is the attention of one example of 128 features per head in bfloat16 with all gradients, under a causal mask.
It reads queries, keys, values and the cotangent of the result, and makes the result and three cotangents. `shards_mb`
is 1/8 of these eight arrays and the logsumexp; `alone_mb` is 1/8 of the memory that XLA:GPU needs on one device.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from minialpa import ClusterSpec, Plan, ShardParallel

D = 128
N = 8


@benchmark("sequence")
def sequence(size: Size) -> Rows:
    """Causal attention and its gradients over 8 H100s, to 1M tokens: the split, and memory and time beside XLA:GPU."""
    cases = [(1 << 14, 4, 4)]
    if size == "full":
        cases = [
            (s, *heads) for s in (1 << 13, 1 << 15, 1 << 18, 1 << 20) for heads in ((8, 8), (4, 4), (8, 2), (32, 8))
        ]
    return [_row(*case) for case in cases]


def _row(n_tokens: int, n_heads: int, n_key_heads: int) -> dict[str, Any]:
    arguments = _arguments(n_tokens, n_heads, n_key_heads)
    plans = [_planned(arguments, n) for n in (1, N)]
    alone, together = (plan.check(_step, arguments, target="h100").stages[0] for plan in plans)
    moved: defaultdict[str, float] = defaultdict(float)
    for one in plans[1].collectives:
        moved[one.kind] += one.n_bytes * one.times_per_step
    arrays = 4 * n_tokens * D * 2 * (n_heads + n_key_heads) + 4 * n_tokens * n_heads
    return {
        "tokens": n_tokens,
        "heads": f"{n_heads}/{n_key_heads}",
        "split": _split(plans[1]),
        "moved_mb": ", ".join(f"{kind} {n / 1e6:.0f}" for kind, n in sorted(moved.items())),
        "shards_mb": arrays / N / 1e6,
        "alone_mb": alone.compiled_bytes / N / 1e6,
        "planned_mb": together.planned_bytes / 1e6,
        "compiled_mb": together.compiled_bytes / 1e6,
        "planned_ms": 1e3 * together.planned_s,
        "compiled_ms": 1e3 * together.compiled_s,
        "of_one_device": together.compiled_s * N / alone.compiled_s,
    }


def _step(state: Any, batch: Any) -> Any:
    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    out, pull_back = jax.vjp(attend, batch["query"], batch["key"], batch["value"])
    return state, (out, *pull_back(batch["out_bar"]))


def _arguments(n_tokens: int, n_heads: int, n_key_heads: int) -> Any:
    def array(n: int) -> Any:
        return jax.ShapeDtypeStruct((1, n_tokens, n, D), jnp.bfloat16)

    heads = {"query": n_heads, "key": n_key_heads, "value": n_key_heads, "out_bar": n_heads}
    return jax.ShapeDtypeStruct((8,), jnp.float32), {name: array(n) for name, n in heads.items()}


def _planned(arguments: Any, n_devices: int) -> Plan:
    cluster = ClusterSpec.preset("h100", devices_per_host=n_devices)
    return minialpa.plan(_step, arguments, cluster=cluster, method=ShardParallel())


def _split(plan: Plan) -> str:
    """By the shards of queries [1 t h d] and keys [1 s h d] in the gradient."""
    specs = next(one for one in reversed(plan.stages[0].equation_specs) if len(one.operands) >= 6)
    query, key = specs.operands[:2]
    names = [name for name, axes in zip(("examples", "positions", "heads", "heads"), query.dims, strict=False) if axes]
    return " and ".join(names) + (", ring" if key.dims[1] else "")
