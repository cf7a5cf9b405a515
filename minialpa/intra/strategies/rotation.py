"""A rotation (tracing/rotation.py) along split dimensions in; the step in which devices pass slices on out.

With shards of l positions, the shard of device i is positions shift + i l, ..., of the array: the end of the shard of
device i + q and the beginning of the shard of device i + q + 1, with shift = q l + r.
"""

from __future__ import annotations

import math

from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.rules.factors import Factors
from minialpa.sharding import Spec


def rotation_of(factors: Factors, operand: Spec, mesh_shape: tuple[int, ...]) -> ReshardStep | None:
    """None for an equation without a rotation, or if each device has the whole dimension."""
    for factor, shift in factors.shifts.items():
        dim = factors.operands[0].index((factor,))
        axes = operand.dims[dim]
        if axes:
            length = factors.sizes[factor] // math.prod(mesh_shape[axis] for axis in axes)
            sent = min(1.0, shift / length)
            return ReshardStep(kind="rotate", axes=axes, src=operand, dst=operand, dim=dim, shift=shift, sent=sent)
    return None
