"""What a call costs beyond `jax.jit`'s own: steps that do next to nothing, on a state of few and of many leaves.

Beside each step stands `jax.jit` of the function that the plan has made of it, with the same pytrees, shardings and
donation, so that devices do the same. Both run in turns, in several rounds; a round gives the median of each.
The figures are those of the round with the least of each, since what else runs on the machine only adds to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.timing import interleaved, training
from minialpa.runtime.executable import Executable

WIDTH = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class State:
    """A training state as a pytree of the user's own.

    Attributes:
        step: the number of steps so far.
        params: parameters by layer and name.
        moments: the state of the optimizer.
    """

    step: Any
    params: Any
    moments: Any


@benchmark("call")
def call(size: Size) -> Rows:
    """A call of a tiny step on one device and on eight, next to `jax.jit`: microseconds, with 25 and 500 leaves."""
    leaves = (25, 500) if size == "full" else (25,)
    rows = []
    for n_leaves in leaves:
        for n_devices in (1, 8):
            for kind in ("on devices", "NumPy"):
                rows.append(_row(n_leaves, n_devices, kind, size))
    return rows


def _row(n_leaves: int, n_devices: int, kind: str, size: Size) -> dict[str, Any]:
    devices = jax.devices()[:n_devices]
    step, state, batch = _step(n_leaves)
    parallel = minialpa.parallelize(step, method=minialpa.ShardParallel(devices=devices))
    executable = parallel.get_executable(state, batch)
    shardings = jax.tree.map(lambda x: x.sharding, executable.get_input_targets())
    jitted = _jitted(executable, shardings)
    if kind == "on devices":
        batch = jax.device_put(batch, shardings[1])
    calls = {
        "jit": training(jitted, jax.device_put(state, shardings[0]), batch),
        "minialpa": training(parallel, state, batch),
    }

    # Every round is a measurement of its own, and the machine is quiet in some of them.
    rounds, repeats = (16, 30) if size == "full" else (1, 2)
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, seconds in interleaved(calls, repeats=repeats).items():
            medians[name].append(statistics.median(seconds) * 1e6)
    jit_us, minialpa_us = min(medians["jit"]), min(medians["minialpa"])
    differences = [b - a for a, b in zip(medians["jit"], medians["minialpa"], strict=True)]
    return {
        "leaves": len(jax.tree.leaves((state, batch))),
        "devices": n_devices,
        "batch": kind,
        "jit_us": jit_us,
        "minialpa_us": minialpa_us,
        "more_us": minialpa_us - jit_us,
        "median_of_rounds_us": statistics.median(differences),
    }


def _jitted(executable: Executable, shardings: Any) -> Any:
    """`jax.jit` of the one function of a program, which takes the leaves of state and batch in order."""
    (function,), (mesh,) = executable.program.functions, executable.runner.meshes

    def step(state: Any, batch: Any) -> Any:
        return jax.tree.unflatten(executable.out_tree, list(function.fun(*jax.tree.leaves((state, batch)))))

    out_shardings = jax.tree.unflatten(executable.out_tree, [NamedSharding(mesh, spec) for spec in function.out_specs])
    return jax.jit(step, in_shardings=shardings, out_shardings=out_shardings, donate_argnums=0)


def _step(n_leaves: int) -> tuple[Callable[..., Any], State, Any]:
    """A step, its state and its batch, of about so many leaves together."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    n_layers = (n_leaves - 3) // 4
    params = {f"layer {i}": {"w": jnp.ones((WIDTH, WIDTH)) / WIDTH, "b": jnp.zeros(WIDTH)} for i in range(n_layers)}

    def loss_of(params: Any, batch: Any) -> jax.Array:
        # All parameters at once: the step is short, and every leaf has a gradient.
        w = sum(layer["w"] for layer in params.values())
        b = sum(layer["b"] for layer in params.values())
        return jnp.mean((batch["x"] @ w + b[None] - batch["y"]) ** 2)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        loss, grads = minialpa.value_and_grad(loss_of)(state.params, batch)
        updates, moments = optimizer.update(grads, state.moments)
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, moments), {"loss": loss}

    state = State(jnp.int32(0), params, optimizer.init(params))
    batch = {"x": np.ones((16, WIDTH), np.float32), "y": np.ones((16, WIDTH), np.float32)}
    return step, state, batch
