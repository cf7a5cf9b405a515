"""The loop around a training step: a step, a state and batches go in; a trained state and checkpoints come out.

The loss of a worker ends a session and its arrays. `train` then starts a session on the remaining hosts, plans for
them, reads the last checkpoint into the new shardings, and continues. After each checkpoint it takes in new hosts
likewise.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from types import FrameType
from typing import Any, Literal

import jax
import numpy as np

from minialpa.api.functions import parallelize
from minialpa.api.parallelized import ParallelizedFunc
from minialpa.arrays import prefetch
from minialpa.checkpoints.manager import CheckpointManager
from minialpa.data import DataLoader, state_methods
from minialpa.errors import CheckpointError, MinialpaError, VerifyError, WorkerError
from minialpa.field_types import Count, NotNegative, check_fields
from minialpa.methods import CreateStateParallel
from minialpa.plan import Plan
from minialpa.session import available_hosts, current_session, failure, restart
from minialpa.support.private_jax import api_boundary, warn

_log = logging.getLogger(__name__)

#: Losses without a new step that show the step to be the cause.
_MOST_LOSSES = 3
#: Seconds between attempts to find a host.
_LOOK_EVERY_S = 2.0

What = Literal[
    "unusable", "loaded", "planned", "compiled", "created", "restored", "saved", "ended", "lost", "restarted"
]
_WARNINGS = ("unusable", "lost", "restarted")
#: Default of `save_every` and `evaluate_every`, and of `max_to_keep`.
_EVERY, _MOST_KEPT = 100, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The results of a step.

    Attributes:
        n_steps: steps of the run so far, including this one.
        metrics: numbers and NumPy arrays.
        evaluation: result of `evaluate` after this step, if called.
    """

    n_steps: int
    metrics: Any
    evaluation: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEvent:
    """An event between steps, and its cost.

    Attributes:
        what: the kind:
            "planned", "loaded": the step has a new plan, or the plan of a checkpoint.
            "compiled": the step is compiled for the devices of a session.
            "created", "restored": the state is new, or from a checkpoint.
            "saved": the files of a checkpoint are complete.
            "ended": the batches ended before `n_steps` steps.
            "lost", "restarted": the session was lost; a new one runs.
            "unusable": the plan of a checkpoint failed; the step has a new one.
        n_steps: number of steps before the event; for a checkpoint, its step.
        seconds: how long the loop waited. Threads write a checkpoint during the next steps.
        text: a description.
    """

    what: What
    n_steps: int
    seconds: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of `train`.

    Attributes:
        state: the state after the last step.
        n_steps: number of steps of the run.
        report: the report of the last step; None if `train` ran no step.
    """

    state: Any
    n_steps: int
    report: StepReport | None
    events: tuple[TrainingEvent, ...]


@api_boundary
def train(
    step: ParallelizedFunc,
    create_state: Callable[[], Any],
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    *,
    n_steps: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    max_to_keep: int | None = _MOST_KEPT,
    report: Callable[[StepReport], object] | None = None,
    evaluate: Callable[[Any], Any] | None = None,
    evaluate_every: int | None = None,
    prefetch_size: int = 2,
    wait_for_hosts_s: float = 600.0,
) -> TrainingResult:
    """Repeat `state, metrics = step(state, batch)`, from the last checkpoint in `folder` if it has one.

    Args:
        step: the function that `parallelize` returned. Its two arguments are pytrees.
        create_state: makes the first state, without arguments; each leaf is made where the step reads it.
        batches: a function that returns an iterator over the same batches each time; or an iterable; or an iterator
            with a state of its own, as in grain. `DataLoader` reads them ahead.
        n_steps: steps of the whole run, including steps before the checkpoint; None for one per batch.
        folder: a folder for checkpoints that every host sees. With None, a loss ends the run. The first checkpoint may
            hold pretrained weights: `save_checkpoint(folder, state, step=0)`.
        save_every: steps between checkpoints; None for 100. The last step has one, too.
        max_to_keep: number of checkpoints that stay; None for all.
        report: called for each step, in order, possibly during the next step. After a restart, lost steps are repeated
            and reported a second time.
        evaluate: called with the state, which it must not change.
        evaluate_every: steps between evaluations; None for 100. Step `n_steps` has one, too.
        prefetch_size: number of batches to read ahead.
        wait_for_hosts_s: seconds to wait for a host after all were lost.

    The logger `minialpa.training` logs events: losses, restarts and unusable plans as warnings, others as information.
        Each checkpoint has the plan, for a restart on the same devices. A UserWarning reports batches that end before
        `n_steps`.

    At SIGTERM, which clusters send before they take a machine away, `train` with a folder finishes the step, saves a
    checkpoint, and lets the signal end the process. Without a state to save, the signal acts at once.

    Raises the WorkerError if a session is lost without a folder, or three times at the same step; MinialpaError for
    wrong arguments.
    """
    _check_arguments(step, create_state, batches)
    run = _Run(
        step=step,
        create_state=create_state,
        batches=batches,
        n_steps=n_steps,
        folder=folder,
        save_every=_EVERY if save_every is None else save_every,
        max_to_keep=max_to_keep,
        report=report or (lambda _: None),
        evaluate=evaluate,
        evaluate_every=_EVERY if evaluate_every is None else evaluate_every,
        prefetch_size=prefetch_size,
        wait_for_hosts_s=wait_for_hosts_s,
    )
    _check_used({"save_every": (save_every, None), "max_to_keep": (max_to_keep, _MOST_KEPT)}, "folder", folder)
    _check_used({"evaluate_every": (evaluate_every, None)}, "evaluate", evaluate)
    progress = _Progress()
    while True:
        session = current_session()
        try:
            with _interrupt_noted(progress), _termination_noted(run, progress), ExitStack() as resources:
                end = _in_one_session(run, progress, resources)
        except MinialpaError as error:
            lost = failure(session)
            if lost is None:
                raise
            # Saving may fail because of the loss; then the session's own error is the cause.
            progress.note_loss(error if isinstance(error, WorkerError) else lost, can_go_on=run.folder is not None)
        else:
            if end is not None:
                return end
        _restart(run, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    step: ParallelizedFunc
    create_state: Callable[[], Any]
    batches: Any
    n_steps: Count | None
    folder: str | os.PathLike[str] | None
    save_every: Count
    max_to_keep: Count | None
    report: Callable[[StepReport], object]
    evaluate: Callable[[Any], Any] | None
    evaluate_every: Count
    prefetch_size: Count
    wait_for_hosts_s: NotNegative

    def __post_init__(self) -> None:
        check_fields(self, but=["batches"], error=MinialpaError)


class _Progress:
    """Facts that outlive a session.

    Attributes:
        n_done: number of steps of the present state.
        first_batch: the state of the data loader before its first batch.
        is_terminated: whether SIGTERM came.
        loader: the loader of the session, whose batches SIGTERM ends.
        has_state: whether there is a state to save.
        saving: step of the checkpoint that is being written, and seconds that the loop waited for it.
    """

    def __init__(self) -> None:
        self.events: list[TrainingEvent] = []
        self.n_done = 0
        self.last: StepReport | None = None
        self.first_batch: dict[str, Any] | None = None
        self.is_terminated = self.is_interrupted = self.has_state = False
        self.loader: DataLoader | None = None
        self.saving: tuple[int, float] | None = None
        # At the last loss: most steps so far, and the number of losses without a further step.
        self._most_steps_done = 0
        self._n_losses = 0

    def note(self, what: What, seconds: float, text: str, n_steps: int | None = None) -> None:
        at = self.n_done if n_steps is None else n_steps
        event = TrainingEvent(what=what, n_steps=at, seconds=seconds, text=text)
        self.events.append(event)
        _log.log(
            logging.WARNING if what in _WARNINGS else logging.INFO, "step %d: %s (%.2f s)", event.n_steps, text, seconds
        )

    @contextmanager
    def timed(self, what: What, text: str) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self.note(what, time.monotonic() - start_s, text)

    def note_loss(self, error: WorkerError, *, can_go_on: bool) -> None:
        """Raises `error` if the run cannot go on."""
        self._n_losses = 1 if self.n_done > self._most_steps_done else self._n_losses + 1
        self._most_steps_done = max(self._most_steps_done, self.n_done)
        self.note("lost", 0.0, f"The session is lost: {error}")
        if not can_go_on:
            error.add_note(
                "The state is lost with the session. With a `folder`, the run would go on from its last checkpoint."
            )
            raise error
        if self._n_losses == _MOST_LOSSES:
            error.add_note(f"The session was lost {_MOST_LOSSES} times at this step, so the run ends.")
            raise error


@contextmanager
def _interrupt_noted(progress: _Progress) -> Iterator[None]:
    """Python drops a KeyboardInterrupt in a callback of C code."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        progress.is_interrupted = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _termination_noted(run: _Run, progress: _Progress) -> Iterator[None]:
    """Let SIGTERM end the loop if there is a state to save; its former effect follows.

    A loop that waits for a batch ends at once, since the batch may never come.
    """
    before = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    # None stands for a handler outside of Python. An ignored signal stays ignored.
    if run.folder is None or not is_main or before in (None, signal.SIG_IGN):
        yield
        return

    def restore_signal() -> None:
        """Restore the former effect."""
        signal.signal(signal.SIGTERM, before)
        if progress.is_terminated:
            signal.raise_signal(signal.SIGTERM)

    def note(number: int, frame: object) -> None:
        progress.is_terminated = True
        if progress.loader is not None:
            progress.loader.end()
        if not progress.has_state:
            restore_signal()

    progress.has_state = False
    signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is note:
            restore_signal()


