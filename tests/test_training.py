"""`train` ends like an undisturbed run, also after signals and lost workers."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa import MinialpaError, ShardParallel, StepReport, WorkerError
from minialpa.inter import pipeline
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.in_process import InProcessLauncher
from minialpa.session import _Current, _session_on, current_session, running_session
from minialpa.training import _Progress
from tests.checkpoint_cases import bits
from tests.training_runs import N_LAYERS, Log, batches, create_state, parallelized, serial_losses, train_step

N_STEPS, SAVE_EVERY = 20, 5


@pytest.fixture(scope="module")
def serial() -> dict[int, float]:
    return serial_losses(N_STEPS)


@functools.cache
def step_on_one_mesh() -> Any:
    """Compiled once for the tests of one process."""
    return minialpa.parallelize(train_step, method=ShardParallel())


@contextmanager
def handled_by(number: int, handler: Any) -> Iterator[None]:
    """Within this context, the program handles a signal so."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


# ---- one process ----------------------------------------------------------------------------------------------------


def test_it_trains_as_the_serial_loop_and_goes_on_under_another_method(
    serial: dict[int, float], tmp_path: Path
) -> None:
    """The devices are the same, and the plan of the checkpoint fits them, but the caller asked for another method."""
    log, evaluations = Log(), []

    def report(done: StepReport) -> None:
        log(done)
        evaluations.extend([(done.n_steps, int(done.evaluation["n"]))] if done.evaluation is not None else [])

    options: dict[str, Any] = {
        "folder": tmp_path,
        "report": report,
        "evaluate": lambda state: {"n": state["n"] + 0},
        "evaluate_every": 8,
    }
    n_stages = []
    for n_steps, step in ((10, step_on_one_mesh()), (N_STEPS, parallelized())):
        result = minialpa.train(step, create_state, batches, n_steps=n_steps, **options)
        assert result.n_steps == int(result.state["n"]) == n_steps
        assert result.report is not None and result.report.metrics["loss"] == log.losses[n_steps]
        n_stages.append(len(step.get_last_executable().get_parallel_plan().stages))
        assert {"planned", "compiled"} <= {event.what for event in result.events}
    assert n_stages == [1, N_LAYERS]
    assert log.losses == pytest.approx(serial, rel=1e-4)
    # Every 8 steps and after the last step of a run, of the state after that step.
    assert evaluations == [(n, n) for n in (8, 10, 16, 20)]


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    class StopHere(Exception):
        pass

    step, whole, log = step_on_one_mesh(), Log(), Log()
    minialpa.train(step, create_state, batches, n_steps=N_STEPS, report=whole)

    def stop(report: StepReport) -> None:
        log(report)
        if report.n_steps == SAVE_EVERY + 1:
            raise StopHere

    options: dict[str, Any] = {"n_steps": N_STEPS, "folder": tmp_path, "save_every": SAVE_EVERY}
    with pytest.raises(StopHere):
        minialpa.train(step, create_state, batches, report=stop, **options)
    result = minialpa.train(step, create_state, batches, report=log, **options)
    assert log.losses == whole.losses

    # A finished run does no step.
    again = minialpa.train(step, create_state, batches, **options)
    assert again.report is None and again.n_steps == N_STEPS
    assert [event.what for event in again.events] == ["loaded", "compiled", "restored"]
    assert bits(again.state) == bits(result.state)


def test_a_signal_to_end_saves_the_steps_that_are_done(tmp_path: Path) -> None:
    """Afterwards the signal runs the program's handler, which here notes it."""
    noted: list[int] = []
    log = Log()

    def report(done: StepReport) -> None:
        log(done)
        if done.n_steps == 7:
            signal.raise_signal(signal.SIGTERM)
            assert not noted

    with handled_by(signal.SIGTERM, lambda number, frame: noted.append(number)):
        result = minialpa.train(
            step_on_one_mesh(), create_state, batches, n_steps=N_STEPS, folder=tmp_path, report=report
        )
    assert noted == [signal.SIGTERM]
    assert result.n_steps in (7, 8) and len(log.losses) == result.n_steps
    assert minialpa.CheckpointManager(tmp_path, read_only=True).all_steps() == (result.n_steps,)


