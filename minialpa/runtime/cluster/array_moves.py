"""Moves arrays of a session from mesh to mesh: its workers send each other what they need.

A move is a step of a program that does nothing else. Each such program has connections of its own; the runtime keeps
the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from minialpa.programs.mesh_program import ArrayType
from minialpa.programs.program import InputSlot, MeshShape, OutputSlot, Program, Transfer
from minialpa.runtime.cluster.cluster_program import ClusterProgram
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.distributed_array import Copy, DistributedArray

#: Programs that are kept for the next time.
_MOVERS_KEPT = 16


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """An array, a copy that it has, and the mesh and layout of the copy that it is to get."""

    array: DistributedArray
    copy: Copy
    shape: MeshShape
    spec: PartitionSpec


_Route = tuple[ArrayType, MeshShape, PartitionSpec, MeshShape, PartitionSpec]


def move_arrays(runtime: ClusterRuntime, moves: Sequence[Move]) -> None:
    """Give each array another copy. To be called in a turn; the workers of these meshes run."""
    key = tuple((move.array.type, move.copy.shape, move.copy.spec, move.shape, move.spec) for move in moves)
    mover = runtime.movers.pop(key, None)
    if mover is None:
        mover = ClusterProgram(runtime, _moving_program(key), {i: kind for i, (kind, *_) in enumerate(key)})
    runtime.movers[key] = mover  # the one that was used last at the end
    if len(runtime.movers) > _MOVERS_KEPT:
        del runtime.movers[next(iter(runtime.movers))]

    # Every result of the step is a copy of an argument, so the workers keep it under the number of the array.
    mover.load()
    arrays = [move.array for move in moves]
    mover.start(arrays, [array.number for array in arrays])
    for move in moves:
        move.array.add(Copy(runtime.mesh_of(move.shape), move.shape, move.spec))


def _moving_program(moves: Sequence[_Route]) -> Program:
    """The program that takes arrays from mesh to mesh and does nothing else."""
    meshes = tuple(dict.fromkeys(shape for _, source, _, target, _ in moves for shape in (source, target)))
    number = {shape: i for i, shape in enumerate(meshes)}
    n = len(moves)
    return Program(
        meshes=meshes,
        functions=(),
        inputs=tuple(
            InputSlot(buffer=i, leaf=i, rows=None, mesh=number[source], spec=spec)
            for i, (_, source, spec, _, _) in enumerate(moves)
        ),
        constants=(),
        instructions=tuple(Transfer(i, n + i, number[target], spec) for i, (_, _, _, target, spec) in enumerate(moves)),
        outputs=tuple(OutputSlot((n + i,), (number[target],)) for i, (_, _, _, target, _) in enumerate(moves)),
        donated_leaves=frozenset(),
        n_buffers=2 * n,
    )