def _in_one_session(run: _Run, progress: _Progress, resources: ExitStack) -> TrainingResult | None:
    """Train in one session. None if hosts were added, so a new session should start."""
    loader = progress.loader = resources.enter_context(DataLoader(run.batches, run.step, run.prefetch_size))
    manager = None
    if run.folder is not None:
        manager = resources.enter_context(CheckpointManager(run.folder, max_to_keep=run.max_to_keep))

    batch = _first_batch(progress, loader)
    first_types = _types_text(batch)
    state, plan, batches = _first_state(run, progress, loader, manager, batch)
    progress.has_state, progress.saving = True, None

    reports, checkpoints = _Reports(run, progress), _Checkpoints(run, progress, manager, loader, plan)
    while progress.n_done != run.n_steps and not progress.is_terminated:
        if progress.is_interrupted:
            raise KeyboardInterrupt
        if (batch := next(batches, None)) is None:
            break
        state, metrics = _one_step(run, state, batch, first_types)
        progress.n_done += 1
        reports.add(progress.n_done, metrics, _evaluation(run, progress.n_done, state))
        if checkpoints.save_if_due(state, reports) and progress.n_done != run.n_steps and _has_more_hosts():
            checkpoints.finish()
            return None

    reports.give()
    checkpoints.save_end(state)
    if run.n_steps is not None and progress.n_done < run.n_steps and not progress.is_terminated:
        text = f"The batches ended after {progress.n_done} of {run.n_steps} steps."
        progress.note("ended", 0.0, text)
        warn(
            f"{text} Pass `batches` that repeat, such as `lambda: itertools.cycle(batches)`, or a smaller `n_steps`.",
        )
    return TrainingResult(state=state, n_steps=progress.n_done, report=progress.last, events=tuple(progress.events))


