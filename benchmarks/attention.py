"""Attention in plain jax, block by block and with all scores at once: seconds, and memory of temporaries."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.registry import Rows, Size, benchmark
from benchmarks.timing import interleaved
from minialpa.attention.operation import AttentionKind, attention_gradient_p, attention_p

D = 64
KINDS = {"full": AttentionKind(scale=D**-0.5), "causal": AttentionKind(scale=D**-0.5, right=0, masked_score=-1e9)}


@benchmark("attention")
def attention(size: Size) -> Rows:
    """Attention and its gradients of 4 heads of 64 in float32, block by block and with all scores at once."""
    lengths = (1024, 2048, 4096) if size == "full" else (16,)
    return [_row(t, name, repeats=5 if size == "full" else 1) for t in lengths for name in KINDS]


def _row(t: int, name: str, repeats: int) -> dict[str, Any]:
    kind = KINDS[name]
    rng = np.random.default_rng(0)
    shapes = (1, t, 4, 1, D), (1, t, 4, D), (1, t, 4, D), (1, t, 4, 1, D)
    *arrays, out_bar = (jnp.asarray(rng.standard_normal(shape), np.float32) for shape in shapes)
    operands = [*arrays, *[jnp.arange(t, dtype=np.int32)] * kind.n_positions]

    def blocks(operands: Sequence[Any], out_bar: Any) -> Any:
        out, logsumexp = attention_p.bind(*operands, kind=kind)
        params: Any = {"kind": kind, "dtypes": ("float32",) * 3, "with_bias_gradient": ()}
        return attention_gradient_p.bind(*operands[:3], out, logsumexp, out_bar, *operands[3:], **params)

    def at_once(operands: Sequence[Any], out_bar: Any) -> Any:
        return jax.vjp(lambda *arrays: _written(*arrays, kind=kind), *operands[:3])[1](out_bar)

    compiled = {f.__name__: jax.jit(f).lower(operands, out_bar).compile() for f in (blocks, at_once)}
    calls: dict[str, Callable[[], object]] = {
        way: lambda run=run: run(operands, out_bar)  # type: ignore[misc]
        for way, run in compiled.items()
    }
    seconds = interleaved(calls, repeats, warm_up=1)
    row: dict[str, Any] = {"n_positions": t, "kind": name}
    for way, run in compiled.items():
        row[f"{way}_ms"] = 1e3 * statistics.median(seconds[way])
        memory: Any = run.memory_analysis()
        row[f"{way}_mib"] = memory.temp_size_in_bytes / 2**20
    return row


def _written(query: Any, key: Any, value: Any, *, kind: AttentionKind) -> Any:
    score = jnp.einsum("btgrd,bsgd->bgrts", query, key) * kind.scale
    if kind.right == 0:
        t = query.shape[1]
        score = jnp.where(jnp.tri(t, dtype=bool)[None, None, None], score, kind.masked_score)
    return jnp.einsum("bgrts,bsge->btgre", jax.nn.softmax(score), value)
