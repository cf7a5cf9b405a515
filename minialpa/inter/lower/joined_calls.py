"""Joined calls: one function in place of all functions of a small step on one mesh, if it compiles sooner.

A step with several loops over micro-batches is dozens of small functions, and each costs XLA as much time as some
`_EQUATIONS_OF_A_FUNCTION` equations. With e(f) the equations of function f,

    apart      sum over functions f of (_EQUATIONS_OF_A_FUNCTION + e(f))
    joined     _EQUATIONS_OF_A_FUNCTION + sum over calls of f of e(f)

A step of two layers and 20 functions compiles in 1.8 s instead of 3.4 s, and a call takes 0.4 ms instead of 2.3 ms. XLA
orders one function freely and may keep all of its values in memory, so only small steps are joined.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from minialpa.programs.program import Accumulate, Function, Instruction, Run, reads, writes

#: XLA compiles so many equations in the time of a function: 70 ms, and 3 ms for each equation, on CPUs.
_EQUATIONS_OF_A_FUNCTION = 20


def joined_calls(
    functions: Sequence[Function],
    instructions: Sequence[Instruction],
    kept: Collection[int],
    n_equations: Mapping[int, int],
) -> tuple[Sequence[Function], Sequence[Instruction]]:
    """The program of one mesh as one call; unchanged if that compiles later, or if the program has a transfer.

    kept: buffers that are read after all instructions. n_equations: of functions, by number; others have one for each
    result.
    """
    calls = [instruction for instruction in instructions if isinstance(instruction, Run | Accumulate)]
    sizes = [n_equations.get(number, len(function.out_avals)) for number, function in enumerate(functions)]
    called = [call.function for call in calls]
    apart = sum(_EQUATIONS_OF_A_FUNCTION + sizes[f] for f in set(called))
    together = _EQUATIONS_OF_A_FUNCTION + sum(sizes[f] for f in called)
    if len(calls) < len(instructions) or apart <= together:
        return functions, instructions

    function, run = _joined(functions, calls, kept)
    return [function], [run]


def _joined(
    functions: Sequence[Function], calls: Sequence[Run | Accumulate], kept: Collection[int]
) -> tuple[Function, Run]:
    """One function from the buffers that the calls do not make to the buffers that are `kept`."""
    types: dict[int, tuple[Any, Any]] = {}  # aval and spec of each buffer
    made: dict[int, None] = {}
    given: dict[int, None] = {}
    for call in calls:
        function = functions[call.function]
        given.update((b, None) for b in reads(call) if b not in made)
        made.update((b, None) for b in writes(call))
        types.update(zip(reads(call), zip(function.in_avals, function.in_specs, strict=True), strict=True))
        types.update(zip(writes(call), zip(function.out_avals, function.out_specs, strict=True), strict=True))
    inputs, outputs = tuple(given), tuple(b for b in made if b in kept)

    def fun(*args: Any) -> tuple[Any, ...]:
        values = dict(zip(inputs, args, strict=True))
        for call in calls:
            results = functions[call.function].fun(*(values[b] for b in reads(call)))
            values.update(zip(writes(call), results, strict=True))
        return tuple(values[b] for b in outputs)

    mesh = functions[calls[0].function].mesh
    function = Function(
        name=f"step{mesh}",
        mesh=mesh,
        fun=fun,
        in_avals=tuple(types[b][0] for b in inputs),
        in_specs=tuple(types[b][1] for b in inputs),
        out_avals=tuple(types[b][0] for b in outputs),
        out_specs=tuple(types[b][1] for b in outputs),
    )
    return function, Run(0, inputs, outputs)
