"""Checkpoints of sessions on Ray: processes of workers write and read their shards, and some are killed meanwhile."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import jax
import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa import (
    AutoLayerOption,
    CheckpointError,
    CheckpointManager,
    PipeshardParallel,
    UniformStageOption,
    WorkerError,
    Zero3Parallel,
    models,
    restore_checkpoint,
)
from tests.checkpoint_cases import bits, by_orbax_alone, step_of
from tests.runtime.ray.faults import worker_pid
from tests.runtime.ray.ray_cluster import resize, start_session

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

MODEL = models.build("mlp", hidden=64, n_layers=2, batch_size=16)
TWO_STAGES = PipeshardParallel(
    num_micro_batches=2, layer_option=AutoLayerOption(layer_num=2), stage_option=UniformStageOption(2)
)


@pytest.mark.slow  # tests/test_checkpoint_workers.py has its short relative, in one process
def test_workers_write_their_shards_until_one_is_killed(cluster: Cluster, seed: int, tmp_path: Path) -> None:
    moments = random.Random(seed)
    init, batch = MODEL.init(jax.random.key(0)), MODEL.make_batch(0, 16)
    for k in range(3):
        folder = tmp_path / str(k)
        minialpa.shutdown()
        start_session(cluster.address, 2, 1)
        step = step_of(MODEL, TWO_STAGES)
        state = step.preshard_dynamic_args(init, batch)[0]
        manager = CheckpointManager(folder)
        manager.save(0, state)
        manager.wait_until_finished()
        assert len(list((folder / "0" / "state").glob("ocdbt.process_worker*"))) == 2
        assert bits(by_orbax_alone(folder, 0)) == bits(init)

        state, _ = step(state, batch)
        expected = {0: bits(init), 1: bits(state)}
        pid = worker_pid(moments.randrange(2))
        manager.save(1, state)
        time.sleep(moments.uniform(0.0, 0.05))
        os.kill(pid, signal.SIGKILL)
        try:
            manager.close()
        except (CheckpointError, WorkerError):
            assert not (folder / "1").exists()

        with CheckpointManager(folder, read_only=True) as manager:
            for i in manager.all_steps():
                assert bits(by_orbax_alone(folder, i)) == expected[i]
            found = manager.restore(like=init)
        assert bits(found.state) == expected[found.step]


@pytest.mark.slow
def test_the_hosts_of_a_mesh_share_what_they_write_and_read(cluster: Cluster, tmp_path: Path) -> None:
    """One mesh of two hosts; saved by two processes, restored by four, and the other way round."""
    init, batch = MODEL.init(jax.random.key(0)), MODEL.make_batch(0, 16)
    states = {}
    resize(cluster, 4)
    for k, hosts in enumerate(((2, 2), (4, 1), (2, 2))):
        minialpa.shutdown()
        start_session(cluster.address, *hosts)
        step = step_of(MODEL, Zero3Parallel())
        executable = step.get_executable(init, batch)
        state = restore_checkpoint(tmp_path, executable) if k else step.preshard_dynamic_args(init, batch)[0]
        assert bits(state) == states.get(k - 1, bits(init))
        state, _ = step(state, batch)
        states[k] = bits(state)
        with CheckpointManager(tmp_path) as manager:
            manager.save(k, state)
        assert bits(by_orbax_alone(tmp_path, k)) == states[k]
        assert len(list((tmp_path / str(k) / "state").glob("ocdbt.process_worker*"))) == hosts[0]
