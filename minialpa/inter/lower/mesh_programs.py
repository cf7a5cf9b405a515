"""A program split by its meshes: from the instructions of all meshes, what the workers of each mesh do.

A transfer between meshes becomes a send, where it stands, and a receive in front of its first reader: workers wait for
what they read and for nothing else. What arrives in the meantime is kept by the transport.
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
from minialpa.programs.leaf_blocks import numbered_leaves
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
from minialpa.programs.program import Accumulate, ConstantSlot, Free, Instruction, Program, Run, Transfer, reads
from minialpa.programs.resharding import Resharding
from minialpa.tracing.trace import TracedStep


def split_by_mesh(
    program: Program, types: Mapping[int, ArrayType], *, cluster: ClusterSpec, platform: str
) -> tuple[MeshProgram, ...]:
    """What each mesh of `program` does, with functions exported for `platform` ("cpu" or "cuda").

    types: of buffers that no function reads or writes.
    Raises TraceError for a function that cannot leave this process, as one that calls back into Python.
    """
    functions = _functions_by_mesh(program, platform)
    writer = _Writer(program, _located_buffers(program, types), cluster)
    for instruction in program.instructions:
        writer.add(instruction)
    writer.receive_results()
    return tuple(_mesh_program(program, mesh, functions[mesh], draft) for mesh, draft in enumerate(writer.drafts))


def input_types(program: Program, traced: TracedStep) -> dict[int, ArrayType]:
    """Types of the inputs of the program of a step, whether a function reads them or not."""
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


def _functions_by_mesh(program: Program, platform: str) -> list[list[MeshFunction]]:
    functions: list[list[MeshFunction]] = [[] for _ in program.meshes]
    for function in program.functions:
        shape = program.meshes[function.mesh].logical_shape
        functions[function.mesh].append(export_function(function, shape, platform))
    return functions


# ---- buffers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Location:
    """Where a buffer is.

    Attributes:
        mesh: number of the mesh that holds it.
        spec: its sharding there.
    """

    mesh: int
    spec: PartitionSpec


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The buffers of a program, by their numbers.

    Attributes:
        types: type of each buffer.
        locations: mesh and sharding of each buffer.
    """

    types: Mapping[int, ArrayType]
    locations: Mapping[int, _Location]

    def on(self, mesh: int) -> tuple[dict[int, ArrayType], dict[int, PartitionSpec]]:
        """Types and shardings of the buffers of one mesh."""
        specs = {b: location.spec for b, location in self.locations.items() if location.mesh == mesh}
        return {b: type_ for b, type_ in self.types.items() if b in specs}, specs


def _located_buffers(program: Program, types: Mapping[int, ArrayType]) -> _Buffers:
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
    return _Buffers(_types_of_buffers(program, types), locations)


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

    # An argument may go straight to another mesh, or be a result: then only copies of it, or nothing, is read.
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
    """The program of one mesh, as far as it is written.

    Attributes:
        types: types of its buffers.
        specs: shardings of its buffers.
        instructions: what its workers do, in order.
        transfers: the transfers that it takes part in.
        receives: for each buffer that was sent and has no reader yet, the instructions that receive it.
    """

    types: dict[int, ArrayType]
    specs: dict[int, PartitionSpec]
    instructions: list[MeshInstruction] = field(default_factory=list)
    transfers: dict[int, MeshTransfer] = field(default_factory=dict)
    receives: dict[int, Sequence[MeshInstruction]] = field(default_factory=dict)

    def receive(self, buffers: Sequence[int]) -> None:
        """Let the workers wait for `buffers`, as the next instruction reads them."""
        for buffer in buffers:
            self.instructions.extend(self.receives.pop(buffer, ()))