def _evaluation(run: _Run, n_done: int, state: Any) -> Any:
    is_due = n_done % run.evaluate_every == 0 or n_done == run.n_steps
    return run.evaluate(state) if run.evaluate is not None and is_due else None


def _first_batch(progress: _Progress, loader: DataLoader) -> Any:
    """The first batch comes before the state, since its shapes decide the plan."""
    if progress.first_batch is None:
        progress.first_batch = loader.get_state()
    loader.set_state(progress.first_batch)
    batch = next(loader, None)
    if batch is None and progress.is_terminated:
        raise MinialpaError(
            "SIGTERM ended the run before `batches` had a batch. No step was trained; call `train` anew to start."
        )
    if batch is None:
        raise MinialpaError("`batches` has no batch. If it is a function, it must return a new iterator each time.")
    return batch


class _Checkpoints:
    def __init__(
        self, run: _Run, progress: _Progress, manager: CheckpointManager | None, loader: DataLoader, plan: Plan
    ) -> None:
        self._run, self._progress, self._manager = run, progress, manager
        self._loader, self._plan = loader, plan

    def save_if_due(self, state: Any, reports: _Reports) -> bool:
        if self._manager is None:
            return False
        if not self._manager.is_saving():
            self.finish()
        if self._progress.n_done % self._run.save_every:
            return False
        reports.give()
        self._save(self._manager, state)
        return True

    def save_end(self, state: Any) -> None:
        """Save the last state unless it is saved, and wait."""
        # Before the first step, the loader has read a batch, so its position does not fit the state.
        if self._manager is not None and self._progress.n_done not in (0, *self._manager.all_steps()):
            self._save(self._manager, state)
        self.finish()

    def finish(self) -> None:
        if self._manager is not None and self._progress.saving is not None:
            self._manager.wait_until_finished()
            (n_steps, seconds), self._progress.saving = self._progress.saving, None
            self._progress.note("saved", seconds, f"The checkpoint of step {n_steps} is saved.", n_steps)

    def _save(self, manager: CheckpointManager, state: Any) -> None:
        start_s = time.monotonic()
        self.finish()
        data = {"batches": self._loader.get_state(), "method": repr(self._run.step.method)}
        manager.save(self._progress.n_done, state, data=data, plan=self._plan, force=True)
        self._progress.saving = self._progress.n_done, time.monotonic() - start_s


