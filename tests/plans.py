"""Small plans for the tests of what plans can do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
from minialpa import ClusterSpec, PipeshardParallel, Plan, ShardParallel
from minialpa.methods import Method

WIDTH, N_EXAMPLES = 8, 16


def loss_of(params: Any, batch: Any) -> jax.Array:
    x = jnp.tanh(batch["x"] @ params["w"])
    minialpa.mark_pipeline_boundary()
    return jnp.mean((x @ params["v"] - batch["y"]) ** 2)


def train_step(params: Any, batch: Any) -> Any:
    value, grads = minialpa.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def make_args(n: int = N_EXAMPLES, width: int = WIDTH) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((width, width), np.float32) for name in ("w", "v")}
    return params, {name: rng.standard_normal((n, width), np.float32) for name in ("x", "y")}


def make_params() -> Any:
    """Small parameters, as arrays of jax."""
    return jax.tree.map(lambda w: 0.3 * jnp.asarray(w), make_args()[0])


def make_batch(n: int = N_EXAMPLES) -> Any:
    return make_args(n)[1]


def pipeline_plan(**cluster: int) -> Plan:
    """Two stages of four devices on two hosts, or the cluster of the given sizes."""
    spec = ClusterSpec.preset("a100-40gb", **cluster or {"num_hosts": 2, "devices_per_host": 4})
    method = PipeshardParallel(num_micro_batches=4, layer_option="manual", stage_option="uniform")
    return minialpa.plan(train_step, make_args(), cluster=spec, method=method)


def shard_plan(method: Method | None = None, n: int = N_EXAMPLES) -> Plan:
    """No pipeline, on eight devices of one host."""
    spec = ClusterSpec.preset("a100-40gb", num_hosts=1, devices_per_host=8)
    return minialpa.plan(train_step, make_args(n), cluster=spec, method=method or ShardParallel())
