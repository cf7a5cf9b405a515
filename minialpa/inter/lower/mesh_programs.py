"""A program split by its meshes: the instructions of all meshes in, the program of each mesh out.

A transfer between meshes becomes a send in its place, and a receive before its first reader, so workers wait only for
arrays that they read. The transport keeps messages that arrive earlier.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import PartitionSpec

from minialpa.cluster import ClusterSpec
from minialpa.inter.lower.cross_mesh import Crossing, plan_resharding
from minialpa.inter.lower.exported_functions import array_type, export_function
from minialpa.ir.equations import aval_of, is_extended
from minialpa.programs.mesh_program import (
    ArrayType,
    MeshFunction,
    MeshInstruction,
    MeshProgram,
    MeshTransfer,
    Receive,
    Relayout,
    Send,
)
from minialpa.programs.program import (
    Accumulate,
    ConstantSlot,
    Free,
    Instruction,
    Program,
    Run,
    Transfer,
    numbered_leaves,
    reads,
)
from minialpa.programs.resharding import Resharding
from minialpa.tracing.trace import TracedStep


def split_by_mesh(
    program: Program, types: Mapping[int, ArrayType], *, cluster: ClusterSpec, platform: str
) -> tuple[MeshProgram, ...]:
    """The program of each mesh, with functions exported for `platform` ("cpu" or "cuda").

    types: of buffers that no function reads or writes.
    Raises TraceError for a function that cannot leave this process, such as one that calls back into Python.
    """
    functions: list[list[MeshFunction]] = [[] for _ in program.meshes]
    for function in program.functions:
        shape = program.meshes[function.mesh].logical_shape
        functions[function.mesh].append(export_function(function, shape, platform))

    writer = _MeshWriter(program, _types_of_buffers(program, types), cluster)
    for instruction in program.instructions:
        writer.add(instruction)
    writer.receive_results()
    return tuple(_mesh_program(program, mesh, functions[mesh], draft) for mesh, draft in enumerate(writer.drafts))


def input_types(program: Program, traced: TracedStep) -> dict[int, ArrayType]:
    """The type of each buffer; a buffer for one micro-batch has only its rows."""
    leaves = [
        aval if rows is None else aval.update(shape=(rows[1] - rows[0], *aval.shape[1:]))
        for aval, rows in numbered_leaves([aval_of(v) for v in traced.flat.invars], program.blocks.arguments)
    ]
    types = {}
    for slot in program.inputs:
        kind = array_type(leaves[slot.leaf])
        if slot.rows is not None:
            start, stop, dim = slot.rows
            kind = dataclasses.replace(kind, shape=(*kind.shape[:dim], stop - start, *kind.shape[dim + 1 :]))
        types[slot.buffer] = kind
    return types


# ---- buffers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Location:
    """The mesh of a buffer, and its spec there."""

    mesh: int
    spec: PartitionSpec


def _locations(program: Program) -> dict[int, _Location]:
    locations = {slot.buffer: _Location(slot.mesh, slot.spec) for slot in program.inputs}
    locations.update((slot.buffer, _Location(slot.mesh, slot.spec)) for slot in program.constants)
    for instruction in program.instructions:
        match instruction:
            case Run(number, _, outputs):
                function = program.functions[number]
                for buffer, spec in zip(outputs, function.out_specs, strict=True):
                    locations[buffer] = _Location(function.mesh, spec)
            case Transfer(_, target, mesh, spec):
                locations[target] = _Location(mesh, spec)
    return locations


def _types_of_buffers(program: Program, known: Mapping[int, ArrayType]) -> dict[int, ArrayType]:
    """Types from the functions that read and write buffers, and from one buffer to its copies."""
    types = dict(known)
    for slot in program.constants:
        types[slot.buffer] = array_type(slot.value if hasattr(slot.value, "dtype") else np.asarray(slot.value))
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            function = program.functions[instruction.function]
            buffers = (*instruction.inputs, *instruction.outputs)
            for buffer, aval in zip(buffers, (*function.in_avals, *function.out_avals), strict=True):
                types.setdefault(buffer, array_type(aval))

    # Functions may read only copies of an argument, such as one that goes straight to another mesh.
    copies = [instruction for instruction in program.instructions if isinstance(instruction, Transfer)]
    for copy in copies:
        if copy.source in types:
            types.setdefault(copy.target, types[copy.source])
    for copy in reversed(copies):
        if copy.target in types:
            types.setdefault(copy.source, types[copy.target])
    return types


# ---- instructions ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _MeshDraft:
    """The program of one mesh, while it is written.

    Attributes:
        transfers: by number, the transfers from and to this mesh.
        receives: for each buffer that was sent and has no reader yet, the instructions that receive it.
    """

    types: dict[int, ArrayType]
    specs: dict[int, PartitionSpec]
    instructions: list[MeshInstruction] = field(default_factory=list)
    transfers: dict[int, MeshTransfer] = field(default_factory=dict)
    receives: dict[int, Sequence[MeshInstruction]] = field(default_factory=dict)

    def receive(self, buffers: Sequence[int]) -> None:
        """Let the workers wait for `buffers` before the next instruction."""
        for buffer in buffers:
            self.instructions.extend(self.receives.pop(buffer, ()))


class _MeshWriter:
    """Writes the programs of all meshes at the same time, instruction by instruction."""

    def __init__(self, program: Program, types: Mapping[int, ArrayType], cluster: ClusterSpec) -> None:
        self.program, self.types, self.cluster = program, types, cluster
        self.locations = _locations(program)
        self.n_buffers = program.n_buffers
        self.reshardings: dict[tuple[ArrayType, _Location, _Location], Resharding] = {}

        counters = [itertools.count() for _ in program.meshes]
        self.number_on_mesh = [next(counters[function.mesh]) for function in program.functions]
        self.drafts = [_MeshDraft({}, {}) for _ in program.meshes]
        for buffer, location in self.locations.items():
            self._note_location(buffer, types.get(buffer), location)

    def _note_location(self, buffer: int, kind: ArrayType | None, location: _Location) -> None:
        draft = self.drafts[location.mesh]
        draft.specs[buffer] = location.spec
        if kind is not None:
            draft.types[buffer] = kind

    def add(self, instruction: Instruction) -> None:
        """Translate an instruction for the workers of its meshes."""
        match instruction:
            case Run() | Accumulate():
                number = instruction.function
                draft = self.drafts[self.program.functions[number].mesh]
                draft.receive(reads(instruction))
                draft.instructions.append(dataclasses.replace(instruction, function=self.number_on_mesh[number]))
            case Transfer():
                self._transfer(instruction)
            case Free(buffers):
                self._free(buffers)

    def receive_results(self) -> None:
        """Receive results that no instruction reads."""
        for slot in self.program.outputs:
            for buffer, mesh in zip(slot.buffers, slot.meshes, strict=True):
                self.drafts[mesh].receive((buffer,))

    def _free(self, buffers: Sequence[int]) -> None:
        by_mesh: dict[int, list[int]] = defaultdict(list)
        for buffer in buffers:
            by_mesh[self.locations[buffer].mesh].append(buffer)

        for mesh, freed in by_mesh.items():
            # A buffer without a reader still arrives and must be received.
            self.drafts[mesh].receive(freed)
            self.drafts[mesh].instructions.append(Free(tuple(freed)))

    def _transfer(self, transfer: Transfer) -> None:
        """A send and a later receive, or a new layout on one mesh."""
        source = self.locations[transfer.source]
        sender, receiver = self.drafts[source.mesh], self.drafts[transfer.mesh]
        sender.receive((transfer.source,))
        if source.mesh == transfer.mesh:
            sender.instructions.append(Relayout(transfer.source, transfer.target, transfer.spec))
            return

        number, array = transfer.target, self.types[transfer.source]
        resharding = self._resharding(array, source, self.locations[transfer.target])
        for end in (sender, receiver):
            end.transfers[number] = MeshTransfer(source.mesh, transfer.mesh, array, resharding)
        sender.instructions.append(Send(transfer.source, number))
        receiver.receives[transfer.target] = self._receive_instructions(transfer, array, resharding.landing)

    def _receive_instructions(
        self, transfer: Transfer, array: ArrayType, landing: PartitionSpec
    ) -> list[MeshInstruction]:
        """The instructions of the target mesh for a transfer that arrives in the spec `landing`."""
        number = transfer.target
        if landing == transfer.spec:
            return [Receive(transfer.target, number)]

        landed = self.n_buffers
        self.n_buffers += 1
        self._note_location(landed, array, _Location(transfer.mesh, landing))
        return [Receive(landed, number), Relayout(landed, transfer.target, transfer.spec), Free((landed,))]

    def _resharding(self, array: ArrayType, source: _Location, target: _Location) -> Resharding:
        """Equal arrays between the same meshes share one resharding."""
        key = (array, source, target)
        if key not in self.reshardings:
            crossing = Crossing(
                shape=array.data_shape,
                item_bytes=np.dtype(array.dtype).itemsize,
                source=self.program.meshes[source.mesh],
                source_spec=source.spec,
                target=self.program.meshes[target.mesh],
                target_spec=target.spec,
                cluster=self.cluster,
            )
            self.reshardings[key] = plan_resharding(crossing)
        return self.reshardings[key]


def _mesh_program(program: Program, mesh: int, functions: Sequence[MeshFunction], draft: _MeshDraft) -> MeshProgram:
    outputs = tuple(
        (number, buffer)
        for number, slot in enumerate(program.outputs)
        for buffer, home in zip(slot.buffers, slot.meshes, strict=True)
        if home == mesh
    )

    return MeshProgram(
        mesh=mesh,
        shape=program.meshes[mesh],
        functions=tuple(functions),
        instructions=tuple(draft.instructions),
        inputs=tuple(slot for slot in program.inputs if slot.mesh == mesh),
        constants=tuple(_as_numpy(slot) for slot in program.constants if slot.mesh == mesh),
        outputs=outputs,
        transfers=draft.transfers,
        types=draft.types,
        specs=draft.specs,
        donated_leaves=program.donated_leaves,
    )


def _as_numpy(slot: ConstantSlot) -> ConstantSlot:
    """The constant as a NumPy array; typed keys as their integers."""
    value = slot.value
    if hasattr(value, "dtype") and is_extended(value.dtype):
        value = jax.random.key_data(value)
    return dataclasses.replace(slot, value=np.asarray(value))