def test_a_signal_to_end_before_the_first_step_acts_at_once_and_loses_no_batch(
    serial: dict[int, float], tmp_path: Path
) -> None:
    """The loader has read a batch by then, since its shapes decide the plan."""

    def told_to_end() -> Any:
        signal.raise_signal(signal.SIGTERM)
        return create_state()

    def end(number: int, frame: object) -> None:
        raise SystemExit

    step, log = minialpa.parallelize(train_step), Log()
    with handled_by(signal.SIGTERM, end), pytest.raises(SystemExit):
        minialpa.train(step, told_to_end, batches, n_steps=N_STEPS, folder=tmp_path)
    minialpa.train(step_on_one_mesh(), create_state, batches, n_steps=N_STEPS, folder=tmp_path, report=log)
    assert log.losses == pytest.approx(serial, rel=1e-4)


def test_a_signal_to_end_ends_the_wait_for_a_batch_that_never_comes(serial: dict[int, float], tmp_path: Path) -> None:
    go_on, noted, log = threading.Event(), [], Log()

    def blocked() -> Iterator[Any]:
        yield from itertools.islice(batches(), 3)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        go_on.wait(60)

    with handled_by(signal.SIGTERM, lambda number, frame: noted.append(number)):
        result = minialpa.train(step_on_one_mesh(), create_state, blocked, folder=tmp_path, report=log)
    go_on.set()
    assert noted and result.n_steps == 3

    # It has saved the steps that are done.
    minialpa.train(step_on_one_mesh(), create_state, batches, n_steps=N_STEPS, folder=tmp_path, report=log)
    assert log.losses == pytest.approx(serial, rel=1e-4)


def test_an_interrupt_that_a_callback_drops_ends_the_run_before_the_next_step() -> None:
    """As Python does in a callback of its garbage collector, and jax has one."""
    done: list[int] = []

    def report(report: StepReport) -> None:
        done.append(report.n_steps)
        if report.n_steps == 3:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    with handled_by(signal.SIGINT, signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt):
            minialpa.train(step_on_one_mesh(), create_state, batches, n_steps=N_STEPS, report=report)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert done in ([1, 2, 3], [1, 2, 3, 4])


