"""Shardings affect only speed: any choice of strategies gives the numbers of the serial run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import LogicalMesh, ShardParallel
from minialpa.intra import shard_arrays
from minialpa.intra.graph import solve
from minialpa.intra.solver.cost_graph import CostGraph, GraphSolution
from minialpa.rules.shards import run_shard
from minialpa.testing import assert_allclose


def scanned(params: Any, batch: Any) -> jax.Array:
    """Layers in a scan, with constants, a sum that is carried along, stacked results, and a loop inside."""

    def layer(carry: Any, weights: Any) -> Any:
        x, total = carry
        hidden = jnp.tanh(x @ weights["in"] + params["shift"][None, None])
        for_each = jax.lax.scan(lambda h, w: (h + jnp.sin(h @ w), h.mean()), hidden, params["square"])
        x = x + for_each[0] @ weights["out"]
        return (x, total + jnp.sum(hidden**2)), (x[:, 0], for_each[1])

    (x, total), (first, means) = jax.lax.scan(layer, (batch["x"], jnp.float32(0)), params["layers"])
    return jnp.mean((x - batch["x"]) ** 2) + 1e-3 * total + jnp.mean(first**2) + jnp.sum(means)


def language(params: Any, batch: Any) -> jax.Array:
    """Embedding, dropout, head with the same table, cross entropy: tables, counts and bits are split by position."""
    x = jnp.take(params["table"], batch["tokens"], axis=0) + params["table"][jnp.arange(8)][None]
    keep = jax.random.bernoulli(jax.random.key(1), 0.7, x.shape)
    x = jnp.where(keep, jax.nn.gelu(x) / 0.7, 0.0)
    logits = jnp.einsum("bsh,vh->bsv", x, params["table"])
    own = jnp.take_along_axis(logits, batch["labels"][..., None], axis=-1)[..., 0]
    smooth = (jax.nn.one_hot(batch["tokens"], 32) * jax.nn.log_softmax(logits)).sum(-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - own - 0.1 * smooth)


def draw(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32) * 0.3


LOSSES: dict[str, tuple[Any, Any, Any]] = {
    "scan": (
        scanned,
        {"layers": {"in": draw(3, 16, 32), "out": draw(3, 32, 16)}, "shift": draw(32), "square": draw(2, 32, 32)},
        {"x": draw(16, 8, 16)},
    ),
    "language": (
        language,
        {"table": draw(32, 16) * 5},
        {
            name: np.random.default_rng(i).integers(0, 32, (16, 8), np.int32)
            for i, name in enumerate(("tokens", "labels"))
        },
    ),
}


@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2)])
@pytest.mark.parametrize("name", LOSSES)
def test_any_sharding_gives_the_same_numbers(
    name: str, shape: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_fn, params, batch = LOSSES[name]
    rng = np.random.default_rng(seed)
    by_position: set[str] = set()

    def spied(eqn: Any, factors: Any, operands: Any, n_splits: Any, parts: Any) -> Any:
        by_position.update([eqn.primitive.name] if parts else [])
        return run_shard(eqn, factors, operands, n_splits, parts)

    def random_choices(graph: CostGraph, *_: Any, **__: Any) -> GraphSolution:
        choices = tuple(int(rng.choice(np.flatnonzero(np.isfinite(cost)))) for cost in graph.node_costs)
        return GraphSolution(choices, 0.0, 0.0, optimal=False)

    def step(params: Any, batch: Any) -> Any:
        loss, grads = minialpa.value_and_grad(loss_fn)(params, batch)
        return loss, grads

    monkeypatch.setattr(solve, "solve_graph", random_choices)
    monkeypatch.setattr(shard_arrays, "run_shard", spied)
    parallel = minialpa.parallelize(step, method=ShardParallel(devices=LogicalMesh(shape)))
    expected = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    assert_allclose(parallel(params, batch), expected, rtol=2e-4, atol=1e-5)
    if name == "language":
        assert len(by_position & {"gather", "iota", "random_bits", "scatter-add"}) >= 2, by_position
