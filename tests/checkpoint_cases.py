"""Models, plans and helpers of the tests of checkpoints, and the program that one of them kills."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import minialpa
from minialpa import (
    AutoLayerOption,
    CheckpointManager,
    ManualStageOption,
    PipeshardParallel,
    ShardParallel,
    Zero3Parallel,
    models,
)
from minialpa.arrays import RemoteArray
from minialpa.methods import Method
from tests.scanned_training import perceptron

N_LAYERS = 5


def methods() -> dict[str, Method]:
    """The plans under which a state is saved and restored."""
    devices = jax.devices()
    # Stages of 1 and of 4 layers: blocks of several lengths, two stages with other numbers of devices.
    uneven = ManualStageOption([[0], [1, 2, 3, 4]], [(1, 1), (1, 2)], [(1,), (2,)])
    layers = AutoLayerOption(layer_num=N_LAYERS)
    return {
        "one device": ShardParallel(devices=devices[:1]),
        "ZeRO-3 on 8": Zero3Parallel(),
        "ZeRO-3 on 4": Zero3Parallel(devices=devices[4:]),
        "blocks on 2 stages": PipeshardParallel(num_micro_batches=4, layer_option=layers, stage_option=uneven),
    }


def case(name: str) -> models.ModelCase:
    if name == "mlp":
        return models.build("mlp", hidden=16, batch_size=16, n_layers=2)
    return perceptron(N_LAYERS, again=False)


def step_of(model: models.ModelCase, method: Any) -> Any:
    return minialpa.parallelize(model.train_step(minialpa.value_and_grad), method=method)


def bits(tree: Any) -> dict[tuple[str, ...], tuple[str, tuple[int, ...], bytes]]:
    """The dtype, shape and bytes of every leaf, by its path. Keys are shown as their integers."""

    def of_leaf(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
        value = leaf.fetch_once() if isinstance(leaf, RemoteArray) else leaf
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        return str(leaf.dtype if hasattr(leaf, "dtype") else type(leaf)), array.shape, array.tobytes()

    def name(path: Any) -> tuple[str, ...]:
        return tuple(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))) for key in path)

    return {name(path): of_leaf(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def by_orbax_alone(folder: Path, step: int) -> Any:
    """The state of a checkpoint as nested dicts and lists, read by orbax's own reader of pytrees."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        args = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
            reader.metadata(folder / str(step) / "state").item_metadata.tree,
        )
        tree = reader.restore(folder / str(step) / "state", ocp.args.PyTreeRestore(restore_args=args))
    return tree


def state_of_step(step: int) -> dict[str, Any]:
    """The state that `save_in_a_loop` saves at a step: 2 MB that differ from step to step."""
    return {"step": step, **{f"w{i}": np.full((256, 256), step, np.float32) for i in range(8)}}


def save_in_a_loop(folder: str) -> None:
    """Save one checkpoint after the other, without waiting, until the process is ended."""
    manager = CheckpointManager(folder, max_to_keep=3)
    for step in range(1_000_000):
        state = jax.tree.map(jnp.asarray, state_of_step(step))
        manager.save(step, state, data={"at": step})
        if step == 1:
            manager.wait_until_finished()
            print("saving", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    save_in_a_loop(sys.argv[1])
