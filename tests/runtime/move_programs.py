"""A hand-made program that only moves arrays from mesh to mesh."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from minialpa.programs.program import InputSlot, MeshShape, OutputSlot, Program, Transfer


def moving(meshes: tuple[MeshShape, ...], ways: Sequence[tuple[int, PartitionSpec, int, PartitionSpec]]) -> Program:
    """Leaf i goes from a mesh and a layout to another mesh and layout: `ways[i]`."""
    n = len(ways)
    return Program(
        meshes=meshes,
        functions=(),
        inputs=tuple(InputSlot(buffer=i, leaf=i, rows=None, mesh=a, spec=s) for i, (a, s, _, _) in enumerate(ways)),
        constants=(),
        instructions=tuple(Transfer(i, n + i, b, t) for i, (_, _, b, t) in enumerate(ways)),
        outputs=tuple(OutputSlot((n + i,), (b,)) for i, (_, _, b, _) in enumerate(ways)),
        donated_leaves=frozenset(),
        n_buffers=2 * n,
    )
