"""Programs: what a plan does, as a static list of instructions over numbered buffers.

A program knows meshes by number and nothing of why. Its functions are pure jax functions with specs for their inputs
and outputs; a runtime compiles them for real devices. Instructions of all meshes stand in one order that respects every
dependency, so a single reader can issue them one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from minialpa.errors import VerifyError


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Devices `first_device`, ... of the cluster, in row-major order of the logical shape."""

    first_device: int
    logical_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function that runs on one mesh. `donated` lists inputs whose buffers its outputs may take over."""

    name: str
    mesh: int
    fun: Callable[..., Any]
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_specs: tuple[PartitionSpec, ...]
    donated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """outputs = functions[function](*inputs)."""

    function: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Accumulate:
    """totals = functions[function](*totals, *values), in place."""

    function: int
    totals: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """target = source, laid out on `mesh` by `spec`."""

    source: int
    target: int
    mesh: int
    spec: PartitionSpec


@dataclass(frozen=True, slots=True)
class Free:
    """These buffers are not read again."""

    buffers: tuple[int, ...]


Instruction = Run | Accumulate | Transfer | Free


@dataclass(frozen=True, slots=True)
class InputSlot:
    """A buffer that a call fills: argument `leaf`, or `rows` (start, stop, dimension) of it, laid out on a mesh.

    is_block: the leaf lives in blocks of rows, of which this is one, between calls too. Other rows are those of a
    micro-batch.
    """

    buffer: int
    leaf: int
    rows: tuple[int, int, int] | None
    mesh: int
    spec: PartitionSpec
    is_block: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ConstantSlot:
    """A buffer that holds `value` from the start, for every call."""

    buffer: int
    value: Any
    mesh: int
    spec: PartitionSpec


@dataclass(frozen=True, slots=True)
class OutputSlot:
    """A result: the buffers that hold it, one for each mesh, each laid out as the plan says.

    rows: empty where each buffer holds all of it; else the rows (start, stop) of dimension 0 in each buffer. Together
    they are the whole result.
    """

    buffers: tuple[int, ...]
    meshes: tuple[int, ...]
    rows: tuple[tuple[int, int], ...] = ()

    @property
    def blocks(self) -> tuple[tuple[int, int] | None, ...]:
        """The rows of each block, in order; only None for a result that is in no blocks."""
        return tuple(sorted(set(self.rows))) or (None,)

    @property
    def block_of_buffer(self) -> tuple[int, ...]:
        """Which of the blocks each buffer holds."""
        return tuple(self.blocks.index(rows) for rows in self.rows or (None,) * len(self.buffers))


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Instructions with their functions, inputs and outputs. A call uses up the argument leaves `donated_leaves`."""

    meshes: tuple[MeshShape, ...]
    functions: tuple[Function, ...]
    inputs: tuple[InputSlot, ...]
    constants: tuple[ConstantSlot, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[OutputSlot, ...]
    donated_leaves: frozenset[int]
    n_buffers: int


def reads(instruction: Instruction) -> tuple[int, ...]:
    match instruction:
        case Run():
            return instruction.inputs
        case Accumulate():
            return (*instruction.totals, *instruction.values)
        case Transfer():
            return (instruction.source,)
        case Free():
            return ()


def writes(instruction: Instruction) -> tuple[int, ...]:
    match instruction:
        case Run():
            return instruction.outputs
        case Accumulate():
            return instruction.totals
        case Transfer():
            return (instruction.target,)
        case Free():
            return ()


def verify_program(program: Program) -> None:
    """Raise VerifyError unless

    * every buffer is written before it is read, and not read after it was freed or donated;
    * every buffer is freed at most once, and only after it was written;
    * every result is in a live buffer at the end, and the blocks of one that is in blocks are all of its rows;
    * the number of inputs and outputs of every run is that of its function.
    """
    live = {slot.buffer for slot in program.inputs} | {slot.buffer for slot in program.constants}
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free):
            gone = [b for b in instruction.buffers if b not in live]
            if gone:
                raise VerifyError(f"Instruction {i} frees buffers {gone}, which hold nothing.")
            live.difference_update(instruction.buffers)
            continue
        missing = [b for b in reads(instruction) if b not in live]
        if missing:
            raise VerifyError(f"Instruction {i} ({instruction}) reads buffers {missing}, which hold nothing.")
        if isinstance(instruction, Run):
            function = program.functions[instruction.function]
            if len(instruction.inputs) != len(function.in_avals) or len(instruction.outputs) != len(function.out_specs):
                raise VerifyError(f"Instruction {i} calls `{function.name}` with a wrong number of buffers.")
        live.update(writes(instruction))
        _check_donated(program, i, instruction)
    for slot in program.outputs:
        ends = sorted(set(slot.rows))
        if slot.rows and (len(slot.rows) != len(slot.buffers) or not _in_a_row(ends)):
            raise VerifyError(f"Result buffers {slot.buffers} hold the rows {slot.rows}, which make no whole result.")
    lost = [b for slot in program.outputs for b in slot.buffers if b not in live]
    if lost:
        raise VerifyError(f"Result buffers {lost} hold nothing at the end.")


def _in_a_row(ends: list[tuple[int, int]]) -> bool:
    return ends[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(ends))


def _check_donated(program: Program, i: int, instruction: Instruction) -> None:
    """A donated buffer must be freed right after its run."""
    if not isinstance(instruction, Run):
        return
    donated = {instruction.inputs[k] for k in program.functions[instruction.function].donated}
    behind = program.instructions[i + 1] if i + 1 < len(program.instructions) else None
    if donated and not (isinstance(behind, Free) and donated <= set(behind.buffers)):
        raise VerifyError(f"Instruction {i} donates buffers {sorted(donated)}, which are not freed behind it.")