@pytest.mark.parametrize("damage", ["does not fit", "cut"])
def test_a_plan_that_cannot_be_used_is_made_anew(
    serial: dict[int, float], damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step, log = step_on_one_mesh(), Log()
    minialpa.train(step, create_state, batches, n_steps=5, folder=tmp_path, report=log)
    file = tmp_path / "5" / "plan" / "plan.json"
    plan = json.loads(file.read_text())
    if damage == "does not fit":
        plan["plan"]["inputs"][0]["shape"] = [3, 3]
    file.write_text(json.dumps(plan)[: 100 if damage == "cut" else None])

    result = minialpa.train(step, create_state, batches, n_steps=N_STEPS, folder=tmp_path, report=log)
    assert log.losses == pytest.approx(serial, rel=1e-4)
    assert "unusable" in [event.what for event in result.events]
    assert "planned anew" in caplog.text


def test_a_batch_that_the_step_refuses_is_named_beside_the_first_one() -> None:
    def changing() -> Iterator[Any]:
        first = next(batches())
        yield from (first, first, {**first, "x": first["x"][:, :3]})

    with pytest.raises(
        MinialpaError, match=r"batch of \['x'\] float32\[16, 3\].*, since the first batch had .*16, 8\]"
    ):
        minialpa.train(step_on_one_mesh(), create_state, changing)


def test_pretrained_weights_are_a_checkpoint_of_step_0(serial: dict[int, float], tmp_path: Path) -> None:
    def other_weights() -> dict[str, Any]:
        state = create_state()
        return {**state, "params": jax.tree.map(jnp.zeros_like, state["params"])}

    log = Log()
    minialpa.save_checkpoint(tmp_path, create_state(), step=0)
    minialpa.train(step_on_one_mesh(), other_weights, batches, n_steps=N_STEPS, folder=tmp_path, report=log)
    assert log.losses == pytest.approx(serial, rel=1e-4)

    minialpa.save_checkpoint(tmp_path, create_state(), step=N_STEPS + 1)
    with pytest.raises(MinialpaError, match=f"of step {N_STEPS + 1} has no position in the batches"):
        minialpa.train(step_on_one_mesh(), other_weights, batches, n_steps=N_STEPS + 2, folder=tmp_path)


def test_it_ends_with_the_batches_and_saves_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint counts as saved when its files are there."""
    note, saved = _Progress.note, []

    def check(progress: _Progress, what: Any, seconds: float, text: str, n_steps: int | None = None) -> None:
        note(progress, what, seconds, text, n_steps)
        if what == "saved":
            assert (tmp_path / str(n_steps)).is_dir()
            saved.append(n_steps)

    monkeypatch.setattr(_Progress, "note", check)
    with pytest.warns(UserWarning, match=r"ended after 7 of 9 steps\. Pass `batches` that repeat") as warned:
        result = minialpa.train(
            step_on_one_mesh(),
            create_state,
            lambda: itertools.islice(batches(), 7),
            n_steps=9,
            folder=tmp_path,
            save_every=4,
        )
    assert [one.filename for one in warned] == [__file__]
    assert "ended" in [event.what for event in result.events] and result.n_steps == 7
    assert minialpa.CheckpointManager(tmp_path, read_only=True).all_steps() == (4, 7)
    assert saved == [4, 7]

    # A state of more than `n_steps` steps is refused, and the run must end.
    with pytest.raises(MinialpaError, match=r"`n_steps` is 3, and the last checkpoint in `.*` is of step 7"):
        minialpa.train(step_on_one_mesh(), create_state, batches, n_steps=3, folder=tmp_path, max_to_keep=1)
    assert minialpa.CheckpointManager(tmp_path, read_only=True).all_steps() == (4, 7)


def test_arguments_that_cannot_be_are_refused_at_once(tmp_path: Path) -> None:
    step = step_on_one_mesh()
    with pytest.raises(MinialpaError, match="Pass the function that `parallelize` returned as `step`"):
        minialpa.train(train_step, create_state, batches)  # type: ignore[arg-type]
    with pytest.raises(MinialpaError, match="cannot go back to a checkpoint"):
        minialpa.train(step, create_state, batches(), folder=tmp_path)
    with pytest.raises(MinialpaError, match="has no batch"):
        minialpa.train(step, create_state, list)
    wrong: dict[str, dict[str, Any]] = {
        "`save_every=5` has no effect without `folder`": {"save_every": 5},
        "`max_to_keep=1` has no effect without `folder`": {"max_to_keep": 1},
        "`evaluate_every=5` has no effect without `evaluate`": {"evaluate_every": 5},
        "`save_every` must be an integer >= 1; got 0": {"save_every": 0},
        "`n_steps` must be an integer >= 1 or None; got '9'": {"n_steps": "9"},
        "`folder` must be a string, a path, or None; got 3": {"folder": 3},
        "`report` must be a function; got 'print'": {"report": "print"},
        "`evaluate` must be a function or None; got 1": {"evaluate": 1},
        "`prefetch_size` must be an integer >= 1; got 0": {"prefetch_size": 0},
        "`wait_for_hosts_s` must be a number >= 0; got -1": {"wait_for_hosts_s": -1},
    }
    for message, arguments in wrong.items():
        with pytest.raises(MinialpaError, match=message):
            minialpa.train(step, create_state, batches, **arguments)
    step = minialpa.parallelize(lambda state, batch: train_step(state, batch)[0], method=ShardParallel())
    with pytest.raises(MinialpaError, match="Return a pair"):
        minialpa.train(step, create_state, batches, n_steps=2)


# ---- losses ---------------------------------------------------------------------------------------------------------


class Room:
    """The available hosts.

    Attributes:
        n_hosts: their present number.
    """

    def __init__(self, n_hosts: int) -> None:
        self.n_hosts = n_hosts

    def launcher(self) -> InProcessLauncher:
        room = self

        class Launcher(InProcessLauncher):
            def available_hosts(self) -> int:
                return room.n_hosts

            def restarted(self) -> InProcessLauncher:
                if room.n_hosts == 0:
                    raise MinialpaError("No host answers.")
                return room.launcher()

        return Launcher(jax.devices()[: self.n_hosts], 1, timeout_s=60.0)

    def lose(self, n_left: int) -> None:
        """End the workers on all hosts but the first `n_left`; the hosts are gone."""
        self.n_hosts = n_left
        for worker in runtime().workers:
            if worker.host >= n_left:
                worker.actor.end()  # type: ignore[attr-defined]


def runtime() -> ClusterRuntime:
    found = current_session().runtime
    assert isinstance(found, ClusterRuntime)
    return found


@contextmanager
def session_on(room: Room) -> Iterator[None]:
    minialpa.shutdown()
    _Current.session = _session_on(room.launcher(), None)
    try:
        yield
    finally:
        minialpa.shutdown()


def train_in(room: Room, folder: Path, report: Callable[[StepReport], object]) -> Any:
    with session_on(room):
        result = minialpa.train(
            parallelized(), create_state, batches, n_steps=N_STEPS, folder=folder, save_every=SAVE_EVERY, report=report
        )
        minialpa.prefetch(result.state)
        return result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    log = Log()
    train_in(Room(2), tmp_path_factory.mktemp("undisturbed"), log)
    return log.losses


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_workers_killed_at_any_moment_change_nothing(
    undisturbed: dict[int, float], tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts stay, so the plan is the same, and so are the numbers."""
    planned = Mock(wraps=pipeline.plan_step)
    monkeypatch.setattr(pipeline, "plan_step", planned)
    rng, log = random.Random(seed), Log()
    kills = sorted(rng.sample(range(1, N_STEPS), 1 + seed % 2))
    timers: list[threading.Timer] = []

    def kill() -> None:
        """Between two sessions there may be no worker."""
        session = running_session()
        workers = [] if session is None else session.runtime.workers
        if workers:
            rng.choice(workers).actor.end()

    def report(done: StepReport) -> None:
        log(done)
        if kills and done.n_steps >= kills[0]:
            kills.pop(0)
            timers.append(threading.Timer(rng.random() * 0.1, kill))
            timers[-1].start()
        if done.n_steps == N_STEPS:  # not after the end of the run
            for timer in timers:
                timer.join()

    result = train_in(Room(2), tmp_path, report)
    assert log.losses == undisturbed
    assert int(result.state["n"]) == N_STEPS
    assert planned.call_count == 1


def test_it_waits_for_a_host_and_goes_on_with_fewer_and_then_with_more(
    serial: dict[int, float], tmp_path: Path
) -> None:
    room, log = Room(2), Log()

    def report(done: StepReport) -> None:
        log(done)
        if done.n_steps == 8 and room.n_hosts == 2:
            while not (tmp_path / "5").exists():  # written by a thread
                time.sleep(0.01)
            room.lose(0)
            threading.Timer(0.5, lambda: setattr(room, "n_hosts", 1)).start()
        if done.n_steps == 12:
            room.n_hosts = 2

    result = train_in(room, tmp_path, report)
    assert log.losses == pytest.approx(serial, rel=1e-3)

    # One host from the checkpoint of step 5 on; two at the next checkpoint after step 12.
    told = [(e.what, e.n_steps) for e in result.events if e.what in ("restored", "planned", "restarted")]
    assert told == [
        ("planned", 0),
        ("restarted", pytest.approx(8, abs=2)),
        ("planned", 5),
        ("restored", 5),
        ("restarted", 15),
        ("planned", 15),
        ("restored", 15),
    ]
    assert [e.text for e in result.events if e.what == "restarted"] == [
        "A new session runs on 1 x 1 devices.",
        "A new session runs on 2 x 1 devices.",
    ]


def test_without_a_folder_a_loss_ends_the_run() -> None:
    room = Room(2)
    with session_on(room), pytest.raises(WorkerError) as caught:
        minialpa.train(parallelized(), create_state, batches, n_steps=N_STEPS, report=lambda _: room.lose(1))
    assert "With a `folder`" in caught.value.__notes__[0]


@pytest.mark.slow  # test_it_waits_for_a_host_and_goes_on_with_fewer_and_then_with_more is the short relative
def test_a_step_that_ends_its_workers_each_time_ends_the_run(tmp_path: Path) -> None:
    room, n_ends = Room(2), 0

    def report(done: StepReport) -> None:
        nonlocal n_ends
        if done.n_steps == 7:
            n_ends += 1
            for worker in runtime().workers:
                worker.actor.end()  # type: ignore[attr-defined]

    with pytest.raises(WorkerError) as caught:
        train_in(room, tmp_path, report)
    assert n_ends == 3 and "lost 3 times at this step" in caught.value.__notes__[0]
