"""The program that creates a training state: a traced function and the step's program in, a `StateProgram` out.

A few functions for each mesh compute the leaves of this mesh where the step reads them, shard by shard. Meshes send
no arrays: each computes the inputs that several leaves share, such as random keys.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jax.extend.core import Var
from jax.sharding import PartitionSpec

from minialpa.cluster import LogicalMesh
from minialpa.errors import ShardingError
from minialpa.inter.layers.offload import moved
from minialpa.inter.lower.instruction_passes import last_uses, with_frees
from minialpa.inter.lower.propagated_specs import propagated_specs
from minialpa.inter.lower.row_equations import RowEquations, RowRange
from minialpa.inter.lower.task_functions import task_function
from minialpa.inter.staging.leaf_placement import memory_kind_of
from minialpa.intra.spmd import ShardedEquations
from minialpa.ir.equations import (
    Atom,
    bytes_of,
    dtype_name,
    is_in_host,
    is_literal,
    live_equations,
    operand_vars,
    shape_of,
)
from minialpa.ir.op import Op
from minialpa.plan import PlacedValue
from minialpa.programs.program import (
    ConstantSlot,
    Function,
    InputSlot,
    Instruction,
    LeafBlocks,
    OutputSlot,
    Program,
    Run,
    numbered_leaves,
    verify_program,
)
from minialpa.sharding import Spec
from minialpa.tracing.trace import TracedStep

#: About the number of calls for the leaves of one mesh. XLA computes all leaves of a call at the same time, and random
#: numbers take several times their size: more calls need less memory, and take longer to compile.
_N_CALLS = 8


@dataclass(frozen=True, slots=True)
class StateProgram:
    """The program, with the meshes and specs of its arguments and results."""

    program: Program
    inputs: tuple[PlacedValue, ...]
    outputs: tuple[PlacedValue, ...]


@dataclass(frozen=True, slots=True)
class _StateBlock:
    """A leaf of the state, or one block of its rows, on the meshes that hold it.

    Attributes:
        leaf: number of the result of the traced function.
        rows: (start, stop); None for all rows.
        places: mesh and spec of each copy.
    """

    leaf: int
    rows: tuple[int, int] | None
    places: tuple[tuple[int, Spec], ...]


def state_program(traced: TracedStep, step: Program, meshes: Sequence[LogicalMesh]) -> StateProgram:
    """The program of `traced`, a function whose results are the first argument leaves of `step`.

    meshes: the logical mesh of each mesh of `step`.
    Raises ShardingError if the step reads rows of the state as a batch.
    """
    traced = _in_memories_of(step, traced)
    blocks = _state_blocks(traced, step)
    writer = _StateWriter(traced, meshes)
    for mesh in range(len(meshes)):
        writer.add_mesh(mesh, blocks)

    program = writer.program(step, blocks)
    verify_program(program)
    return StateProgram(program, _placed_inputs(traced, program), _placed_outputs(traced, blocks))


def _in_memories_of(step: Program, traced: TracedStep) -> TracedStep:
    """The function, with results in host memory where the step reads them there."""
    flat = traced.flat
    in_host = {slot.leaf for slot in step.inputs if slot.in_host}
    outvars, ops = list(flat.outvars), list(flat.ops)
    n_leaves = len(outvars)
    for number, (leaf, _) in enumerate(numbered_leaves(range(n_leaves), step.blocks.arguments[:n_leaves])):
        if number in in_host and not is_in_host(outvars[leaf].aval):
            move, outvars[leaf] = moved(outvars[leaf], jax.memory.Space.Host)
            ops.append(Op(move))
    return replace(traced, flat=replace(flat, ops=tuple(ops), outvars=tuple(outvars)))


def _state_blocks(traced: TracedStep, step: Program) -> list[_StateBlock]:
    """The leaves and blocks of the state, as `step` numbers them."""
    slots: dict[int, list[InputSlot]] = defaultdict(list)
    for slot in step.inputs:
        slots[slot.leaf].append(slot)

    n_leaves = len(traced.flat.outvars)
    blocks = []
    for number, (leaf, rows) in enumerate(numbered_leaves(range(n_leaves), step.blocks.arguments[:n_leaves])):
        if any(slot.rows is not None for slot in slots[number]):
            raise ShardingError(
                f"`{traced.out_paths[leaf]}` is part of the state, but the training step splits it like a batch. "
                "Remove the number of the state, 0, from `batch_argnums` of the training step."
            )
        ndim = len(shape_of(traced.flat.outvars[leaf]))
        places = [(slot.mesh, Spec.of(slot.spec, ndim)) for slot in slots[number]]
        # Mesh 0 keeps a leaf that no stage reads.
        blocks.append(_StateBlock(leaf, rows, tuple(places or [(0, Spec.replicated(ndim))])))
    return blocks


#: A block on one mesh: its number, the block, and its spec there.
_Copy = tuple[int, _StateBlock, Spec]


def _parts_by_size(copies: Sequence[_Copy], leaves: Sequence[Atom]) -> list[list[_Copy]]:
    """About `_N_CALLS` parts of nearly equal bytes."""
    n_bytes = [_block_bytes(block, leaves) for _, block, _ in copies]
    most_bytes = max([sum(n_bytes) / _N_CALLS, *n_bytes], default=0)
    parts: list[list[_Copy]] = []
    room = 0.0
    for copy, size in zip(copies, n_bytes, strict=True):
        if not parts or size > room:
            parts.append([])
            room = most_bytes
        parts[-1].append(copy)
        room -= size
    return parts


def _block_bytes(block: _StateBlock, leaves: Sequence[Atom]) -> float:
    n_bytes, rows = bytes_of(leaves[block.leaf]), block.rows
    return n_bytes if rows is None else n_bytes * (rows[1] - rows[0]) / shape_of(leaves[block.leaf])[0]


class _StateWriter:
    """Writes the functions and the calls of each mesh.

    Attributes:
        made: (number of a block, mesh) -> buffer.
    """

    def __init__(self, traced: TracedStep, meshes: Sequence[LogicalMesh]) -> None:
        self._flat, self._meshes = traced.flat, meshes
        self._functions: list[Function] = []
        self._instructions: list[Instruction] = []
        self._inputs: list[InputSlot] = []
        self._constants: list[ConstantSlot] = []
        self._numbers = itertools.count()
        self._input_buffers: dict[tuple[Var, int], int] = {}
        self.made: dict[tuple[int, int], int] = {}

    def add_mesh(self, mesh: int, blocks: Sequence[_StateBlock]) -> None:
        mine = [(i, block, spec) for i, block in enumerate(blocks) for home, spec in block.places if home == mesh]
        for part in _parts_by_size(mine, self._flat.outvars):
            self._add_call(mesh, part)

    def _add_call(self, mesh: int, copies: Sequence[_Copy]) -> None:
        program = self._mesh_equations(mesh, copies)
        inputs = tuple(self._input_buffer(var, mesh) for var in program.invars)
        outputs = tuple(next(self._numbers) for _ in copies)
        number = len(self._functions)
        self._functions.append(task_function(f"create{mesh}.{number}", mesh, program))
        self._instructions.append(Run(number, inputs, outputs))
        self.made.update(((block, mesh), buffer) for (block, _, _), buffer in zip(copies, outputs, strict=True))

    def program(self, step: Program, blocks: Sequence[_StateBlock]) -> Program:
        """step: the program that reads the state."""
        outputs = []
        for number, block in enumerate(blocks):
            homes = tuple(mesh for mesh, _ in block.places)
            outputs.append(OutputSlot(tuple(self.made[number, mesh] for mesh in homes), homes))

        kept = {*self.made.values(), *(slot.buffer for slot in self._constants)}
        results = step.blocks.arguments[: blocks[-1].leaf + 1] if blocks else ()
        return Program(
            meshes=step.meshes,
            functions=tuple(self._functions),
            inputs=tuple(self._inputs),
            constants=tuple(self._constants),
            instructions=tuple(with_frees(self._instructions, last_uses(self._instructions, kept))),
            outputs=tuple(outputs),
            donated_leaves=frozenset(),
            n_buffers=next(self._numbers),
            blocks=LeafBlocks(results=results if any(results) else ()),
        )

    def _mesh_equations(self, mesh: int, copies: Sequence[_Copy]) -> ShardedEquations:
        """The equations that these blocks need."""
        flat = self._flat
        atoms = [(flat.outvars[block.leaf], block.rows) for _, block, _ in copies]
        cut = [(atom, RowRange(0, *rows)) for atom, rows in atoms if rows is not None and not is_literal(atom)]
        found = RowEquations((*flat.constvars, *flat.invars), flat.eqns, cut)
        outvars = [
            atom if rows is None or is_literal(atom) else found.blocks[atom, RowRange(0, *rows)] for atom, rows in atoms
        ]
        eqns = [eqn for eqn, is_live in zip(found.eqns, live_equations(found.eqns, outvars), strict=True) if is_live]
        read = {var for eqn in eqns for var in operand_vars(eqn)} | {atom for atom in outvars if not is_literal(atom)}
        invars = tuple(var for var in (*flat.constvars, *flat.invars) if var in read)

        out_specs = [spec for _, _, spec in copies]
        results = [(atom, spec) for atom, spec in zip(outvars, out_specs, strict=True) if not is_literal(atom)]
        specs, equations = propagated_specs(invars, eqns, results, self._meshes[mesh])
        return ShardedEquations(
            eqns=tuple(eqns),
            invars=invars,
            outvars=tuple(outvars),
            specs=specs,
            equations=equations,
            out_specs=tuple(out_specs),
            mesh=self._meshes[mesh],
        )

    def _input_buffer(self, var: Var, mesh: int) -> int:
        """The buffer of `mesh` with an argument or a constant, replicated."""
        if (var, mesh) not in self._input_buffers:
            self._input_buffers[var, mesh] = self._new_slot(var, mesh)
        return self._input_buffers[var, mesh]

    def _new_slot(self, var: Var, mesh: int) -> int:
        buffer = next(self._numbers)
        if var in self._flat.constvars:
            value = self._flat.consts[self._flat.constvars.index(var)]
            self._constants.append(ConstantSlot(buffer, value, mesh, PartitionSpec()))
        else:
            leaf = self._flat.invars.index(var)
            in_host = is_in_host(var.aval)
            slot = InputSlot(buffer=buffer, leaf=leaf, rows=None, mesh=mesh, spec=PartitionSpec(), in_host=in_host)
            self._inputs.append(slot)
        return buffer


def _placed_inputs(traced: TracedStep, program: Program) -> tuple[PlacedValue, ...]:
    placed = []
    for number, (var, path) in enumerate(zip(traced.flat.invars, traced.in_paths, strict=True)):
        homes = tuple(slot.mesh for slot in program.inputs if slot.leaf == number)
        specs = (Spec.replicated(len(shape_of(var))),) * len(homes)
        placed.append(
            PlacedValue(
                path=path,
                shape=shape_of(var),
                dtype=dtype_name(var),
                mesh_ids=homes,
                specs=specs,
                memory_kind=memory_kind_of(var),
            )
        )
    return tuple(placed)


def _placed_outputs(traced: TracedStep, blocks: Sequence[_StateBlock]) -> tuple[PlacedValue, ...]:
    placed = []
    for leaf, mine in itertools.groupby(blocks, key=lambda block: block.leaf):
        atom = traced.flat.outvars[leaf]
        copies = [(mesh, spec, block.rows) for block in mine for mesh, spec in block.places]
        placed.append(
            PlacedValue(
                path=traced.out_paths[leaf],
                shape=shape_of(atom),
                dtype=dtype_name(atom),
                mesh_ids=tuple(mesh for mesh, _, _ in copies),
                specs=tuple(spec for _, spec, _ in copies),
                rows=tuple(rows for _, _, rows in copies if rows is not None),
                memory_kind=memory_kind_of(atom),
            )
        )
    return tuple(placed)
