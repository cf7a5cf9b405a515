"""Checkpoints: a state comes back bit for bit, under any plan and by orbax alone, or an error gives the reason."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import CheckpointError, CheckpointManager, Plan, restore_checkpoint, save_checkpoint
from minialpa.runtime.arrays import BlockedArray
from tests.checkpoint_cases import (
    bits,
    by_orbax_alone,
    case,
    methods,
    state_of_step,
    step_of,
)
from tests.training_runs import batches, create_state, evaluate, parallelized

PLANS = ("one device", "ZeRO-3 on 8", "ZeRO-3 on 4", "blocks on 2 stages")
#: The plan of a save, and the plan of the restore; the first pair always runs.
PAIRS = [
    (PLANS[3], PLANS[1]),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in itertools.permutations(PLANS, 2)),
]


@functools.cache
def step_under(name: str) -> Any:
    """A step under a plan, compiled once for all tests."""
    return step_of(case("scanned"), methods()[name])


@functools.cache
def trained(name: str) -> tuple[Any, Any]:
    """The executable of a step, and the state after it."""
    built, step = case("scanned"), step_under(name)
    state, _ = step(built.init(jax.random.key(0)), built.make_batch(0, built.batch_size))
    return step.get_last_executable(), state


@pytest.mark.parametrize(("saved", "restored"), PAIRS)
def test_a_state_comes_back_under_every_plan(saved: str, restored: str, tmp_path: Path) -> None:
    executable, state = trained(saved)
    target, _ = trained(restored)
    save_checkpoint(tmp_path, state, step=7, plan=executable.get_parallel_plan())

    found = restore_checkpoint(tmp_path, target)
    assert bits(found) == bits(state) == bits(by_orbax_alone(tmp_path, 7))
    assert Plan.load(tmp_path / "7" / "plan" / "plan.json") == executable.get_parallel_plan()
    # The step reads every leaf in place.
    leaves = jax.tree.leaves(found)
    placed = target.place([*leaves, *jax.tree.leaves(case("scanned").make_batch(0, 16))])
    assert all(a is b for a, b in zip(leaves, placed, strict=False))


def test_blocks_are_restored_by_arrays_types_and_shapes(tmp_path: Path) -> None:
    executable, state = trained("blocks on 2 stages")
    save_checkpoint(tmp_path, state, step=0)
    blocked = [x.shardings for x in jax.tree.leaves(state) if isinstance(x, BlockedArray)]
    for target in (state, executable.get_input_targets()[0]):
        found = restore_checkpoint(tmp_path, target)
        assert bits(found) == bits(state)
        assert [x.shardings for x in jax.tree.leaves(found) if isinstance(x, BlockedArray)] == blocked
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state[:1])
    assert bits(restore_checkpoint(tmp_path, shapes, partial_restore=True)) == bits(state[:1])


def test_weights_alone_go_into_an_evaluation_step_under_another_plan(tmp_path: Path) -> None:
    batch = next(batches())
    state, _ = parallelized()(create_state(), batch)
    save_checkpoint(tmp_path, state, step=0)

    step = minialpa.parallelize(evaluate, method=methods()["ZeRO-3 on 4"])
    executable = step.get_executable(jax.eval_shape(create_state)["params"], batch)
    target = {"params": executable.get_input_targets()[0]}
    params = restore_checkpoint(tmp_path, target, partial_restore=True)["params"]
    assert bits(params) == bits(state["params"])
    host = [jnp.asarray(np.asarray(w)) for w in params]
    np.testing.assert_allclose(np.asarray(step(params, batch)), jax.jit(evaluate)(host, batch), rtol=1e-5)
    assert step.get_last_executable() is executable


def test_a_part_of_a_state_is_read_by_the_names_of_its_leaves(tmp_path: Path) -> None:
    """A pair has its parts by number."""
    weights = {"a": jnp.arange(12.0).reshape(3, 4), "b": [jnp.ones(2), jnp.zeros(3)]}
    pair = (weights, optax.adam(1e-3).init(weights))
    save_checkpoint(tmp_path, pair, step=0)
    for target in ((weights,), {"0": {"b": {"1": weights["b"][1]}}}, (None, pair[1]), pair):
        assert bits(restore_checkpoint(tmp_path, target, partial_restore=True)) == bits(target)


def test_a_part_that_does_not_match_is_refused_by_name(tmp_path: Path) -> None:
    state = {"params": {"w": jnp.ones((2, 3))}, "n": 3}
    save_checkpoint(tmp_path, state, step=0)
    targets = {
        r"`\['params'\]\['head'\]`: not in the checkpoint; expected float32\[2\]": {"params": {"head": jnp.ones(2)}},
        r"names in `params`: `{'params': target}` with `partial_restore=True` reads": state["params"],
        "The target has no arrays": {"params": None},
    }
    for message, target in targets.items():
        with pytest.raises(CheckpointError, match=message):
            restore_checkpoint(tmp_path, target, partial_restore=True)


def many_leaves() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    keys = jax.random.split(jax.random.key(2, impl="rbg"), 8)
    return {
        "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("y", "x"))),
        "replicated": jax.device_put(jnp.arange(3), NamedSharding(mesh, P())),
        "key": jax.random.key(1),
        "keys": jax.device_put(keys, NamedSharding(mesh, P("x"))),
        "blocks": BlockedArray([jnp.ones((2, 3)), jax.device_put(jnp.zeros((1, 3)), jax.devices()[1])]),
        "key blocks": BlockedArray([keys[:3], keys[3:]]),
        "numpy": np.arange(3.0),
        "flags": np.array([True, False]),
        "np scalar": np.float32(0.1),
        "np bool": np.True_,
        "bfloat16": jnp.full((3,), jnp.nan, jnp.bfloat16),
        "int4": jnp.ones((3,), jnp.int4),
        "complex": jnp.ones((2,), jnp.complex64),
        "numbers": (3, True, 2.5, 1j, -0.0),
        "optax": optax.adam(1e-3).init({"w": jnp.ones((2, 2))}),
        "empty": {},
        "none": None,
    }


def test_leaves_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    state = many_leaves()
    save_checkpoint(tmp_path, state, step=3)
    found = restore_checkpoint(tmp_path, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert bits(found) == bits(state)
    same_kind = jax.tree.map(lambda a, b: type(a) is type(b), found, state)
    assert all(jax.tree.leaves(same_kind)), same_kind
    for name in ("sharded", "replicated", "keys"):
        assert found[name].sharding == state[name].sharding


def test_an_equinox_module_is_created_saved_and_read_where_its_step_has_it(tmp_path: Path) -> None:
    def create_state() -> Any:
        return eqx.nn.MLP(8, 8, 16, 1, activation=jnp.tanh, key=jax.random.key(0)), 0

    @minialpa.parallelize(method=minialpa.Zero3Parallel())
    def step(state: Any, batch: Any) -> Any:
        model, n = state
        loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(batch) ** 2))(model)
        return (eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), n + 1), loss

    batch = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    create = minialpa.parallelize(create_state, method=minialpa.CreateStateParallel(step, (batch,)))
    shapes, expected = create.eval_shape(), create_state()
    assert jax.tree.structure(shapes) == jax.tree.structure(expected)
    assert shapes[0].activation is jnp.tanh and shapes[0].layers[0].weight.shape == (16, 8)

    executable, state = step.get_executable(shapes, batch), create()
    save_checkpoint(tmp_path, state, step=0)
    found = restore_checkpoint(tmp_path, executable)
    assert bits(eqx.filter(found, eqx.is_array)) == bits(eqx.filter(state, eqx.is_array))
    (model, _), loss = step(found, batch)
    assert float(loss) == float(step(state, batch)[1]) and step.get_last_executable() is executable
    assert model.activation is jnp.tanh


def test_a_number_that_became_an_array_is_the_same_state(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"step": 3, "rate": 0.5}, step=0)
    arrays = {"step": jnp.zeros((), jnp.int32), "rate": jnp.zeros((), jnp.float32)}
    found = restore_checkpoint(tmp_path, arrays)
    assert bits(found) == bits({"step": jnp.int32(3), "rate": jnp.float32(0.5)})
    save_checkpoint(tmp_path, found, step=1)
    assert restore_checkpoint(tmp_path, {"step": 0, "rate": 0.0}) == {"step": 3, "rate": 0.5}

    save_checkpoint(tmp_path, {"step": 2**40, "rate": 0.1}, step=2)
    with pytest.raises(CheckpointError, match=r"`\['rate'\]` in step 2 .* is 0.1, which float32 does not hold"):
        restore_checkpoint(tmp_path, {"step": 0, "rate": jnp.float32(0)})


def test_a_saved_plan_fits_a_step_counter_that_was_a_python_number(tmp_path: Path) -> None:
    def train(state: Any, batch: Any) -> Any:
        loss, grad = minialpa.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad, "step": state["step"] + 1}, loss

    batch, state = jnp.ones((16, 8)), {"w": jnp.ones((8, 8)), "step": 0}
    step = minialpa.parallelize(train, method=minialpa.Zero3Parallel())
    plan = step.plan(state, batch)
    state, _ = step(state, batch)
    save_checkpoint(tmp_path, state, step=0, plan=plan)

    with CheckpointManager(tmp_path, read_only=True) as manager:
        again = minialpa.parallelize(train, method=manager.load_plan())
    like = again.get_executable({"w": jnp.ones((8, 8)), "step": 0}, batch)
    found, _ = again(restore_checkpoint(tmp_path, like), batch)
    assert int(found["step"]) == 2


# ---- managers --------------------------------------------------------------------------------------------------------


def test_a_manager_keeps_the_last_checkpoints(tmp_path: Path) -> None:
    state = {"w": jnp.arange(4.0)}
    with CheckpointManager(tmp_path / "new", max_to_keep=2, save_interval_steps=2) as manager:
        assert manager.latest_step() is None and manager.all_steps() == ()
        saved = [manager.save(i, {"w": state["w"] + i}, {"loss": i}, data={"at": [i]}) for i in range(8)]
        assert saved == [True, False] * 4
        manager.wait_until_finished()
        assert manager.all_steps() == (4, 6) and manager.latest_step() == 6
        found = manager.restore(like=state)
        assert (found.step, found.data, found.metrics) == (6, {"at": [6]}, {"loss": 6})
        np.testing.assert_array_equal(found.state["w"], np.arange(4.0) + 6)
        assert manager.restore(4, like=state).data == {"at": [4]}
        assert manager.load_plan() is None
        assert manager.save(7, state, force=True, data=b"\x00\xff")
        assert manager.restore(like=state).data == b"\x00\xff"
        with pytest.raises(CheckpointError, match="has a checkpoint of step 7"):
            manager.save(7, state)
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 5 .*\. The nearest are 6, 7\."):
            manager.restore(5, like=state)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("mode", "losses", "best"),
    [("max", [3.0, NAN, 1.0, 2.0, NAN, 5.0], (0, 5)), ("min", [NAN, NAN, INF], (1, 2))],
)
def test_the_best_checkpoints_stay(mode: Any, losses: list[float], best: tuple[int, ...], tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode=mode) as manager:
        for i, loss in enumerate(losses):
            manager.save(i, {"w": jnp.ones(2)}, {"loss": loss})
        manager.wait_until_finished()
        assert manager.all_steps() == best
        with pytest.raises(KeyError, match="loss"):
            manager.save(9, {"w": jnp.ones(2)}, {"no": 0.0})


def test_a_folder_may_have_the_characters_of_patterns(tmp_path: Path) -> None:
    (tmp_path / "lr0").mkdir()
    folder = tmp_path / "[!x]*?" / "a b#%2f{}~"
    state = {"w": jnp.arange(3.0), "[w]*": jnp.arange(2)}
    save_checkpoint(folder, state, step=1)
    save_checkpoint(folder, state, step=2)
    assert bits(restore_checkpoint(folder, state)) == bits(state)
    assert not any((tmp_path / "lr0").iterdir())


def test_a_folder_that_tensorstore_cannot_name_is_refused(tmp_path: Path) -> None:
    """It would write the arrays to `a/b`."""
    for name in ("a\\b", os.fsdecode(b"a\x80b")):
        with pytest.raises(CheckpointError, match="without backslashes that are UTF-8"):
            save_checkpoint(tmp_path / name, {"w": jnp.ones(2)}, step=1)
    assert not list(tmp_path.iterdir())


def test_what_links_point_to_is_not_deleted(tmp_path: Path) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    (home / "thesis").mkdir(parents=True)
    (home / "thesis" / "a.txt").write_text("years of work")
    run.mkdir()

    # Links where a manager keeps what it deletes, deletes what is unfinished, and deletes old steps.
    (run / ".deleted").symlink_to(home)
    with pytest.raises(CheckpointError, match=r"`.*/run/\.deleted` is a link"):
        CheckpointManager(run)
    (run / ".deleted").unlink()
    (run / "7.orbax-checkpoint-tmp-0").symlink_to(home)
    (run / "1").symlink_to(home)
    (run / ".minialpa-lock").symlink_to(home / "thesis" / "a.txt")
    with pytest.raises(CheckpointError, match="symbolic links"):
        CheckpointManager(run)
    (run / ".minialpa-lock").unlink()
    with CheckpointManager(run, max_to_keep=1) as manager:
        for step in (2, 3):
            manager.save(step, {"w": jnp.ones(2)})
    assert (home / "thesis" / "a.txt").read_text() == "years of work"


def test_a_forked_child_that_outlives_its_process_does_not_keep_the_folder(tmp_path: Path) -> None:
    """As readers of data may, which share the open files of the killed process."""
    code = f"""
