"""The interpreter, with functions and a back end that record their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from jax.sharding import PartitionSpec

from minialpa.programs.program import Accumulate, Free, Run, Transfer
from minialpa.runtime.steps.interpreter import Action, Buffers, Callee, Interpreter
from minialpa.runtime.steps.step_trace import FUNCTIONS, StepTrace

CALLEES = [Callee(0, "double", (0,)), Callee(1, "add", ())]


class Notes:
    """A back end that moves values at once, and records its calls."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def action(self, instruction: Any) -> Action:
        def move(buffers: Buffers) -> None:
            self.asked.append("move")
            buffers[instruction.target] = buffers[instruction.source]

        return move

    def settle(self, buffers: Sequence[int]) -> None:
        self.asked.append(("settle", list(buffers)))

    def describe(self, instruction: Any) -> str:
        return f"to stage {instruction.mesh}"

    def note(
        self, trace: StepTrace, instruction: Any, buffers: Buffers, *, name: str, begun_s: float, issued_s: float
    ) -> None:
        assert begun_s <= issued_s
        self.asked.append(("note", name))


def _double(x: int) -> list[int]:
    return [2 * x]


def _add(total: int, x: int) -> list[int]:
    if x < 0:
        raise ValueError("negative")
    return [total + x]


INSTRUCTIONS = (Run(0, (0,), (1,)), Free((0,)), Transfer(1, 2, 1, PartitionSpec()), Accumulate(1, (3,), (2,)))


def _interpreter(backend: Notes) -> Interpreter:
    return Interpreter(
        instructions=INSTRUCTIONS,
        callees=CALLEES,
        compiled=[_double, _add],
        compile_flagged=lambda: [lambda x: [2 * x, _Flag()], lambda total, x: [total + x, _Flag()]],
        backend=backend,
    )


class _Flag:
    def block_until_ready(self) -> None: ...


def test_instructions_read_and_fill_numbered_buffers() -> None:
    backend = Notes()
    buffers: Buffers = {0: 5, 3: 100}
    _interpreter(backend).run(buffers)
    assert buffers == {1: 10, 2: 10, 3: 110}
    # The donated input of the first call, and the sum, are settled before they are donated.
    assert backend.asked == [("settle", [0]), "move", ("settle", [3])]


def test_position_names_the_instruction_that_raised() -> None:
    interpreter = _interpreter(Notes())
    with pytest.raises(ValueError, match="negative"):
        interpreter.run({0: -5, 3: 100})
    assert interpreter.describe(interpreter.position) == "instruction 3, Accumulate `add`"
    assert interpreter.describe(-1) == "no instruction"
    assert interpreter.describe(4) == "the end of the step, waiting for its results"


def test_a_traced_step_computes_the_same_and_notes_every_instruction() -> None:
    backend = Notes()
    trace = StepTrace()
    buffers: Buffers = {0: 5, 3: 100}
    _interpreter(backend).run(buffers, trace)
    assert buffers == {1: 10, 2: 10, 3: 110}
    noted = ["Run `double`", "Free", "Transfer to stage 1", "Accumulate `add`"]
    assert [x[1] for x in backend.asked if x[0] == "note"] == noted
    tasks = trace.tasks()
    assert [(t.mesh, t.track, t.name, t.instruction) for t in tasks] == [
        (0, FUNCTIONS, "double", 0),
        (1, FUNCTIONS, "add", 3),
    ]
