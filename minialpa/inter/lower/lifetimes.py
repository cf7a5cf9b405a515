"""Lifetimes of buffers: the last use of each buffer, and the functions that may then write over it."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from minialpa.programs.program import Free, Function, InputSlot, Instruction, Run, reads, writes


def last_uses(instructions: Sequence[Instruction], kept: Collection[int]) -> dict[int, list[int]]:
    """For each instruction, by number, the buffers that it uses last. Buffers in `kept` outlive the step."""
    last = {b: i for i, instruction in enumerate(instructions) for b in (*reads(instruction), *writes(instruction))}
    ends: dict[int, list[int]] = defaultdict(list)
    for buffer, i in last.items():
        if buffer not in kept:
            ends[i].append(buffer)
    return ends


def with_frees(instructions: Sequence[Instruction], ends: Mapping[int, Sequence[int]]) -> list[Instruction]:
    """`instructions`, with each buffer freed after its last use. `ends`: see `last_uses`."""
    out: list[Instruction] = []
    for i, instruction in enumerate(instructions):
        out.append(instruction)
        if i in ends:
            out.append(Free(tuple(sorted(ends[i]))))
    return out


def with_donations(
    functions: Sequence[Function],
    instructions: Sequence[Instruction],
    ends: Mapping[int, Sequence[int]],
    *,
    input_slots: Sequence[InputSlot],
    donated_leaves: Collection[int],
) -> list[Function]:
    """`functions`, each with the inputs that it may write over, because every run is their last use.

    ends: see `last_uses`.
    input_slots: the inputs of the step. The caller keeps all leaves but `donated_leaves`.
    """
    is_micro = {s.buffer for s in input_slots if s.rows is not None}
    foreign = {s.buffer for s in input_slots if s.leaf not in donated_leaves} - is_micro
    given = {s.buffer for s in input_slots if s.leaf in donated_leaves}

    # One compiled function serves all of its runs, so an input must end in each of them.
    may: dict[int, set[int]] = {}
    arguments: dict[int, set[int]] = defaultdict(set)
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, Run):
            arguments[instruction.function] |= {k for k, b in enumerate(instruction.inputs) if b in given}
            over = set(ends.get(i, ())) - foreign
            counts = Counter(instruction.inputs)
            mine = {k for k, b in enumerate(instruction.inputs) if b in over and counts[b] == 1}
            may[instruction.function] = may.get(instruction.function, mine) & mine

    out = list(functions)
    for number, positions in may.items():
        # The caller's arrays first: the step frees its own arrays anyway.
        first = sorted(positions, key=lambda k: (k not in arguments[number], k))
        out[number] = dataclasses.replace(out[number], donated=_usable_donations(out[number], first))
    return out


def _usable_donations(function: Function, positions: Sequence[int]) -> tuple[int, ...]:
    """Inputs that can become an output of the same shape, dtype and layout; each output takes one input."""
    free = Counter((o.shape, str(o.dtype), s) for o, s in zip(function.out_avals, function.out_specs, strict=True))
    usable = []
    for k in positions:
        aval = function.in_avals[k]
        key = (aval.shape, str(aval.dtype), function.in_specs[k])
        if free[key] > 0:
            free[key] -= 1
            usable.append(k)
    return tuple(sorted(usable))