import os, time
from pathlib import Path
from minialpa.checkpoints.folder_lock import lock
lock(Path({str(tmp_path)!r}))
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        with pytest.raises(CheckpointError, match=f"in process {process.pid} on"):
            CheckpointManager(tmp_path)
        process.kill()
        process.wait()
        try:
            with CheckpointManager(tmp_path), pytest.raises(CheckpointError, match=f"in process {os.getpid()} on"):
                CheckpointManager(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


def test_too_many_open_files_are_no_damage(tmp_path: Path) -> None:
    state = {"w": jnp.ones(2)}
    save_checkpoint(tmp_path, state, step=1)
    with CheckpointManager(tmp_path, read_only=True) as manager:
        manager.restore(like=state)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[0]), before[1]))
        opened = []
        try:
            with suppress(OSError):
                while True:
                    opened.append(os.open(os.devnull, os.O_RDONLY))
            with pytest.raises(CheckpointError, match="Too many open files") as caught:
                manager.restore(like=state)
        finally:
            for number in opened:
                os.close(number)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert "damaged" not in str(caught.value)
        assert bits(manager.restore(like=state).state) == bits(state)


def test_the_state_of_an_iterator_is_kept_as_it_is_or_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for data in ({1: 2}, (1, 2), {"x": np.ones(1)}, math.nan):
            with pytest.raises(CheckpointError, match=r"`data` of type .* cannot be saved"):
                manager.save(0, {"w": jnp.ones(2)}, data=data)


