"""Notes of issued instructions go in, a timeline of tasks comes out.

jax returns before devices are done. So a traced step runs each function with an additional result, a flag that is ready
when the others are (`flagged`), and one thread per track waits for the flags.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from minialpa.support.perfetto import Event, interval, thread_name

#: Other tracks show transfers, or the instructions of a worker.
FUNCTIONS = "functions"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTime:
    """A function, instruction or transfer. Tasks on one track of a mesh and host do not overlap.

    Attributes:
        start_s, stop_s: seconds since the first task of the step (`from_start`).
        instruction: number of the instruction that calls the function; None for other tasks.
    """

    mesh: int
    host: int
    track: str
    name: str
    start_s: float
    stop_s: float
    instruction: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """A task, perhaps unfinished.

    Attributes:
        issued_s: the earliest start.
        done: the end, or None if its array was donated before.
        reads, writes: numbers of buffers.
    """

    mesh: int
    track: str
    name: str
    issued_s: float
    done: Future[float | None]
    instruction: int | None = None
    reads: Sequence[int] = ()
    writes: Sequence[int] = ()


class StepTrace:
    """The step begins when this is made."""

    def __init__(self, host: int = 0) -> None:
        self.host = host
        self.begun_s = time.perf_counter()
        self._wall_s = time.time() - self.begun_s
        self._notes: list[_Note] = []
        self._waiters: dict[tuple[int, str], ThreadPoolExecutor] = {}
        self._flag: Any = None

    def watched(self, function: Callable[..., Any]) -> Callable[..., list[Any]]:
        """A flagged function without its flag, which `take_flag` returns after the call."""

        def call(*args: Any) -> list[Any]:
            results: list[Any]
            *results, self._flag = function(*args)
            return results

        return call

    def take_flag(self) -> Any:
        flag, self._flag = self._flag, None
        return flag

    def note_array(
        self,
        mesh: int,
        track: str,
        name: str,
        issued_s: float,
        array: Any,
        instruction: int | None = None,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
    ) -> None:
        """Note a task that ends when `array` is ready; holds the array until then.

        It starts when it has been issued, and the previous note of its track and the notes that wrote `reads` have
        ended.
        """
        key = mesh, track
        if key not in self._waiters:
            self._waiters[key] = ThreadPoolExecutor(1, f"trace-{track}")
        done = self._waiters[key].submit(_ready_s, array)
        note = _Note(
            mesh=mesh,
            track=track,
            name=name,
            issued_s=issued_s,
            done=done,
            instruction=instruction,
            reads=reads,
            writes=writes,
        )
        self._notes.append(note)

    def note(self, mesh: int, track: str, name: str, start_s: float) -> None:
        """A task of this thread, from `start_s` (of `time.perf_counter`) until the present."""
        done = Future[float | None]()
        done.set_result(time.perf_counter())
        self._notes.append(_Note(mesh=mesh, track=track, name=name, issued_s=start_s, done=done))

    def tasks(self) -> list[TaskTime]:
        """In order, after the last has ended. Times are seconds of this host's clock."""
        # When the last task of each track has ended, and when each buffer is ready.
        free: dict[tuple[int, str], float] = defaultdict(float)
        ready: dict[int, float] = {}
        tasks = []

        for note in self._notes:
            key = note.mesh, note.track
            start_s = max([note.issued_s, free[key], *(ready.get(b, 0.0) for b in note.reads)])
            stop_s = max(start_s, note.done.result() or start_s)
            free[key] = stop_s
            ready.update(dict.fromkeys(note.writes, stop_s))

            tasks.append(
                TaskTime(
                    mesh=note.mesh,
                    host=self.host,
                    track=note.track,
                    name=note.name,
                    start_s=start_s + self._wall_s,
                    stop_s=stop_s + self._wall_s,
                    instruction=note.instruction,
                )
            )

        for waiter in self._waiters.values():
            waiter.shutdown()
        return tasks


def flagged(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    return lambda *args: (*function(*args), jnp.bool_(True))


def from_start(tasks: Iterable[TaskTime]) -> tuple[TaskTime, ...]:
    ordered = sorted(tasks, key=lambda task: (task.start_s, task.stop_s))
    first_s = ordered[0].start_s if ordered else 0.0
    return tuple(
        dataclasses.replace(task, start_s=task.start_s - first_s, stop_s=task.stop_s - first_s) for task in ordered
    )


def task_events(tasks: Sequence[TaskTime], first_thread: int = 0) -> list[Event]:
    """Events for Perfetto: a process for each mesh, with a thread for each track of each host, from `first_thread` on.

    Calls of a function are counted from 0: for passes, the micro-batch.
    """
    tracks = sorted({(t.mesh, t.host, t.track) for t in tasks}, key=lambda x: (x[0], x[1], x[2] != FUNCTIONS, x[2]))
    threads = {track: first_thread + number for number, track in enumerate(tracks)}
    events = [
        thread_name(mesh, threads[mesh, host, track], f"measured, host {host}, {track}") for mesh, host, track in tracks
    ]

    calls: Counter[tuple[int, int, str]] = Counter()
    for task in tasks:
        args = {}
        if task.instruction is not None:
            key = task.mesh, task.host, task.name
            args = {"instruction": task.instruction, "call": calls[key]}
            calls[key] += 1
        thread = threads[task.mesh, task.host, task.track]
        events.append(
            interval(
                task.mesh,
                thread,
                task.name,
                start_s=task.start_s,
                end_s=task.stop_s,
                category=task.track,
                args=args,
            )
        )
    return events


def _ready_s(array: Any) -> float | None:
    """None if the array was donated before."""
    try:
        array.block_until_ready()
    except RuntimeError:
        if array.is_deleted():
            return None
        raise
    return time.perf_counter()
