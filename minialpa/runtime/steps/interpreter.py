"""The interpreter of both runtimes: walks the instructions of a program over numbered buffers.

The interpreter itself does `Run`, `Accumulate` and `Free`, which mean the same in one process and on a worker. The back
end moves arrays between meshes: `local.DevicePuts` in one process, `exchange.Exchange` on a worker.

When the program is loaded, every instruction becomes an `Action`, a function of the buffers; a step calls one action
after the other. jax runs what they start asynchronously.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minialpa.programs.program import Accumulate, Free, Run, reads, writes
from minialpa.runtime.steps.step_trace import FUNCTIONS, StepTrace

Buffers = dict[int, Any]
"""Arrays by buffer number: those that are live."""

Action = Callable[[Buffers], None]
"""Issues one instruction: reads and fills buffers."""


class Backend(Protocol):
    """The part of a runtime that moves arrays, for the interpreter."""

    def action(self, instruction: Any) -> Action:
        """The action of an instruction that the interpreter does not know."""

    def settle(self, buffers: Sequence[int]) -> None:
        """Wait until no send reads these buffers any more. A function is about to take over their memory."""

    def describe(self, instruction: Any) -> str:
        """The meshes that an instruction of the back end concerns, to follow its type in a message."""

    def note(
        self, trace: StepTrace, instruction: Any, buffers: Buffers, *, name: str, begun_s: float, issued_s: float
    ) -> None:
        """Add the back end's notes on an instruction, of any kind, that was just issued to a trace.

        name: of the instruction. begun_s: when the interpreter came to it. issued_s: when `settle` had ended. Both are
        times of `time.perf_counter`.
        """


@dataclass(frozen=True, slots=True)
class Callee:
    """A function of the program: its mesh, its name for messages, and the positions of the inputs that it donates."""

    mesh: int
    name: str
    donated: tuple[int, ...]


class Interpreter:
    """The instructions of a program, ready to run. One step at a time.

    Attributes:
        instructions: in an order that respects every dependency.
        callees: by function number.
        compiled: by function number; each takes arrays and returns a sequence of arrays.
        position: the present instruction, or the one that raised, for other threads to read. -1 before a step, the
            number of instructions after it.
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
        """compile_flagged: compiles the functions for traced steps, each with the flag of `step_trace.flagged` as its
        last result. Called once, before the first of these steps.
        """
        self.instructions, self.callees, self.compiled = tuple(instructions), tuple(callees), compiled
        self.position = -1
        self._backend = backend
        self._compile_flagged = compile_flagged
        self._flagged: Sequence[Any] = ()
        self._actions = [self._action(instruction, compiled) for instruction in self.instructions]

    def run(self, buffers: Buffers, trace: StepTrace | None = None) -> None:
        """Run a step on the buffers of its inputs and constants; afterwards they hold its results.

        trace: gets notes of the step.
        """
        actions = self._actions if trace is None else self._traced_actions(trace)
        for i, action in enumerate(actions):
            self.position = i
            action(buffers)
        self.position = len(actions)

    def describe(self, i: int) -> str:
        if not 0 <= i < len(self.instructions):
            return "no instruction" if i < 0 else "the end of the step, where results are awaited"
        return f"instruction {i}, {self.name(i)}"

    def name(self, i: int) -> str:
        """The type of instruction `i`, with the function that it calls or the mesh that it sends to."""
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
            # Here and not in the action: a function does not run while the thread waits for a send.
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