def test_training_that_was_resumed_equals_training_that_was_not(tmp_path: Path) -> None:
    """Each step donates the state that a thread still writes."""
    model = case("scanned")
    batches = [model.make_batch(i, model.batch_size) for i in range(4)]
    step = step_under("blocks on 2 stages")
    with CheckpointManager(tmp_path) as manager:
        state, expected = model.init(jax.random.key(0)), []
        for i, batch in enumerate(batches):
            state, metrics = step(state, batch)
            manager.save(i, state, data=i, plan=step.get_last_executable().get_parallel_plan())
            expected.append((bits(state), bits(metrics)))

    with CheckpointManager(tmp_path, read_only=True) as manager:
        plan = manager.load_plan(1)
        resumed = step_of(model, plan)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        found = manager.restore(1, like=resumed.get_executable(shapes, batches[0]))
    state = found.state
    assert bits(state) == expected[1][0]
    for i in range(found.data + 1, 4):
        state, metrics = resumed(state, batches[i])
        assert (bits(state), bits(metrics)) == expected[i]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    leaves: dict[str, Any] = {
        r"`\['a'\]\[0\]` is a str": "text",
        r"`\['a'\]\[0\]` has the dtype <U4": np.array(["text"]),
        r"`\['a'\]\[0\]` has the shape \(0, 2\)": jnp.zeros((0, 2)),
        r"`\['a'\]\[0\]` is a ShapeDtypeStruct, which has no value": jax.ShapeDtypeStruct((2,), np.float32),
    }
    for message, leaf in leaves.items():
        with pytest.raises(CheckpointError, match=message):
            save_checkpoint(tmp_path / "new", {"a": [leaf], "b": jnp.ones(2)}, step=0)
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        restore_checkpoint(tmp_path / "new", {"b": jnp.ones(2)})