def _first_state(
    run: _Run, progress: _Progress, loader: DataLoader, manager: CheckpointManager | None, batch: Any
) -> tuple[Any, Plan, Iterator[Any]]:
    """The last saved or a new state, the plan, the batches that follow."""
    n_saved = None if manager is None else manager.latest_step()
    progress.n_done = n_saved or 0
    if run.n_steps is not None and progress.n_done > run.n_steps:
        raise MinialpaError(
            f"`n_steps` is {run.n_steps}, and the last checkpoint in `{run.folder}` is of step {n_saved}. Pass more "
            "steps to continue from it, or another folder to train from the start."
        )
    saved = {} if manager is None or n_saved is None else _saved_data(manager, n_saved)
    create_state = parallelize(run.create_state, method=CreateStateParallel(run.step, (batch,)))

    # On the devices of the checkpoint, its plan gives equal numbers and needs no planning.
    has_plan = saved.get("method") == repr(run.step.method) and not isinstance(run.step.method, Plan)
    plan, executable = _plan_and_compile(run, progress, create_state.eval_shape(), batch, manager if has_plan else None)

    if manager is not None and executable.refs.updated:
        raise MinialpaError(
            f"{run.step!r} updates a Ref that is not part of the state, so its checkpoints would lack the Ref's value. "
            "Pass and return this value as a part of the state, or call `train` without `folder`."
        )

    if manager is None or n_saved is None:
        with progress.timed("created", "The state is created."):
            state = create_state()
    else:
        with progress.timed("restored", f"The checkpoint of step {n_saved} is read."):
            state = manager.restore(n_saved, like=executable).state
    if not saved:
        return state, plan, chain((batch,), loader)
    loader.set_state(saved["batches"])
    return state, plan, loader


def _plan_and_compile(
    run: _Run, progress: _Progress, state: Any, batch: Any, saved: CheckpointManager | None
) -> tuple[Plan, Any]:
    """Plan and executable. saved: the checkpoints whose plan to try first."""
    try:
        given = None if saved is None else _saved_plan(saved)
        if given is not None:
            run.step.use_plan(given)

        start_s = time.monotonic()
        lowered = run.step.lower(state, batch)
        planned_s = time.monotonic() - start_s
        if lowered.plan is given:
            progress.note("loaded", planned_s, f"The plan in the checkpoint is used for {_hosts_text()}.")
        else:
            progress.note("planned", planned_s, f"The step is planned for {_hosts_text()}.")

        with progress.timed("compiled", "The step is compiled."):
            return lowered.plan, lowered.compile()
    except (CheckpointError, VerifyError) as error:
        if saved is None:
            raise
        progress.note(
            "unusable", 0.0, f"The step is planned anew, since the plan in the checkpoint cannot be used. {error}"
        )
        run.step.use_plan(None)
        return _plan_and_compile(run, progress, state, batch, None)


def _saved_plan(manager: CheckpointManager) -> Plan:
    plan = manager.load_plan()
    if plan is None:
        raise CheckpointError("The checkpoint has no plan.")
    return plan


