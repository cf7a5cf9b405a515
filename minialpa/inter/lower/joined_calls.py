"""Calls of a program, joined: its functions and instructions in, and one function in the place of many out, where that
compiles sooner.

A step on one mesh whose examples need totals between its layers is dozens of small functions, and XLA takes as long for
each as for some `_EQUATIONS_OF_A_FUNCTION` equations, whatever it computes. With e(f) the equations of function f,

    apart      sum over functions f of (_EQUATIONS_OF_A_FUNCTION + e(f))
    joined     _EQUATIONS_OF_A_FUNCTION + sum over calls of f of e(f)

so that loops are joined if few micro-batches compute little. XLA orders what is in one function as it likes, and may
need as much memory as if nothing was freed, so that only small steps are joined.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from minialpa.programs.program import Accumulate, Function, Instruction, Run, reads, writes

#: Equations that XLA compiles in the time that it takes for a function by itself: 70 ms and 3 ms each, on CPUs.
_EQUATIONS_OF_A_FUNCTION = 20


def joined_calls(
    functions: Sequence[Function],
    instructions: Sequence[Instruction],
    kept: Collection[int],
    n_equations: Sequence[int],
) -> tuple[list[Function], list[Instruction]]:
    """The program of one mesh with the calls that it begins with as one, or as it is where that takes longer.

    kept: buffers that are read when all instructions have run. n_equations: of each function.
    """
    calls: list[Run | Accumulate] = []
    for instruction in instructions:
        if not isinstance(instruction, Run | Accumulate):
            break
        calls.append(instruction)
    rest, called = instructions[len(calls) :], [call.function for call in calls]
    alone = set(called)
    apart = sum(_EQUATIONS_OF_A_FUNCTION + n_equations[f] for f in alone)
    if apart <= _EQUATIONS_OF_A_FUNCTION + sum(n_equations[f] for f in called):
        return list(functions), list(instructions)

    function, run = _joined(functions, calls, later=set(kept).union(*map(reads, rest)))
    # Calls behind a transfer stay, and their functions get other numbers.
    others = sorted({x.function for x in rest if isinstance(x, Run | Accumulate)})
    number = {old: new for new, old in enumerate(others, 1)}
    return [function, *(functions[i] for i in others)], [run, *(_renumbered(x, number) for x in rest)]


def _renumbered(instruction: Instruction, number: Mapping[int, int]) -> Instruction:
    match instruction:
        case Run(function, inputs, outputs):
            return Run(number[function], inputs, outputs)
        case Accumulate(function, totals, values):
            return Accumulate(number[function], totals, values)
    return instruction


def _joined(
    functions: Sequence[Function], calls: Sequence[Run | Accumulate], later: Collection[int]
) -> tuple[Function, Run]:
    """One function of what the calls read and do not make, which returns what is read `later`."""
    types: dict[int, tuple[Any, Any]] = {}  # aval and spec of each buffer
    made: dict[int, None] = {}
    given: dict[int, None] = {}
    for call in calls:
        function = functions[call.function]
        given.update((b, None) for b in reads(call) if b not in made)
        made.update((b, None) for b in writes(call))
        types.update(zip(reads(call), zip(function.in_avals, function.in_specs, strict=True), strict=True))
        types.update(zip(writes(call), zip(function.out_avals, function.out_specs, strict=True), strict=True))
    inputs, outputs = tuple(given), tuple(b for b in made if b in later)

    def fun(*args: Any) -> tuple[Any, ...]:
        values = dict(zip(inputs, args, strict=True))
        for call in calls:
            results = functions[call.function].fun(*(values[b] for b in reads(call)))
            values.update(zip(writes(call), results, strict=True))
        return tuple(values[b] for b in outputs)

    first = functions[calls[0].function]
    function = Function(
        name=f"step{first.mesh}",
        mesh=first.mesh,
        fun=fun,
        in_avals=tuple(types[b][0] for b in inputs),
        in_specs=tuple(types[b][1] for b in inputs),
        out_avals=tuple(types[b][0] for b in outputs),
        out_specs=tuple(types[b][1] for b in outputs),
    )
    return function, Run(0, inputs, outputs)