def test_a_donated_state_names_that_meet_and_no_target_are_refused(tmp_path: Path) -> None:
    used = jnp.ones(2)
    used.delete()
    with pytest.raises(CheckpointError, match=r"`\['w'\]` has been deleted: it was donated"):
        save_checkpoint(tmp_path, {"w": used}, step=0)
    with pytest.raises(CheckpointError, match=r"would both be stored as `a\.b`"):
        save_checkpoint(tmp_path, {"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, step=0)

    # A step that has not run has no executable.
    save_checkpoint(tmp_path, {"w": jnp.ones(2)}, step=0)
    with pytest.raises(CheckpointError, match="The target is None"):
        restore_checkpoint(tmp_path, None)


def test_folders_without_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no folder"):
        restore_checkpoint(tmp_path / "none", {"w": jnp.ones(2)})
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "notes.txt").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match=r"step 3|There is no checkpoint"):
        restore_checkpoint(tmp_path, {"w": jnp.ones(2)})


def test_a_checkpoint_of_another_model_is_refused_leaf_by_leaf(tmp_path: Path) -> None:
    state = {"a": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, "step": 3}
    save_checkpoint(tmp_path, state, step=0)
    targets = {
        r"`\['a'\]\['w'\]`: the checkpoint has .*; expected float32\[3, 2\]": jnp.ones((3, 2)),
        r"`\['a'\]\['w'\]`: the checkpoint has .*; expected bfloat16\[2, 3\]": jnp.ones((2, 3), jnp.bfloat16),
        r"`\['a'\]\['w'\]\['x'\]`: not in the checkpoint; expected float32\[\]": {"x": jnp.float32(1)},
        r"`a.w`: the checkpoint has float32\[2, 3\]; not in the target": {},
    }
    for message, w in targets.items():
        with pytest.raises(CheckpointError, match=message):
            restore_checkpoint(tmp_path, {**state, "a": {"w": w, "b": state["a"]["b"]}})
    with pytest.raises(CheckpointError, match=r"`\['step'\]`: the checkpoint has int64\[\]; expected float64\[\]"):
        restore_checkpoint(tmp_path, {**state, "step": 3.0})
    with pytest.raises(CheckpointError, match="Pass the executable itself"):
        restore_checkpoint(tmp_path, trained("blocks on 2 stages")[0].get_input_placement_specs()[0])