class _Writer:
    """Writes the instructions of a program into a draft for each mesh."""

    def __init__(self, program: Program, buffers: _Buffers, cluster: ClusterSpec) -> None:
        self.program, self.buffers, self.cluster = program, buffers, cluster
        self.number_on_mesh = _numbers_on_meshes(program)
        self.drafts = [_MeshDraft(*buffers.on(mesh)) for mesh in range(len(program.meshes))]
        self.n_buffers = program.n_buffers
        self.reshardings: dict[tuple[ArrayType, _Location, _Location], Resharding] = {}

    def add(self, instruction: Instruction) -> None:
        match instruction:
            case Run(number, inputs, outputs):
                draft = self.drafts[self.program.functions[number].mesh]
                draft.receive(inputs)
                draft.instructions.append(Run(self.number_on_mesh[number], inputs, outputs))
            case Accumulate(number, totals, values):
                draft = self.drafts[self.program.functions[number].mesh]
                draft.receive(reads(instruction))
                draft.instructions.append(Accumulate(self.number_on_mesh[number], totals, values))
            case Transfer():
                self._transfer(instruction)
            case Free(buffers):
                self._free(buffers)

    def receive_results(self) -> None:
        """Let each mesh wait for the results that it holds at the end."""
        for slot in self.program.outputs:
            for buffer, mesh in zip(slot.buffers, slot.meshes, strict=True):
                self.drafts[mesh].receive((buffer,))

    def _free(self, buffers: Sequence[int]) -> None:
        by_mesh: dict[int, list[int]] = defaultdict(list)
        for buffer in buffers:
            by_mesh[self.buffers.locations[buffer].mesh].append(buffer)

        for mesh, freed in by_mesh.items():
            # A buffer that nobody reads still arrives, and must be taken.
            self.drafts[mesh].receive(freed)
            self.drafts[mesh].instructions.append(Free(tuple(freed)))

    def _transfer(self, transfer: Transfer) -> None:
        source = self.buffers.locations[transfer.source]
        sender, receiver = self.drafts[source.mesh], self.drafts[transfer.mesh]
        sender.receive((transfer.source,))
        if source.mesh == transfer.mesh:
            sender.instructions.append(Relayout(transfer.source, transfer.target, transfer.spec))
            return

        number, array = transfer.target, self.buffers.types[transfer.source]
        resharding = self._resharding(array, source, self.buffers.locations[transfer.target])
        for end in (sender, receiver):
            end.transfers[number] = MeshTransfer(source.mesh, transfer.mesh, array, resharding)
        sender.instructions.append(Send(transfer.source, number))
        receiver.receives[transfer.target] = self._receiving(transfer, array, resharding.landing)

    def _receiving(self, transfer: Transfer, array: ArrayType, landing: PartitionSpec) -> list[MeshInstruction]:
        """What the target mesh does to have a transfer's array, which arrives in the spec `landing`."""
        number = transfer.target
        if landing == transfer.spec:
            return [Receive(transfer.target, number)]

        landed = self.n_buffers
        self.n_buffers += 1
        receiver = self.drafts[transfer.mesh]
        receiver.types[landed], receiver.specs[landed] = array, landing
        return [Receive(landed, number), Relayout(landed, transfer.target, transfer.spec), Free((landed,))]

    def _resharding(self, array: ArrayType, source: _Location, target: _Location) -> Resharding:
        """The resharding of an array; that of equal arrays between the same meshes is planned once."""
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


def _numbers_on_meshes(program: Program) -> list[int]:
    """The number of each function among those of its mesh."""
    counters = [itertools.count() for _ in program.meshes]
    return [next(counters[function.mesh]) for function in program.functions]


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
        constants=tuple(_plain(slot) for slot in program.constants if slot.mesh == mesh),
        outputs=outputs,
        transfers=draft.transfers,
        types=draft.types,
        specs=draft.specs,
        donated_leaves=program.donated_leaves,
    )


def _plain(slot: ConstantSlot) -> ConstantSlot:
    """The constant as a NumPy array; typed keys as the integers that they are made of."""
    value = slot.value
    if hasattr(value, "dtype") and is_extended(value.dtype):
        value = jax.random.key_data(value)
    return dataclasses.replace(slot, value=np.asarray(value))