def _saved_data(manager: CheckpointManager, n_saved: int) -> dict[str, Any]:
    """Position in the batches, and method; empty for pretrained weights."""
    data = manager.load_data(n_saved)
    if isinstance(data, dict) and data.keys() == {"batches", "method"}:
        return data
    if n_saved == 0:
        return {}
    raise MinialpaError(
        f"The checkpoint of step {n_saved} has no position in the batches, so `train` did not save it. To begin "
        "training with its state, save that as the checkpoint of step 0 in a new `folder`."
    )


def _one_step(run: _Run, state: Any, batch: Any, first_types: str) -> tuple[Any, Any]:
    """Raises MinialpaError for a wrong result, or if a batch has other types."""
    try:
        result = run.step(state, batch)
    except (TypeError, ValueError) as error:
        if (types := _types_text(batch)) == first_types:
            raise
        raise MinialpaError(
            f"The step fails on a batch of {types}, since the first batch had {first_types}. Make all batches of "
            f"`batches` alike, or change the step. It raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise MinialpaError(
            f"`train` calls `state, metrics = step(state, batch)`, and the step returned {_returned_text(result)}. "
            "Return a pair: the new state, and the metrics in any pytree."
        )
    return result


def _returned_text(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"


def _types_text(batch: Any) -> str:
    """For example "['x'] float32[8, 16]"."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return ", ".join(
        f"{jax.tree_util.keystr(path)} {getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', ()))}"
        for path, leaf in leaves
    )


class _Reports:
    """Reports steps in order, each after the next one has started, so that devices do not wait for the host."""

    def __init__(self, run: _Run, progress: _Progress) -> None:
        self._run, self._progress = run, progress
        self._waiting: tuple[int, Any, Any] | None = None

    def add(self, n_steps: int, metrics: Any, evaluation: Any) -> None:
        self.give()
        self._waiting = n_steps, metrics, evaluation

    def give(self) -> None:
        if self._waiting is None:
            return
        (n_steps, metrics, evaluation), self._waiting = self._waiting, None
        report = StepReport(n_steps=n_steps, metrics=_on_host(metrics), evaluation=_on_host(evaluation))
        self._progress.last = report
        self._run.report(report)


def _on_host(values: Any) -> Any:
    prefetch(values)

    def fetch(leaf: Any) -> Any:
        array = np.asarray(leaf)
        return array.item() if array.ndim == 0 else array

    return jax.tree.map(fetch, values)


def _restart(run: _Run, progress: _Progress) -> None:
    """Wait for a host up to `wait_for_hosts_s`."""
    start_s = time.monotonic()
    while True:
        try:
            restart()
            break
        except MinialpaError:
            if time.monotonic() - start_s > run.wait_for_hosts_s:
                raise
            time.sleep(_LOOK_EVERY_S)
    progress.note("restarted", time.monotonic() - start_s, f"A new session runs on {_hosts_text()}.")


def _has_more_hosts() -> bool:
    return available_hosts() > current_session().cluster.num_hosts


def _hosts_text() -> str:
    cluster = current_session().cluster
    return f"{cluster.num_hosts} x {cluster.devices_per_host} devices"


def _check_arguments(step: Any, create_state: Any, batches: Any) -> None:
    if not isinstance(step, ParallelizedFunc):
        raise MinialpaError(f"Pass the function that `parallelize` returned as `step`; got a {type(step).__name__}.")
    if not callable(create_state):
        raise MinialpaError(
            "Pass a function without arguments that makes the state as `create_state`; got a "
            f"{type(create_state).__name__}."
        )

    if isinstance(batches, Mapping):
        raise MinialpaError(
            "Pass a function that returns an iterator over batches, or an iterable of batches, as `batches`; got a "
            f"{type(batches).__name__}, which looks like a single batch."
        )
    if isinstance(batches, Iterator) and state_methods(batches) is None:
        raise MinialpaError(
            "`batches` is an iterator, which cannot go back to a checkpoint. Pass a function without arguments that "
            "returns a new one, such as the generator function itself."
        )


def _check_used(given: Mapping[str, tuple[Any, Any]], option: str, value: Any) -> None:
    """Raise MinialpaError for an argument without effect, because `option` is None. given: values and defaults."""
    for name, (found, default) in given.items():
        if value is None and found != default:
            raise MinialpaError(f"`{name}={found!r}` has no effect without `{option}`. Pass `{option}=...`, too.")
