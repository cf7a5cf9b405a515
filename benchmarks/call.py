"""Microseconds of a call beyond the same call of `jax.jit`: tiny steps, on states of many kinds.

The reference is `jax.jit` of the function that the plan makes of the step, with the same pytrees, shardings and
donation, so that devices do the same work. Its pytrees have only arrays; a module of flax.nnx becomes the state that
`nnx.split` returns. A step in micro-batches is several functions, and its reference is `jax.jit` of the whole step.
Both run in turns, in several rounds, and a round has a median of each. The smallest median counts, because other work
on the machine only adds time.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

import minialpa
from benchmarks.call_kinds import KINDS, Kind, make_batch
from benchmarks.registry import Rows, Size, benchmark
from benchmarks.timing import interleaved
from minialpa.programs.program import Run
from minialpa.runtime.executable import Executable


@benchmark("call")
def call(size: Size) -> Rows:
    """A call of a tiny step on one device and on eight, next to `jax.jit`: microseconds, with 25 and 500 leaves."""
    rows = []
    for n_leaves in (25, 500) if size == "full" else (25,):
        for n_devices in (1, 8):
            for batch in ("on devices", "NumPy"):
                rows.append(_row("a dataclass", n_leaves, n_devices, batch, size))
        for kind in KINDS:
            if kind != "a dataclass":
                rows.append(_row(kind, n_leaves, 1, "on devices", size))
        for batch in ("on devices", "NumPy"):
            rows.append(_row("a dataclass", n_leaves, 1, batch, size, num_micro_batches=4))
    return rows


def _row(
    name: str, n_leaves: int, n_devices: int, batch_kind: str, size: Size, num_micro_batches: int = 1
) -> dict[str, Any]:
    devices = jax.devices()[:n_devices]
    # One for each loop: steps change modules in place, and take over states.
    kind, own, batch = KINDS[name]((n_leaves - 3) // 4), KINDS[name]((n_leaves - 3) // 4), make_batch()
    method = minialpa.ShardParallel(devices=devices, num_micro_batches=num_micro_batches)
    parallel = minialpa.parallelize(kind.step, method=method)
    executable = parallel.get_executable(*kind.state, batch, *kind.others)
    shardings = jax.tree.map(lambda x: x.sharding, executable.get_input_targets())
    if batch_kind == "on devices":
        batch = jax.device_put(batch, shardings[len(kind.state)])

    calls = {"jit": _jit_loop(executable, shardings, own, batch), "minialpa": _loop(parallel, kind, batch)}
    if kind.own_jit is not None:
        library = KINDS[name]((n_leaves - 3) // 4)
        calls["library"] = _loop(kind.own_jit(library.step), library, batch)
    medians = _medians(calls, size)
    differences = [b - a for a, b in zip(medians["jit"], medians["minialpa"], strict=True)]
    row = {
        "state": name,
        "micro_batches": num_micro_batches,
        "leaves": len(jax.tree.leaves(shardings)),
        "devices": n_devices,
        "batch": batch_kind,
        **{f"{loop}_us": min(of_rounds) for loop, of_rounds in medians.items()},
        "more_us": min(medians["minialpa"]) - min(medians["jit"]),
        "median_of_rounds_us": statistics.median(differences),
    }
    return row


def _medians(calls: dict[str, Callable[[], Any]], size: Size) -> dict[str, list[float]]:
    """Microseconds of a call of each loop: the median of every round."""
    rounds, repeats = (16, 30) if size == "full" else (1, 2)
    medians: dict[str, list[float]] = {name: [] for name in calls}
    with warnings.catch_warnings():
        # Libraries donate arrays whose memory no result can reuse, and jax warns.
        warnings.simplefilter("ignore")
        for _ in range(rounds):
            for name, seconds in interleaved(calls, repeats=repeats).items():
                medians[name].append(statistics.median(seconds) * 1e6)
    return medians


def _loop(step: Callable[..., Any], kind: Kind, batch: Any) -> Callable[[], Any]:
    """A call that runs one training step and keeps the new state."""
    state = kind.state

    def train() -> Any:
        nonlocal state
        result = step(*state, batch, *kind.others)
        state = kind.next_state(state, result)
        return result

    return train


def _jit_loop(executable: Executable, shardings: Any, kind: Kind, batch: Any) -> Callable[[], Any]:
    """The same loop under `jax.jit`, with only the arrays of the arguments."""
    call = minialpa.parallelize(kind.step)._parameters.bind((*kind.state, batch, *kind.others), {})
    arrays = jax.tree.unflatten(call.tree[0], call.leaves)
    n_state = len(kind.state)
    state = jax.device_put(arrays[:n_state], shardings[:n_state])
    (mesh,) = executable.runner.meshes
    runs = [i for i in executable.program.instructions if isinstance(i, Run)]
    if len(runs) == 1:
        specs = executable.program.functions[runs[0].function].out_specs
        out_shardings = [NamedSharding(mesh, specs[i]) for i in _places(executable, runs[0])]
        jitted = jax.jit(
            _whole_function(executable, runs[0]),
            donate_argnums=range(n_state),
            in_shardings=shardings,
            out_shardings=jax.tree.unflatten(executable.out_tree, out_shardings),
        )
    else:
        jitted = jax.jit(kind.step, donate_argnums=range(n_state))
    # A step of nnx modules returns (new values of the modules, result).
    next_state = (lambda _, result: result[0]) if call.graph is not None else kind.next_state

    def train() -> Any:
        nonlocal state
        result = jitted(*state, batch)
        state = next_state(state, result)
        return result

    return train


def _whole_function(executable: Executable, run: Run) -> Callable[..., Any]:
    """The only function of a program, as a function of the step's arguments."""
    leaf_of = {slot.buffer: slot.leaf for slot in executable.program.inputs}
    places = _places(executable, run)

    def step(*args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        made = executable.program.functions[run.function].fun(*[leaves[leaf_of[b]] for b in run.inputs])
        return jax.tree.unflatten(executable.out_tree, [made[i] for i in places])

    return step


def _places(executable: Executable, run: Run) -> list[int]:
    """For each result of the step, its position among the results of the program's only function."""
    return [run.outputs.index(slot.buffers[0]) for slot in executable.program.outputs]
