"""Runs the instructions of a program on numbered buffers.

    instruction                     buffers after it; before the first, {0: x, 1: w}
    Run(function f, [0, 1], [2])    {0: x, 1: w, 2: y}
    Transfer(2, 3, mesh 1, spec)    {0: x, 1: w, 2: y, 3: y on mesh 1}
    Free([0, 2])                    {1: w, 3: y on mesh 1}

A back end moves arrays between meshes: `local.DevicePuts` in one process, `exchange.Exchange` on a worker. At load,
each instruction becomes an `Action`, which a step calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minialpa.programs.program import Accumulate, Free, Run, reads, writes
from minialpa.runtime.steps.step_trace import FUNCTIONS, StepTrace

Buffers = dict[int, Any]
"""The live arrays, by buffer number."""

Action = Callable[[Buffers], None]
"""Issues one instruction: reads and fills buffers."""


class Backend(Protocol):
    """Moves arrays between meshes."""

    def action(self, instruction: Any) -> Action:
        """For an instruction that the interpreter does not know."""

    def settle(self, buffers: Sequence[int]) -> None:
        """Wait until no send reads these buffers: a function is about to take over their memory."""

    def describe(self, instruction: Any) -> str:
        """The other mesh, for messages: "to stage 1"."""

    def note(
        self, trace: StepTrace, instruction: Any, buffers: Buffers, *, name: str, begun_s: float, issued_s: float
    ) -> None:
        """Add notes on an instruction that was just issued.

        begun_s, issued_s: when the interpreter reached it, and when `settle` had ended, by `time.perf_counter`.
        """


@dataclass(frozen=True, slots=True)
class Callee:
    """`donated` has the positions of donated inputs."""

    mesh: int
    name: str
    donated: tuple[int, ...]


class Interpreter:
    """The instructions of a program, ready to run. One step at a time.

    Attributes:
        instructions: in an order that respects every dependency.
        callees: by function number.
        compiled: by function number; each takes arrays and returns a sequence of arrays.
        position: the present or failed instruction; -1 before a step, the number of instructions after it.
    """

    def __init__(
        self,
        *,
        instructions: Sequence[Any],
        callees: Sequence[Callee],
        compiled: Sequence[Any],
        compile_flagged: Callable[[], Sequence[Any]],
        backend: Backend,
    ) -> None:
        """compile_flagged: compiles the functions for traced steps (`step_trace.flagged`). Called once."""
        self.instructions, self.callees, self.compiled = tuple(instructions), tuple(callees), compiled
        self.position = -1
        self._backend = backend
        self._compile_flagged = compile_flagged
        self._flagged: Sequence[Any] = ()
        self._actions = [self._action(instruction, compiled) for instruction in self.instructions]

    def run(self, buffers: Buffers, trace: StepTrace | None = None) -> None:
        """Run a step: `buffers` hold inputs and constants, afterwards the results."""
        actions = self._actions if trace is None else self._traced_actions(trace)
        for i, action in enumerate(actions):
            self.position = i
            action(buffers)
        self.position = len(actions)

    def describe(self, i: int) -> str:
        if not 0 <= i < len(self.instructions):
            return "no instruction" if i < 0 else "the end of the step, waiting for its results"
        return f"instruction {i}, {self.name(i)}"

    def name(self, i: int) -> str:
        """For example "Run `forward1`" or "Send to stage 1"."""
        instruction = self.instructions[i]
        match instruction:
            case Run(function) | Accumulate(function):
                return f"{type(instruction).__name__} `{self.callees[function].name}`"
            case Free():
                return "Free"
        return f"{type(instruction).__name__} {self._backend.describe(instruction)}"

    def _action(self, instruction: Any, functions: Sequence[Any]) -> Action:
        match instruction:
            case Run(function) | Accumulate(function):
                call = _call(functions[function], reads(instruction), writes(instruction))
                overwritten = self._overwritten(instruction)
                return _after(self._backend.settle, overwritten, call) if overwritten else call
            case Free(freed):
                return _free(freed)
        return self._backend.action(instruction)

    def _overwritten(self, instruction: Any) -> Sequence[int]:
        match instruction:
            case Run(function, inputs):
                return [inputs[k] for k in self.callees[function].donated]
            case Accumulate(_, accumulators):
                return accumulators
        return ()

    # ---- traced steps ---------------------------------------------------------------------------------------------

    def _traced_actions(self, trace: StepTrace) -> list[Action]:
        self._flagged = self._flagged or self._compile_flagged()
        functions = [trace.watched(function) for function in self._flagged]
        return [
            self._traced(i, self._action(instruction, functions), trace)
            for i, instruction in enumerate(self.instructions)
        ]

    def _traced(self, i: int, action: Action, trace: StepTrace) -> Action:
        instruction = self.instructions[i]
        overwritten = self._overwritten(instruction)

        def traced(buffers: Buffers) -> None:
            begun_s = time.perf_counter()
            # Not in the action: a function does not run while the thread waits for a send.
            self._backend.settle(overwritten)
            issued_s = time.perf_counter()
            action(buffers)

            if isinstance(instruction, Run | Accumulate):
                callee = self.callees[instruction.function]
                trace.note_array(
                    callee.mesh,
                    FUNCTIONS,
                    callee.name,
                    issued_s,
                    trace.take_flag(),
                    instruction=i,
                    reads=reads(instruction),
                    writes=writes(instruction),
                )
            self._backend.note(trace, instruction, buffers, name=self.name(i), begun_s=begun_s, issued_s=issued_s)

        return traced


def _call(function: Any, inputs: Sequence[int], outputs: Sequence[int]) -> Action:
    def call(buffers: Buffers) -> None:
        results = function(*[buffers[b] for b in inputs])
        for b, array in zip(outputs, results, strict=True):
            buffers[b] = array

    return call


def _after(settle: Callable[[Sequence[int]], None], overwritten: Sequence[int], call: Action) -> Action:
    def call_after(buffers: Buffers) -> None:
        settle(overwritten)
        call(buffers)

    return call_after


def _free(freed: Sequence[int]) -> Action:
    def free(buffers: Buffers) -> None:
        for b in freed:
            del buffers[b]

    return free
