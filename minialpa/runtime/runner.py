"""Runners: what both runtimes do with a program, in one process or on the workers of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from jax.sharding import Mesh, PartitionSpec

from minialpa.runtime.steps.step_trace import TaskTime


class Runner(Protocol):
    """A program on devices. A call runs a step on argument leaves and returns result leaves, without waiting.

    Leaves are those of the program: each block of rows is one.

    meshes: the devices of each mesh of the program; empty if they are not in this process.
    session: the runtime of the session whose workers have the devices; None if they are in this process.
    traced: note what the step does when, for `timeline`. The first such call compiles every function a second time.
    Threads may call it at the same time: steps have one order. A step that another one has robbed of an argument, by
    donating it, raises a DeletedArrayError and does nothing.
    """

    @property
    def meshes(self) -> Sequence[Mesh]: ...

    @property
    def session(self) -> Any: ...

    def __call__(self, leaves: Sequence[Any], /, *, traced: bool = False) -> list[Any]: ...

    def turn(self) -> AbstractContextManager[None]:
        """While this is open, no step of another thread begins on these devices."""

    def timeline(self) -> tuple[TaskTime, ...]:
        """What the last traced step did when, in order of its start. Waits for the end of the step."""

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Argument leaves laid out as the step wants them. What the step donates never shares memory with `leaves`.

        A leaf of which the step cuts micro-batches becomes a `MicroBatchedArray`, if the step reads all of its rows.
        None in place of a leaf that the caller does not have stays None.
        """

    def homes(self, leaf: Any) -> tuple[tuple[int, PartitionSpec], ...]:
        """The meshes of the program that hold an array, by number, with its sharding on each; empty if none does."""

    def hlo_texts(self) -> list[str]:
        """Compiled HLO of each function of the program."""

    def allocation_sizes(self) -> list[int]:
        """Bytes per device of each function of the program: arguments, results and temporaries."""

    def function_seconds(self, repeats: int = 5) -> list[float]:
        """Seconds of each function of the program by itself: median of `repeats` calls."""

    def descriptions(self) -> Mapping[str, str]:
        """What there is to know of each process that takes part, by a name for it."""

    def sync(self) -> None:
        """Wait until everything that was started has ended."""