# orbax drops the coroutines that it was running when the first of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_files_are_errors_and_older_checkpoints_stay(tmp_path: Path) -> None:
    state = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((64, 64), np.float32))}
    save_checkpoint(tmp_path, state, step=0)
    save_checkpoint(tmp_path, state, step=1)
    files = [path for path in (tmp_path / "1" / "state").rglob("*") if path.is_file() and path.stat().st_size]
    n_errors = 0
    for path in files:
        kept = path.read_bytes()
        for damage in ("cut", "gone"):
            path.write_bytes(kept[: len(kept) // 2]) if damage == "cut" else path.unlink()
            try:
                assert bits(restore_checkpoint(tmp_path, state)) == bits(state)
            except CheckpointError as error:
                n_errors += 1
                assert "step 1" in str(error)
            path.write_bytes(kept)
    assert n_errors >= 6  # metadata, manifest and data, cut and gone
    assert bits(restore_checkpoint(tmp_path, state, step=0)) == bits(state)
    assert bits(restore_checkpoint(tmp_path, state, step=1)) == bits(state)
    gc.collect()


@pytest.mark.parametrize("n_moments", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_leaves_complete_checkpoints_and_the_folder(
    n_moments: int, seed: int, tmp_path: Path
) -> None:
    """Until then it holds the folder alone: a second manager would delete the files that the first one is writing."""
    moments = random.Random(seed)
    for k in range(n_moments):
        folder = tmp_path / str(k)
        saving = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint_cases", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "XLA_FLAGS": ""},
        )
        assert saving.stdout is not None and saving.stdout.readline() == b"saving\n"
        for _ in range(2):
            with pytest.raises(CheckpointError, match=f"Another manager saves .* in process {saving.pid} on"):
                CheckpointManager(folder)
        with CheckpointManager(folder, read_only=True) as reader:
            assert reader.latest_step() is not None
        time.sleep(moments.uniform(0.0, 0.6))
        saving.send_signal(signal.SIGKILL)
        saving.wait()
        saving.stdout.close()

        with CheckpointManager(folder, max_to_keep=3) as manager:
            assert manager.latest_step() is not None and manager.latest_step() >= 1
            for step in manager.all_steps():
                found = manager.restore(step, like=state_of_step(step))
                assert bits(found.state) == bits(state_of_step(step)) and found.data == {"at": step}
            assert not list(folder.glob(".deleted/*"))
            # Half-written files are gone, and the run goes on after the last step.
            assert sorted(x.name for x in folder.glob("[!.]*") if x.is_dir()) == sorted(map(str, manager.all_steps()))
            assert manager.save(manager.latest_step() + 1, state_of_step(0))
            with pytest.raises(CheckpointError, match="Another manager saves checkpoints"):
                save_checkpoint(folder, state_of_step(0), step=10**6)
        save_checkpoint(folder, state_of_step(0), step=10**6)


def test_what_no_checkpoint_can_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for step in ("x", -1, True):
        with pytest.raises(CheckpointError, match="Pass an integer, 0 or more, as `step`; got"):
            minialpa.save_checkpoint(tmp_path, {"w": np.ones(3)}, step=step)  # type: ignore[arg-type]
    for options in ({"max_to_keep": "3"}, {"save_interval_steps": 0}):
        with pytest.raises(
            CheckpointError, match=r"Pass a positive integer as `(max_to_keep|save_interval_steps)`; got"
        ):
            CheckpointManager(tmp_path, **options)  # type: ignore[arg-type]
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones(3)})
    with pytest.raises(CheckpointError, match="is closed"):
        manager.save(2, {"w": np.ones(3)})
    with CheckpointManager(tmp_path, read_only=True) as manager:
        assert manager.all_steps() == (1,)
