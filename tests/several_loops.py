"""Steps of several loops over their micro-batches: sharpness-aware, adversarial, contrastive, balanced routing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
from benchmarks.several_loops import descent, sharpness_aware
from minialpa import PipeshardParallel, ShardParallel
from minialpa.methods import Method
from tests.equivalence.known_steps import STEPS
from tests.equivalence.steps import batch_argnums, make_args, make_step

NAMES = ("sharpness aware", "alternating", "contrastive", "balance")


def run(name: str, method: Method, n_steps: int = 2) -> tuple[Any, Any]:
    """State and results after some steps under `method`."""
    training = STEPS[name]
    step = minialpa.parallelize(make_step(training), method=method, batch_argnums=batch_argnums(training))
    return _after(step, name, n_steps)


def serial(name: str, n_steps: int = 2) -> tuple[Any, Any]:
    return _after(jax.jit(make_step(STEPS[name])), name, n_steps)


def _after(step: Any, name: str, n_steps: int) -> tuple[Any, Any]:
    state, *others = make_args(STEPS[name])
    for _ in range(n_steps):
        state, results = step(state, *others)
    return state, results


def methods(n: int) -> dict[str, Method]:
    """Ways to run a step with one boundary over `n` micro-batches."""
    return {
        "shard": ShardParallel(num_micro_batches=n),
        "pipeline": PipeshardParallel(num_micro_batches=n, layer_option="manual"),
        "gpipe": PipeshardParallel(num_micro_batches=n, layer_option="manual", pipeline_schedule="gpipe"),
    }


def _deep(params: Any, x: Any) -> Any:
    for k, w in enumerate(params):
        if k == len(params) // 2:
            minialpa.mark_pipeline_boundary()
        x = jnp.tanh(x @ w)
    return x


def _deep_arguments(n_examples: int) -> tuple[Any, Any]:
    """Parameters and a batch of a model of whose memory activations are most."""
    rng = np.random.default_rng(0)
    params = [0.2 * rng.standard_normal((32, 32)).astype(np.float32) for _ in range(32)]
    return params, rng.standard_normal((n_examples, 32)).astype(np.float32)


def wide_contrastive() -> tuple[Any, Any]:
    """A contrastive step and its arguments."""

    def loss(params: Any, x: Any) -> Any:
        z = _deep(params, x)
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T)))

    return descent(loss), _deep_arguments(256)


def wide_sharpness_aware() -> tuple[Any, Any]:
    """A sharpness-aware step and its arguments."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(_deep(params, x) ** 2)

    return sharpness_aware(loss), _deep_arguments(4096)
