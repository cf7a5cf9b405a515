"""Makes docs/methods.md from compiled programs: `python -m tests.methods_doc` writes it.

It compiles a small model under every method, optimizer, number of micro-batches and mesh. The page has the bytes that
the collectives of one step move, and the bytes that each device holds between steps.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import minialpa
from minialpa import (
    AutoLayerOption,
    ClusterSpec,
    DataParallel,
    LogicalMesh,
    PipeshardParallel,
    ShardParallel,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
    get_3d_parallel_method,
    hlo,
)
from minialpa.methods import Method
from minialpa.programs.program import Run

PATH = Path(__file__).parents[1] / "docs" / "methods.md"
N_DEVICES, HIDDEN, BATCH = 4, 32, 16
N_MICRO_BATCHES = (1, 2, 4)
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "SGD, momentum": optax.sgd(0.1, momentum=0.9),
    "Adam": optax.adam(1e-3),
    "AdamW": optax.adamw(1e-3),
    "Adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=HIDDEN),
}
_LETTERS = {"all-reduce": "AR", "reduce-scatter": "RS", "all-gather": "AG", "all-to-all": "A2A"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A method in the page. promise: the guarantee of its name. make: from n and a mesh to the method. meshes: rows."""

    name: str
    promise: str
    make: Callable[[int, tuple[int, ...]], Method]
    meshes: tuple[tuple[int, ...], ...]


def _cluster() -> ClusterSpec:
    return ClusterSpec.preset("cpu", devices_per_host=N_DEVICES)


def _three_degrees(n: int, shape: tuple[int, ...]) -> Method:
    return get_3d_parallel_method(n, *shape, devices=_cluster())


