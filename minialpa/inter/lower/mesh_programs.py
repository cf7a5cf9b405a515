"""A program split by its meshes: instructions of all meshes in, what the workers of each mesh do out.

A transfer becomes a send, where it stands, and a receive in front of its first reader: workers wait for what they read
and for nothing else. What arrives in the meantime is kept by the transport.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from minialpa.cluster import ClusterSpec
from minialpa.errors import TraceError
from minialpa.inter.lower.cross_mesh import plan_resharding
from minialpa.programs.leaf_blocks import numbered_leaves
from minialpa.programs.mesh_program import (
    KEY_SHAPES,
    STAND_INS,
    ArrayType,
    MeshFunction,
    MeshInstruction,
    MeshProgram,
    MeshTransfer,
    Receive,
    Relayout,
    Send,
)
from minialpa.programs.program import Accumulate, ConstantSlot, Free, Function, Program, Run, Transfer, reads
from minialpa.sharding import abstract_mesh
from minialpa.tracing.jaxprs import aval_of, is_extended, is_weak
from minialpa.tracing.trace import TracedStep


def split_by_mesh(
    program: Program, types: Mapping[int, ArrayType], *, cluster: ClusterSpec, platform: str
) -> tuple[MeshProgram, ...]:
    """What each mesh of `program` does, with functions exported for `platform` ("cpu" or "cuda").

    types: of buffers that no function reads or writes.
    Raises TraceError for a function that cannot leave this process, as one that calls back into Python.
    """
    return _Splitter(program, types, cluster, platform).run()


def array_type(aval: Any) -> ArrayType:
    """Shape and dtype of an array or aval."""
    if not is_extended(aval.dtype):
        return ArrayType(tuple(aval.shape), str(np.dtype(aval.dtype)), weak_type=is_weak(aval))
    name = str(aval.dtype).removeprefix("key<").removesuffix(">")
    if name not in KEY_SHAPES:
        raise TraceError(
            f"Arrays of {aval.dtype} cannot be sent between processes. Use keys of {', '.join(KEY_SHAPES)}."
        )
    return ArrayType(tuple(aval.shape), "uint32", name)


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


class _Splitter:
    def __init__(self, program: Program, types: Mapping[int, ArrayType], cluster: ClusterSpec, platform: str) -> None:
        self.program, self.cluster, self.platform = program, cluster, platform
        n = len(program.meshes)
        self.home: dict[int, int] = {}
        self.specs: dict[int, PartitionSpec] = {}
        self.types: dict[int, ArrayType] = dict(types)
        self.instructions: list[list[MeshInstruction]] = [[] for _ in range(n)]
        self.awaited: list[dict[int, list[MeshInstruction]]] = [{} for _ in range(n)]
        self.transfers: list[dict[int, MeshTransfer]] = [{} for _ in range(n)]
        self.n_buffers = program.n_buffers
        self.numbers: dict[int, int] = {}
        self.functions: list[list[MeshFunction]] = [[] for _ in range(n)]
        self.plans: dict[tuple[Any, ...], Any] = {}

    def run(self) -> tuple[MeshProgram, ...]:
        for i, function in enumerate(self.program.functions):
            self.numbers[i] = len(self.functions[function.mesh])
            self.functions[function.mesh].append(
                export_function(function, self.program.meshes[function.mesh].logical_shape, self.platform)
            )
        self._find_types()
        for given in self.program.inputs:
            self._place(given.buffer, given.mesh, given.spec)
        for constant in self.program.constants:
            self._place(constant.buffer, constant.mesh, constant.spec)
        for instruction in self.program.instructions:
            self._add(instruction)
        for slot in self.program.outputs:
            for buffer, mesh in zip(slot.buffers, slot.meshes, strict=True):
                self._await(mesh, (buffer,))
        return tuple(self._mesh_program(mesh) for mesh in range(len(self.program.meshes)))

    def _find_types(self) -> None:
        """Types of buffers, from the functions that read and write them and from one buffer to its copies."""
        for slot in self.program.constants:
            self.types[slot.buffer] = array_type(slot.value if hasattr(slot.value, "dtype") else np.asarray(slot.value))
        for instruction in self.program.instructions:
            match instruction:
                case Run(number, inputs, outputs):
                    function = self.program.functions[number]
                    for b, aval in zip((*inputs, *outputs), (*function.in_avals, *function.out_avals), strict=True):
                        self.types.setdefault(b, array_type(aval))
        # An argument may go straight to another mesh, or be a result.
        copies = [i for i in self.program.instructions if isinstance(i, Transfer)]
        for i in copies:
            if i.source in self.types:
                self.types.setdefault(i.target, self.types[i.source])
        for i in reversed(copies):
            if i.target in self.types:
                self.types.setdefault(i.source, self.types[i.target])

    def _place(self, buffer: int, mesh: int, spec: PartitionSpec) -> None:
        self.home[buffer], self.specs[buffer] = mesh, spec

    def _add(self, instruction: Any) -> None:
        match instruction:
            case Run(number, inputs, outputs):
                function = self.program.functions[number]
                self._await(function.mesh, inputs)
                for b, spec in zip(outputs, function.out_specs, strict=True):
                    self._place(b, function.mesh, spec)
                self.instructions[function.mesh].append(Run(self.numbers[number], inputs, outputs))
            case Accumulate(number, totals, values):
                mesh = self.program.functions[number].mesh
                self._await(mesh, reads(instruction))
                self.instructions[mesh].append(Accumulate(self.numbers[number], totals, values))
            case Transfer():
                self._transfer(instruction)
            case Free(buffers):
                by_mesh: dict[int, list[int]] = defaultdict(list)
                for b in buffers:
                    by_mesh[self.home[b]].append(b)
                for mesh, mine in by_mesh.items():
                    # What nobody read still arrives, and must be taken.
                    self._await(mesh, mine)
                    self.instructions[mesh].append(Free(tuple(mine)))

    def _transfer(self, transfer: Transfer) -> None:
        source, mesh = self.home[transfer.source], transfer.mesh
        self._place(transfer.target, mesh, transfer.spec)
        self._await(source, (transfer.source,))
        if source == mesh:
            self.instructions[mesh].append(Relayout(transfer.source, transfer.target, transfer.spec))
            return
        number = transfer.target
        type_ = self.types[transfer.source]
        resharding = self._resharding(type_, source, self.specs[transfer.source], mesh, transfer.spec)
        for end in (source, mesh):
            self.transfers[end][number] = MeshTransfer(source, mesh, type_, resharding)
        self.instructions[source].append(Send(transfer.source, number))
        if resharding.landing == transfer.spec:
            self.awaited[mesh][transfer.target] = [Receive(transfer.target, number)]
            return
        landed = self._new(type_)
        self._place(landed, mesh, resharding.landing)
        self.awaited[mesh][transfer.target] = [
            Receive(landed, number), Relayout(landed, transfer.target, transfer.spec), Free((landed,)),
        ]  # fmt: skip

    def _resharding(
        self, type_: ArrayType, source: int, source_spec: PartitionSpec, target: int, target_spec: PartitionSpec
    ) -> Any:
        """The resharding of equal arrays between the same meshes is planned once."""
        key = (type_, source, source_spec, target, target_spec)
        if key not in self.plans:
            meshes = self.program.meshes
            self.plans[key] = plan_resharding(
                type_.data_shape, np.dtype(type_.dtype).itemsize, meshes[source], source_spec,
                meshes[target], target_spec, self.cluster,
            )  # fmt: skip
        return self.plans[key]

    def _await(self, mesh: int, buffers: Sequence[int]) -> None:
        for b in buffers:
            self.instructions[mesh].extend(self.awaited[mesh].pop(b, ()))

    def _new(self, type_: ArrayType) -> int:
        self.n_buffers += 1
        self.types[self.n_buffers - 1] = type_
        return self.n_buffers - 1

    def _mesh_program(self, mesh: int) -> MeshProgram:
        outputs = tuple(
            (number, buffer)
            for number, slot in enumerate(self.program.outputs)
            for buffer, home in zip(slot.buffers, slot.meshes, strict=True)
            if home == mesh
        )
        mine = tuple(slot for slot in self.program.inputs if slot.mesh == mesh)
        return MeshProgram(
            mesh=mesh,
            shape=self.program.meshes[mesh],
            functions=tuple(self.functions[mesh]),
            instructions=tuple(self.instructions[mesh]),
            inputs=mine,
            constants=tuple(_plain(slot) for slot in self.program.constants if slot.mesh == mesh),
            outputs=outputs,
            transfers=self.transfers[mesh],
            types={b: t for b, t in self.types.items() if self.home.get(b) == mesh},
            specs={b: spec for b, spec in self.specs.items() if self.home[b] == mesh},
            donated_leaves=self.program.donated_leaves,
        )


def _plain(slot: ConstantSlot) -> ConstantSlot:
    """The constant as a NumPy array; typed keys as the integers that they are made of."""
    value = slot.value
    if hasattr(value, "dtype") and is_extended(value.dtype):
        value = jax.random.key_data(value)
    return dataclasses.replace(slot, value=np.asarray(value))


def export_function(function: Function, mesh_shape: tuple[int, ...], platform: str) -> MeshFunction:
    """`function` as bytes that any process with devices of `platform` can compile. Starts no device."""
    mesh = abstract_mesh(mesh_shape)

    def step(*args: Any) -> Any:  # one name for all, so that equal stages are equal bytes
        given = [_as_dtype(x, aval.dtype) for x, aval in zip(args, function.in_avals, strict=True)]
        return tuple(_as_dtype(x, _named_dtype(x.dtype)) for x in function.fun(*given))

    in_avals = [jax.ShapeDtypeStruct(x.shape, _named_dtype(x.dtype), weak_type=x.weak_type) for x in function.in_avals]
    jitted = jax.jit(
        step,
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in function.in_specs),
        out_shardings=tuple(NamedSharding(mesh, spec) for spec in function.out_specs),
        keep_unused=True,
    )
    try:
        with _without_locations():
            exported = jax.export.export(jitted, platforms=(platform,))(*in_avals)
        code = bytes(exported.serialize())
    except KeyError as error:
        raise TraceError(
            f"`{function.name}` has arrays of {error}, which `jax.export` cannot send to workers."
        ) from error
    except (NotImplementedError, ValueError) as error:
        raise TraceError(
            f"`{function.name}` cannot be sent to the workers of a cluster: {error}. Callbacks into Python, such as "
            "`jax.debug.print`, run only in one process; take them out of the step."
        ) from error
    return MeshFunction(
        name=function.name,
        code=code,
        in_types=tuple(map(array_type, function.in_avals)),
        in_specs=function.in_specs,
        out_types=tuple(map(array_type, function.out_avals)),
        out_specs=function.out_specs,
        donated=function.donated,
    )


def _named_dtype(dtype: Any) -> Any:
    """`dtype`, or the one that stands for it where functions leave this process."""
    return np.dtype(STAND_INS[str(dtype)]) if str(dtype) in STAND_INS else dtype


def _as_dtype(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else jax.lax.convert_element_type(x, dtype)


@contextmanager
def _without_locations() -> Iterator[None]:
    """Programs that are lowered in here do not say which lines they are from: equal stages are written at different
    lines, and a step may be called from several."""
    name = "jax_traceback_in_locations_limit"
    before = getattr(jax.config, name)
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)
