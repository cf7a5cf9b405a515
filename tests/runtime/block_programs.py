"""Small hand-made programs with a leaf in blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from minialpa.programs.program import (
    BlockRows,
    Free,
    Function,
    InputSlot,
    LeafBlocks,
    MeshShape,
    OutputSlot,
    Program,
    Run,
)

ROWS = ((0, 2), (2, 5))
LEAF = np.arange(10, dtype=np.float32).reshape(5, 2)


def program(
    *,
    rows: BlockRows = ROWS,
    meshes: Sequence[int] = (0, 1),
    n_devices: int = 1,
    donated: Sequence[int] = (0, 1),
    read: Sequence[int] = (0, 1),
) -> Program:
    """Adds 1 to leaf 0, in blocks.

    rows: the rows of each block; a single block is the whole leaf.
    meshes: the mesh of each block, of `n_devices` each.
    donated: the donated blocks.
    read: the blocks that the program reads; unless it reads both, results are not in blocks.
    """
    spec = PartitionSpec()
    avals = [jax.ShapeDtypeStruct((stop - start, 2), jnp.float32) for start, stop in rows]
    functions = [
        Function(
            name=f"add {i}",
            mesh=meshes[i],
            fun=lambda x: (x + 1,),
            in_avals=(avals[i],),
            in_specs=(spec,),
            out_avals=(avals[i],),
            out_specs=(spec,),
            donated=(0,) if i in donated else (),
        )
        for i in read
    ]
    instructions: list[Any] = []
    for k, i in enumerate(read):
        instructions += [Run(k, (i,), (2 + i,)), Free((i,))]
    return Program(
        meshes=tuple(MeshShape(mesh * n_devices, (n_devices,)) for mesh in range(2)),
        functions=tuple(functions),
        inputs=tuple(InputSlot(buffer=i, leaf=i, rows=None, mesh=meshes[i], spec=spec) for i in read),
        constants=(),
        instructions=tuple(instructions),
        outputs=tuple(OutputSlot((2 + i,), (meshes[i],)) for i in read),
        donated_leaves=frozenset(donated),
        n_buffers=4,
        blocks=LeafBlocks(arguments=(rows,) if len(rows) == 2 else (), results=(rows,) if len(read) == 2 else ()),
    )