def _pipeline(n: int, shape: tuple[int, ...]) -> Method:
    stages = UniformStageOption(2, (1, N_DEVICES // 2), shape)
    return PipeshardParallel(_cluster(), n, layer_option=AutoLayerOption(2), stage_option=stages)


_MESHES = ((4,), (2, 2))
ENTRIES = (
    Entry(
        "DataParallel",
        "All devices split the examples. Parameters and optimizer state are replicated. Gradients are all-reduced once "
        "per step: as many bytes as the parameters have. The only other communication is the loss.",
        lambda n, shape: DataParallel(LogicalMesh(shape), n),
        _MESHES,
    ),
    Entry(
        "Zero2Parallel",
        "All devices split the examples. Parameters are replicated between steps. Each device holds its part of the "
        "optimizer state and updates its part of the parameters. Once per step, gradients are reduce-scattered and "
        "parameters all-gathered: as many bytes as `DataParallel` sends. The state is never gathered. With several "
        "micro-batches, each device first adds up the gradients of its own examples, for all parameters.",
        lambda n, shape: Zero2Parallel(LogicalMesh(shape), n),
        _MESHES,
    ),
    Entry(
        "Zero3Parallel",
        "As `Zero2Parallel`, but parameters are also sharded between steps. Every micro-batch gathers the parameters "
        "that it reads, once for its forward and backward pass together. New parameters are not gathered. Gradients "
        "are reduce-scattered once per step. `AutoShardingOption(force_zero_stage_3=True)` is the same.",
        lambda n, shape: Zero3Parallel(LogicalMesh(shape), n),
        _MESHES,
    ),
    Entry(
        "ShardParallel",
        "The shardings with the shortest predicted step. The planner may split examples, parameters, both or neither; "
        "the sizes determine the communication. Options of `AutoShardingOption` narrow the choice.",
        lambda n, shape: ShardParallel(LogicalMesh(shape), n, logical_shape=shape),
        _MESHES,
    ),
    Entry(
        "get_3d_parallel_method",
        "Data, operator and pipeline parallelism of the degrees in the mesh column. Only the first degree splits the "
        "examples: if it is 1, every device has all examples. The devices of a stage split the optimizer state.",
        _three_degrees,
        ((4, 1, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2)),
    ),
    Entry(
        "PipeshardParallel",
        "Two stages, each on half of the devices (the mesh column) and sharded as by `ShardParallel`. Bytes are for "
        "the stage that communicates most, without transfers between stages.",
        _pipeline,
        ((2,),),
    ),
)

_HEAD = f"""# Methods

The guarantee of each method, and the behaviour of its compiled programs. `tests/methods_doc.py` made this page with jax
{jax.__version__}, and the tests check it.

The model has two dense layers of {HIDDEN} x {HIDDEN} with biases, {{parameters:,}} bytes of parameters in all.
A batch has {BATCH} examples, and there are {N_DEVICES} devices.

The first table of each method has the bytes of the arrays that the collectives of one step work on: an all-reduce (AR)
or reduce-scatter (RS) sums them, an all-gather (AG) gathers them, an all-to-all (A2A) exchanges them. In a ring of k
devices each device sends (k - 1) / k of these bytes, for an all-reduce twice as much. Four bytes are the loss. *n* is
the number of micro-batches. The second table has the bytes of parameters + the bytes of optimizer state that a device
holds between steps, without arrays of one element.

Adafactor keeps sums over rows and columns of squared gradients instead of full arrays. If the optimizer state is
sharded, the update also sums and gathers these vectors, {{factored:,}} bytes each way, and sums a few scalars.

An update inside `lax.cond` (`optax.apply_if_finite`, `optax.MultiSteps`) is one operation, and a mesh axis splits one
dimension of it. The rest of the state is gathered, with a warning that names the operation.

`AutoParallel`, the default of `parallelize`, is not in the tables: it also chooses devices, stages, meshes and n, and
leaves a model as small as this on one device.
"""


# ---- one case -------------------------------------------------------------------------------------------------------


def training(optimizer: optax.GradientTransformation) -> tuple[Callable[..., Any], Any, Any]:
    """A step (state, batch) -> (state, loss) that takes `value_and_grad`, a state and a batch."""

    def step(value_and_grad: Any, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            h = batch["x"]
            for layer in params:
                h = jnp.tanh(h @ layer["kernel"] + layer["bias"][None])
            return jnp.mean((h - batch["y"]) ** 2)

        loss, grads = value_and_grad(loss_fn)(state["params"])
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, opt_state = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt_state}, loss

    rng = np.random.default_rng(0)
    params = [
        {"kernel": jnp.asarray(rng.normal(size=(HIDDEN, HIDDEN)) / 6, jnp.float32), "bias": jnp.zeros(HIDDEN)}
        for _ in range(2)
    ]
    batch = {name: rng.normal(size=(BATCH, HIDDEN)).astype(np.float32) for name in ("x", "y")}
    return step, {"params": params, "opt": optimizer.init(params)}, batch


def executable_of(method: Method, optimizer: optax.GradientTransformation) -> Any:
    step, state, batch = training(optimizer)
    parallel = minialpa.parallelize(functools.partial(step, minialpa.value_and_grad), method=method)
    return parallel.get_executable(state, batch)


def traffic(executable: Any) -> dict[str, int]:
    """Bytes per step and device of the collectives, by kind, on the mesh that has most."""
    program = executable._program
    runs = Counter(i.function for i in program.instructions if isinstance(i, Run))
    by_mesh: dict[int, Counter[str]] = {}
    for number, text in enumerate(executable.get_hlo_text()):
        found = by_mesh.setdefault(program.functions[number].mesh, Counter())
        for one in hlo.collectives(text):
            found[one.kind] += runs[number] * one.times * int(one.n_bytes)
    return dict(max(by_mesh.values(), key=lambda found: sum(found.values()), default=Counter()))


def held(executable: Any) -> tuple[int, int]:
    """Bytes of parameters and of optimizer state that a device holds between steps, on the mesh with most."""
    plan, totals = executable.get_parallel_plan(), {}
    for value in plan.inputs:
        kind = next((k for k, name in enumerate(("params", "opt")) if value.path.startswith(f"state['{name}']")), None)
        for mesh, spec in zip(value.mesh_ids, value.specs, strict=True):
            if kind is not None and np.prod(value.shape) > 1:
                shard = spec.shard_shape(value.shape, plan.stages[mesh].logical_shape)
                pair = totals.setdefault(mesh, [0, 0])
                pair[kind] += int(np.prod(shard)) * np.dtype(value.dtype).itemsize
    parameters, state = max(totals.values(), key=sum)
    return parameters, state


# ---- the page -------------------------------------------------------------------------------------------------------


def measured(entry: Entry, shape: tuple[int, ...], n: int, optimizer: str) -> tuple[str, str]:
    """Two cells: the bytes that one step moves, and the bytes that a device holds between steps."""
    executable = executable_of(entry.make(n, shape), OPTIMIZERS[optimizer])
    found = traffic(executable)
    moved = ", ".join(f"{_LETTERS[kind]} {found[kind]:,}" for kind in _LETTERS if found.get(kind))
    parameters, state = held(executable)
    return moved or "0", f"{parameters:,} + {state:,}"


def promise_of(entry: Entry) -> str:
    """The guarantee as lines of text."""
    return textwrap.fill(entry.promise, 120)


def rows(entry: Entry, shape: tuple[int, ...], n: int) -> tuple[str, str]:
    """A line of the table of collectives, and one of the table of held bytes."""
    moved, kept = zip(*(measured(entry, shape, n, optimizer) for optimizer in OPTIMIZERS), strict=True)
    start = f"| {' x '.join(map(str, shape))} | {n} | "
    return f"{start}{' | '.join(moved)} |", f"{start}{' | '.join(kept)} |"


def page() -> str:
    """The whole document."""
    _, state, _ = training(OPTIMIZERS["Adafactor"])
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(state["params"]))
    lines = [_HEAD.format(parameters=parameters, factored=2 * HIDDEN * 4)]
    for entry in ENTRIES:
        columns = f"| mesh | n | {' | '.join(OPTIMIZERS)} |\n|---|---|{'---|' * len(OPTIMIZERS)}"
        moved, kept = zip(*(rows(entry, shape, n) for shape in entry.meshes for n in N_MICRO_BATCHES), strict=True)
        lines += [f"## `{entry.name}`\n", promise_of(entry) + "\n", "Bytes of collectives per step:\n", columns]
        lines += [*moved, "\nBytes that a device holds between steps:\n", columns, *kept, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    jax.config.update("jax_platforms", "cpu")
    PATH.write_text(page())
