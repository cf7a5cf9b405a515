"""A program: argument leaves in, result leaves out, by a static list of instructions over numbered buffers.

    Run(function=0, inputs=(0, 1), outputs=(2,))       a forward pass on mesh 0
    Transfer(source=2, target=3, mesh=1, spec=...)     its activations to mesh 1
    Run(function=1, inputs=(3, 4), outputs=(5,))       a pass on mesh 1

One list has the instructions of all meshes in an order that respects every dependency, so one thread can issue them. If
a stage ends inside a scan over layers, `LeafBlocks` cuts each stacked leaf into blocks of rows. A program numbers each
block as a leaf, and `runtime/runner.py` splits arguments and joins results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from minialpa.errors import VerifyError

#: (start, stop) along dimension 0 of each block of a leaf, in order.
BlockRows = tuple[tuple[int, int], ...]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Consecutive devices of the cluster, from `first_device` on, in row-major order of the logical shape."""

    first_device: int
    logical_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Function:
    """A pure jax function on one mesh, which a runtime compiles.

    Attributes:
        name: for messages and timelines.
        fun: takes all inputs and returns a sequence of outputs.
        in_avals, out_avals: global shape, dtype and memory, as stored (`Spec.stored_shape`).
        donated: positions of the inputs whose buffers the outputs may reuse.
        compiler_options: (name, value) of XLA options.
    """

    name: str
    mesh: int
    fun: Callable[..., Any]
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_specs: tuple[PartitionSpec, ...]
    donated: tuple[int, ...] = ()
    compiler_options: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """outputs = functions[function](*inputs)."""

    function: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Accumulate:
    """accumulators = functions[function](*accumulators, *values), in place."""

    function: int
    accumulators: tuple[int, ...]
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
    """Releases buffers, which no later instruction reads."""

    buffers: tuple[int, ...]


Instruction = Run | Accumulate | Transfer | Free


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSlot:
    """A buffer that each call fills with an argument leaf, or with the rows of one micro-batch.

    Attributes:
        leaf: number of the leaf in the program; each block of `Program.blocks` counts as a leaf.
        rows: (start, stop, dimension) of a micro-batch; `None` for the whole leaf.
        in_host: whether it is in host memory.
    """

    buffer: int
    leaf: int
    rows: tuple[int, int, int] | None
    mesh: int
    spec: PartitionSpec
    in_host: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ConstantSlot:
    """A buffer with the same `value` in every call."""

    buffer: int
    value: Any
    mesh: int
    spec: PartitionSpec


@dataclass(frozen=True, slots=True)
class OutputSlot:
    """One result at the end of a call: each of `buffers`, on the mesh at the same index, holds all of it."""

    buffers: tuple[int, ...]
    meshes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeafBlocks:
    """The blocks of rows of the caller's leaves, for example ((0, 4), (4, 6)) for 6 rows in 2 blocks.

    Raises VerifyError unless the blocks of a leaf are all its rows, in order, without gaps or overlaps.

    Attributes:
        arguments: for each argument leaf, its blocks; `None` for a whole leaf. Empty if all leaves are whole.
        results: the same for result leaves.
    """

    arguments: tuple[BlockRows | None, ...] = ()
    results: tuple[BlockRows | None, ...] = ()

    def __post_init__(self) -> None:
        for kind, leaves in (("Argument", self.arguments), ("Result", self.results)):
            for number, blocks in enumerate(leaves):
                if blocks is not None and not _are_a_whole_leaf(blocks):
                    raise VerifyError(
                        f"{kind} leaf {number} is cut into the rows {blocks}, which are not all its rows in order. "
                        "This is a bug in minialpa: report it with this message."
                    )

    def __bool__(self) -> bool:
        return bool(self.arguments or self.results)


def _are_a_whole_leaf(blocks: BlockRows) -> bool:
    stops = [0, *(stop for _, stop in blocks)]
    return len(blocks) > 1 and all(start == before < stop for before, (start, stop) in zip(stops, blocks, strict=False))


