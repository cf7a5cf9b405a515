"""Checkpoints of a session: each worker writes and reads its own shards, and this process decides and commits."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import (
    AutoLayerOption,
    CheckpointError,
    CheckpointManager,
    ManualStageOption,
    PipeshardParallel,
    ShardParallel,
    UniformStageOption,
    WorkerError,
    restore_checkpoint,
    save_checkpoint,
)
from minialpa.methods import Method
from minialpa.runtime.arrays import BlockedArray
from minialpa.runtime.cluster import array_files, in_process
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.distributed_array import DistributedArray
from minialpa.runtime.workers import array_files as worker_files
from tests.checkpoint_cases import bits, by_orbax_alone, case, methods, step_of
from tests.runtime.cluster.in_process_session import in_process_session


def sessions() -> dict[str, tuple[tuple[int, int], Method]]:
    """Hosts and devices per host of a session, and the plan on them."""
    own = ManualStageOption([[0], [1]], [(1, 2)] * 2, [(2, 1), (1, 2)])
    return {
        "2 stages": ((2, 1), pipeline(2, UniformStageOption(2))),
        "2 stages of 2 devices": ((2, 2), pipeline(2, own)),
        "blocks on 2 workers": ((2, 1), pipeline(5, ManualStageOption([[0], [1, 2, 3, 4]], [(1, 1)] * 2, [(1,)] * 2))),
    }


def pipeline(n_layers: int, stages: Any) -> PipeshardParallel:
    return PipeshardParallel(num_micro_batches=2, layer_option=AutoLayerOption(layer_num=n_layers), stage_option=stages)


def on_two_stages() -> tuple[Any, Any, Any]:
    """A step on two stages, its initial state in plain jax, and a batch."""
    model = case("mlp")
    step = step_of(model, pipeline(2, UniformStageOption(2)))
    return step, model.init(jax.random.key(0)), model.make_batch(0, model.batch_size)


@functools.cache
def serial_bits(model: str) -> Any:
    return bits(case(model).init(jax.random.key(0)))


@contextmanager
def placed_state(model: str, name: str) -> Iterator[tuple[Any, Any, Any]]:
    """The executable of a step under a plan; the serial initial state and a batch, placed by the plan."""
    built = case(model)
    state, batch = built.init(jax.random.key(0)), built.make_batch(0, built.batch_size)
    hosts, method = sessions()[name] if name in sessions() else (None, methods()[name])
    with in_process_session(*hosts) if hosts else nullcontext():
        step = step_of(built, method)
        executable = step.get_executable(state, batch)
        yield executable, step.preshard_dynamic_args(state, batch)[0], batch


@functools.cache
def saved(model: str, name: str, root: Path) -> Path:
    """The folder with a checkpoint of the serial initial state, saved under a plan."""
    folder = root / f"{model}, {name}"
    if name == "one device":
        save_checkpoint(folder, case(model).init(jax.random.key(0)), step=3)
        return folder
    with placed_state(model, name) as (executable, state, _):
        save_checkpoint(folder, state, step=3, plan=executable.get_parallel_plan())
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("2 stages of 2 devices", "2 stages"),
        ("2 stages of 2 devices", "ZeRO-3 on 8"),
        pytest.param("one device", "2 stages of 2 devices", marks=pytest.mark.slow),
        pytest.param("blocks on 2 workers", "ZeRO-3 on 8", marks=pytest.mark.slow),
        pytest.param("one device", "blocks on 2 workers", marks=pytest.mark.slow),
    ],
)
def test_a_state_comes_back_on_other_workers(before: str, after: str, root: Path, tmp_path: Path) -> None:
    model = "scanned" if "blocks" in before + after else "mlp"
    folder = saved(model, before, root)
    assert bits(by_orbax_alone(folder, 3)) == serial_bits(model)
    with placed_state(model, after) as (executable, _, batch):
        found = restore_checkpoint(folder, executable)
        assert bits(found) == serial_bits(model)
        if after in sessions():
            leaves = jax.tree.leaves(found)
            assert all(isinstance(x, DistributedArray | BlockedArray) for x in leaves)
            # The step reads every leaf in place.
            placed = executable.place([*leaves, *jax.tree.leaves(batch)])
            assert all(a is b for a, b in zip(leaves, placed, strict=False))

            # A second time, with the arrays as targets, and from the workers to files.
            again = restore_checkpoint(folder, found)
            save_checkpoint(tmp_path, again, step=0)
            assert bits(by_orbax_alone(tmp_path, 0)) == serial_bits(model)


@dataclass
class Traffic:
    """Bytes that cross between this process and its workers."""

    n_bytes: int = 0
    values: list[Any] = field(default_factory=list)

    def dumps(self, value: Any) -> bytes:
        data = pickle.dumps(value)
        self.n_bytes += len(data)
        return data

    loads = staticmethod(pickle.loads)


def test_the_values_do_not_come_to_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = minialpa.models.build("mlp", hidden=256, batch_size=16)
    method = pipeline(2, UniformStageOption(2))
    with in_process_session(2, 2):
        step = step_of(model, method)
        batch = model.make_batch(0, model.batch_size)
        state, _ = step(model.init(jax.random.key(0)), batch)
        executable = step.get_last_executable()
        executable.sync()

        traffic = Traffic()
        monkeypatch.setattr(in_process, "pickle", traffic)
        monkeypatch.setattr(ClusterRuntime, "fetch", None)
        save_checkpoint(tmp_path, state, step=0)
        found = restore_checkpoint(tmp_path, executable)
        executable.sync()
        n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert not any(leaf.held_here for leaf in jax.tree.leaves((state, found)))
        assert 0 < traffic.n_bytes < n_bytes / 10, (traffic.n_bytes, n_bytes)
        monkeypatch.undo()

        assert bits(found) == bits(state)
        expected, actual = step(state, batch), step(found, batch)
        assert bits(actual) == bits(expected)


def test_each_shard_is_written_once_and_the_work_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts_of: list[Any] = []
    decide = array_files._parts
    monkeypatch.setattr(array_files, "_parts", lambda arrays: parts_of.append(decide(arrays)) or parts_of[-1])
    with placed_state("mlp", "2 stages of 2 devices") as (_, state, _):
        save_checkpoint(tmp_path, state, step=0)
        n_elements = {".".join(name): int(np.prod(leaf[1])) for name, leaf in bits(state).items()}

    (parts,) = parts_of
    written: dict[str, int] = dict.fromkeys(n_elements, 0)
    for mine in parts.values():
        assert mine
        for part in mine:
            for _, box, place in part.shards:
                assert [b - a for a, b in box] == [b - a for a, b in place]
                written[part.stored.spec["kvstore"]["path"].strip("/")] += int(np.prod([b - a for a, b in place]))
    assert written == n_elements


def counting(state: Any, batch: Any) -> Any:
    new = {"w": state["w"] - batch.T @ batch, "step": state["step"] + 1}
    return {**new, "rate": state["rate"] * 1.0, "half": -state["half"]}, jnp.sum(batch)


def test_numbers_on_workers_come_back_as_weak_as_they_were(tmp_path: Path) -> None:
    batch = jnp.ones((16, 8))
    with in_process_session(1, 2):
        step = minialpa.parallelize(counting, method=ShardParallel(), donate_argnums=0, batch_argnums=1)
        state = {"w": jnp.ones((8, 8)), "step": 0, "rate": jnp.float32(2.0), "half": jnp.arange(4, dtype=jnp.bfloat16)}
        save_checkpoint(tmp_path, state, step=0)
        state, _ = step(state, batch)
        save_checkpoint(tmp_path, state, step=1, plan=step.get_last_executable().get_parallel_plan())

        plan = minialpa.Plan.load(tmp_path / "1" / "plan" / "plan.json")
        again = minialpa.parallelize(counting, method=plan, donate_argnums=0, batch_argnums=1)
        executable = step.get_last_executable()
        for k in range(2):
            found = restore_checkpoint(tmp_path, executable, step=k)
            assert [found["step"].weak_type, found["rate"].weak_type] == [True, False]
            assert found["half"].dtype == jnp.bfloat16
            np.testing.assert_array_equal(found["half"], (-1.0) ** k * np.arange(4))
            found, _ = again(found, batch)
            assert int(found["step"]) == k + 1


def test_a_step_may_donate_what_workers_still_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = worker_files.write
    monkeypatch.setattr(worker_files, "write", lambda parts: may_write.wait(60) and write(parts))
    step, start, batch = on_two_stages()
    with in_process_session(2, 1), CheckpointManager(tmp_path) as manager:
        state, _ = step(start, batch)
        expected = bits(state)
        manager.save(0, state)
        later, _ = step(state, batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.ndim)
        assert bits(later) != expected
        may_write.set()
        assert bits(manager.restore(like=step.get_last_executable()).state) == expected


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_worker_that_is_lost_while_it_writes_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, is_lost = threading.Event(), threading.Event()

    def write_some(parts: Any) -> None:
        write(parts[: len(parts) // 2])
        is_writing.set()
        is_lost.wait(60)

    write = worker_files.write
    step, start, batch = on_two_stages()
    with in_process_session(2, 1) as runtime:
        state, _ = step(start, batch)
        expected = bits(state)
        manager = CheckpointManager(tmp_path)
        manager.save(0, state)
        manager.wait_until_finished()

        monkeypatch.setattr(worker_files, "write", write_some)
        manager.save(1, state)
        assert is_writing.wait(60)
        runtime.workers[1].actor.end()
        with pytest.raises(CheckpointError, match=r"could not write a checkpoint; older ones stay as they were"):
            manager.wait_until_finished()
        is_lost.set()
        manager.close()
        with pytest.raises(WorkerError):
            step(state, batch)
        monkeypatch.undo()

    with in_process_session(2, 1), CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == (0,)
        found = manager.restore(like=step.get_executable(start, batch))
        assert bits(found.state) == expected

        # Half-written files are gone, and the run goes on.
        manager.save(1, step(found.state, batch)[0])
        manager.wait_until_finished()
        assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["0", "1"]


def test_a_lost_worker_that_goes_on_writing_does_not_touch_later_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a host that is cut off from the others, but not from the files. Workers of both sessions have number 0."""
    is_writing, may_write, is_done = threading.Event(), threading.Event(), threading.Event()

    def write_late(parts: Any) -> None:
        """It has looked for the folder already when it is cut off."""
        late.add(parts[0][0].stored.folder)
        is_writing.set()
        may_write.wait(60)
        try:
            write(parts)
        finally:
            is_done.set()

    late: set[str] = set()
    write, await_folder = worker_files.write, worker_files._await_folder
    monkeypatch.setattr(worker_files, "_await_folder", lambda path, s: None if path in late else await_folder(path, s))
    step, start, batch = on_two_stages()
    with in_process_session(2, 1) as runtime:
        state, _ = step(start, batch)
        monkeypatch.setattr(worker_files, "write", write_late)
        manager = CheckpointManager(tmp_path)
        manager.save(1, state)
        assert is_writing.wait(60)
        for worker in runtime.workers:
            worker.actor.end()
        with pytest.raises(CheckpointError):
            manager.wait_until_finished()
        monkeypatch.setattr(worker_files, "write", write)
        manager.close()

    with in_process_session(2, 1), CheckpointManager(tmp_path) as manager:
        executable = step.get_executable(start, batch)
        other = step.preshard_dynamic_args(case("mlp").init(jax.random.key(7)), batch)[0]
        expected = bits(other)
        release = functools.partial(_write_before, may_write, is_done, write)
        monkeypatch.setattr(worker_files, "write", release)
        manager.save(1, other)
        manager.wait_until_finished()
        assert bits(manager.restore(like=executable).state) == expected
    with CheckpointManager(tmp_path) as manager:
        assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["1"]


def _write_before(may_write: threading.Event, is_done: threading.Event, write: Any, parts: Any) -> None:
    """Write, and then have lost workers write, before the checkpoint is complete."""
    write(parts)
    may_write.set()
    assert is_done.wait(60)


def test_a_folder_that_a_worker_does_not_see_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_files, "_FOLDER_S", 0.0)
    monkeypatch.setattr(worker_files, "_sees", lambda folder: False)
    with placed_state("mlp", "2 stages") as (executable, state, _):
        manager = CheckpointManager(tmp_path)
        manager.save(0, state)
        with pytest.raises(CheckpointError, match=r"does not see the folder .* hosts of the cluster share"):
            manager.close()
        monkeypatch.undo()
        # The session goes on.
        save_checkpoint(tmp_path, state, step=1)
        assert bits(restore_checkpoint(tmp_path, executable)) == serial_bits("mlp")
