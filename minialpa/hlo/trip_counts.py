"""How often a loop of a compiled program runs, where XLA does not say so itself.

A loop counts if its condition compares an integer of its state with a bound, and its body adds a constant to it:
    n_trips = ceil((bound - start) / step)     for `i < bound`; the other comparisons are led back to this one
Start, step and bound are read by following the instructions that make them, through fusions as well. What is not an
integer constant, an element of the state or a sum of these is unknown, and then so is the number of trips.

Example: `while (i < 19) i += 4` from i = 3 runs with i = 3, 7, 11 and 15: ceil((19 - 3) / 4) = 4 trips.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from minialpa.hlo.text import Computation, Instruction, Module

#: Shapes of integers, truth values and tuples.
_COUNTS = re.compile(r"[su]\d+\[\]|pred\[\]|\(")
#: Instructions that pass their operand on.
_PASSES = ("bitcast", "copy")
#: The comparison that says the same with its sides exchanged.
_EXCHANGED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, slots=True)
class _Element:
    """Element `index` of the state at the beginning of an iteration, plus `offset`."""

    index: int
    offset: int


@dataclass(frozen=True, slots=True)
class _State:
    """The state at the beginning of an iteration."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    """`left` compared with `right`; the direction is one of LT, LE, GT, GE, EQ and NE."""

    direction: str
    left: _Value
    right: _Value


#: What an instruction makes: an integer, an element of the state, the state, a comparison, a tuple; None is unknown.
_Value = int | _Element | _State | _Comparison | tuple["_Value", ...] | None


def trip_count(loop: Instruction, around: Computation, module: Module) -> int | None:
    """How often the `while` instruction `loop` of the computation `around` runs its body; None if that is unknown."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])

    (condition,), (body,) = loop.called("condition"), loop.called("body")
    test = _result(module.computations[condition], [_State()], module)
    after = _result(module.computations[body], [_State()], module)
    before = _Reader(around, [], module).value(loop.operands[0])
    if not isinstance(test, _Comparison) or not isinstance(after, tuple) or not isinstance(before, tuple):
        return None

    left, right = (_at_start(side, before, after) for side in (test.left, test.right))
    if left is None or right is None:
        return None
    if left.step and not right.step:
        return _n_trips(test.direction, left.start, left.step, right.start)
    if right.step and not left.step:
        return _n_trips(_EXCHANGED.get(test.direction, ""), right.start, right.step, left.start)
    return None


@dataclass(frozen=True, slots=True)
class _Progress:
    """A number that is `start` in the first test of a loop and grows by `step` in each iteration."""

    start: int
    step: int


def _at_start(side: _Value, before: tuple[_Value, ...], after: tuple[_Value, ...]) -> _Progress | None:
    """How one side of a comparison goes on, from the states `before` the loop and `after` an iteration."""
    if isinstance(side, int):
        return _Progress(side, 0)
    if not isinstance(side, _Element):
        return None

    start, stepped = before[side.index], after[side.index]
    if isinstance(start, int) and isinstance(stepped, _Element) and stepped.index == side.index:
        return _Progress(start + side.offset, stepped.offset)
    return None


def _n_trips(direction: str, start: int, step: int, bound: int) -> int | None:
    """How often `start`, `start + step`, ... passes the test against `bound` before it first fails."""
    if direction in ("GT", "GE"):
        start, step, bound = -start, -step, -bound
    match direction:
        case "LT" | "GT":
            distance = bound - start
        case "LE" | "GE":
            distance = bound - start + 1
        case "NE":
            distance, step = (bound - start) * (1 if step > 0 else -1), abs(step)
            if distance < 0 or distance % step:
                return None
        case _:
            return None

    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def _result(computation: Computation, arguments: Sequence[_Value], module: Module) -> _Value:
    return _Reader(computation, arguments, module).value(computation.root)


class _Reader:
    """Follows the instructions of one computation that is called with `arguments`; without them, they are unknown.

    A class because it remembers what it has followed: programs are no trees.
    """

    def __init__(self, computation: Computation, arguments: Sequence[_Value], module: Module) -> None:
        self.arguments, self.module = arguments, module
        self._instructions = {i.name: i for i in computation.instructions}
        self._known: dict[str, _Value] = {}

    def value(self, name: str) -> _Value:
        """What the instruction `name` makes."""
        if name not in self._known:
            self._known[name] = self._value_of(self._instructions[name])
        return self._known[name]

    def _value_of(self, instruction: Instruction) -> _Value:
        # Arrays and floating point numbers do not count iterations, and their chains may be long.
        if not _COUNTS.match(instruction.shape):
            return None

        operands = instruction.operands
        match instruction.opcode:
            case "constant":
                return int(operands[0]) if re.fullmatch(r"-?\d+", operands[0]) else None
            case "parameter":
                number = int(operands[0])
                return self.arguments[number] if number < len(self.arguments) else None
            case "tuple":
                return tuple(map(self.value, operands))
            case "get-tuple-element":
                return self._element(instruction)
            case "add" | "subtract":
                return _sum(self.value(operands[0]), self.value(operands[1]), instruction.opcode)
            case "compare":
                return self._comparison(instruction)
            case "fusion" | "call":
                (called,) = instruction.called("calls", "to_apply")
                return _result(self.module.computations[called], [*map(self.value, operands)], self.module)
            case opcode:
                return self.value(operands[0]) if opcode in _PASSES else None

    def _element(self, instruction: Instruction) -> _Value:
        found = re.search(r"index=(\d+)", instruction.attributes)
        assert found is not None, instruction
        index, source = int(found[1]), self.value(instruction.operands[0])
        if isinstance(source, _State):
            return _Element(index, 0)
        return source[index] if isinstance(source, tuple) else None

    def _comparison(self, instruction: Instruction) -> _Value:
        found = re.search(r"direction=(\w\w)", instruction.attributes)
        assert found is not None, instruction
        left, right = map(self.value, instruction.operands)
        return _Comparison(found[1], left, right)


def _sum(left: _Value, right: _Value, opcode: str) -> _Value:
    """`left + right`, or `left - right` if `opcode` is `subtract`."""
    if isinstance(left, int) and isinstance(right, _Element) and opcode == "add":
        left, right = right, left
    if not isinstance(right, int):
        return None

    change = right if opcode == "add" else -right
    if isinstance(left, _Element):
        return _Element(left.index, left.offset + change)
    return left + change if isinstance(left, int) else None