def numbered_leaves(
    leaves: Sequence[T], blocks: Sequence[BlockRows | None]
) -> Iterator[tuple[T, tuple[int, int] | None]]:
    """For each leaf of a program, in order: the caller's leaf, and the rows of the block; `None` for all rows."""
    for leaf, of_leaf in zip(leaves, blocks or (None,) * len(leaves), strict=True):
        for rows in of_leaf or (None,):
            yield leaf, rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Program:
    """One call of a planned step.

    Attributes:
        inputs, constants: buffers that are full when the call begins.
        instructions: in an order that respects every dependency.
        outputs: one slot for each result leaf, in order.
        donated_leaves: numbers of the argument leaves that a call invalidates.
        n_buffers: buffers have the numbers 0 to n_buffers - 1.
        blocks: the cut leaves of the step. The fields above count each block as a leaf.
    """

    meshes: tuple[MeshShape, ...]
    functions: tuple[Function, ...]
    inputs: tuple[InputSlot, ...]
    constants: tuple[ConstantSlot, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[OutputSlot, ...]
    donated_leaves: frozenset[int]
    n_buffers: int
    blocks: LeafBlocks = field(default_factory=LeafBlocks)


def reads(instruction: Instruction) -> tuple[int, ...]:
    """Buffers that the instruction reads."""
    match instruction:
        case Run():
            return instruction.inputs
        case Accumulate():
            return (*instruction.accumulators, *instruction.values)
        case Transfer():
            return (instruction.source,)
        case Free():
            return ()


def writes(instruction: Instruction) -> tuple[int, ...]:
    """Buffers that the instruction writes."""
    match instruction:
        case Run():
            return instruction.outputs
        case Accumulate():
            return instruction.accumulators
        case Transfer():
            return (instruction.target,)
        case Free():
            return ()


def verify_program(program: Program) -> None:
    """Raise VerifyError unless

    * each buffer is written before it is read or freed, and neither read nor freed after it is freed;
    * a buffer that a run donates is freed by the next instruction;
    * each result is in a live buffer at the end;
    * each run and accumulation has as many inputs and outputs as its function.
    """
    live = {slot.buffer for slot in program.inputs} | {slot.buffer for slot in program.constants}
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free):
            _check_freed(i, instruction, live)
            live.difference_update(instruction.buffers)
            continue

        _check_read(i, instruction, live)
        live.update(writes(instruction))
        if isinstance(instruction, Run | Accumulate):
            _check_call(program, i, instruction)
        if isinstance(instruction, Run):
            _check_donated(program, i, instruction)

    lost = [buffer for slot in program.outputs for buffer in slot.buffers if buffer not in live]
    if lost:
        raise VerifyError(
            f"The program of the step ends with the empty result buffers {lost}. This is a bug in minialpa: report it "
            "with this message."
        )


def _check_freed(i: int, instruction: Free, live: set[int]) -> None:
    gone = [buffer for buffer in instruction.buffers if buffer not in live]
    if gone:
        raise VerifyError(
            f"Instruction {i} of the step frees the buffers {gone}, which are empty. This is a bug in minialpa: report "
            "it with this message."
        )
    if len(set(instruction.buffers)) < len(instruction.buffers):
        raise VerifyError(
            f"Instruction {i} of the step frees the buffers {list(instruction.buffers)}, some of them twice. This is a "
            "bug in minialpa: report it with this message."
        )


def _check_read(i: int, instruction: Instruction, live: set[int]) -> None:
    missing = [buffer for buffer in reads(instruction) if buffer not in live]
    if missing:
        raise VerifyError(
            f"Instruction {i} of the step ({instruction}) reads the buffers {missing}, which are empty. This is a bug "
            "in minialpa: report it with this message."
        )


def _check_call(program: Program, i: int, call: Run | Accumulate) -> None:
    function = program.functions[call.function]
    if len(reads(call)) != len(function.in_avals) or len(writes(call)) != len(function.out_specs):
        raise VerifyError(
            f"Instruction {i} of the step calls `{function.name}` with {len(reads(call))} operands and "
            f"{len(writes(call))} results in place of {len(function.in_avals)} and {len(function.out_specs)}. This is "
            "a bug in minialpa: report it with this message."
        )


def _check_donated(program: Program, i: int, run: Run) -> None:
    donated = {run.inputs[k] for k in program.functions[run.function].donated}
    following = program.instructions[i + 1] if i + 1 < len(program.instructions) else None
    if donated and not (isinstance(following, Free) and donated <= set(following.buffers)):
        raise VerifyError(
            f"Instruction {i} of the step donates the buffers {sorted(donated)}, which the next instruction does not "
            "free. This is a bug in minialpa: report it with this message."
        )
