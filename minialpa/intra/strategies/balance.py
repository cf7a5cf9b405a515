"""Specs of an equation with unequal work per position in; exchanges that give devices equal work out.

Under a causal mask, late query positions of an attention have more work. Of n devices, device i has halves 2i and
2i + 1 of 2n. Devices i and n - 1 - i exchange their second halves, so that device i has halves 2i and 2n - 1 - 2i, one
early and one late. A second exchange brings results back:

    operands --swap--> equation --swap--> results

Arrays without these positions stay. In a ring, keys and values are exchanged, too. The equation is not `positional`:
the place of a position does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from minialpa.cluster import LogicalMesh
from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.ir.equations import bytes_of
from minialpa.rules.factors import Dims, Factors
from minialpa.sharding import Spec
from minialpa.support.identity import ById


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Exchanges around an equation.

    share: work of the busiest device, as a part of its work without the exchange.
    operands, results: the exchange of each array, or None.
    """

    share: float
    operands: tuple[ReshardStep | None, ...]
    results: tuple[ReshardStep | None, ...]

    def seconds(self, eqn: JaxprEqn, mesh: LogicalMesh) -> float:
        """At most: programs reuse earlier exchanges and compute positions."""
        # Several operands in one spec are exchanged once.
        atoms, steps = (*eqn.invars, *eqn.outvars), (*self.operands, *self.results)
        moved = {
            (ById(atom), step): bytes_of(atom) for atom, step in zip(atoms, steps, strict=True) if step is not None
        }
        collectives = (step.collective(n_bytes, mesh.shape) for (_, step), n_bytes in moved.items())
        return sum(one.seconds(mesh) for one in collectives if one is not None)


def balance_of(
    factors: Factors, operands: Sequence[Spec], made: Sequence[Spec], mesh_shape: tuple[int, ...]
) -> Balance | None:
    """None if the work is equal or cannot be."""
    for factor in factors.ramps:
        axes = _axes_of(factors, operands, factor)
        n = math.prod(mesh_shape[axis] for axis in axes)
        if factors.may_balance(factor, n):
            return Balance(
                share=factors.n_shares(factor, n) / factors.n_balanced_shares(factor, n),
                operands=_swaps(factors, factor, axes, factors.operands, operands),
                results=_swaps(factors, factor, axes, factors.results, made),
            )
    return None


def _axes_of(factors: Factors, operands: Sequence[Spec], factor: int) -> tuple[int, ...]:
    for k, spec in enumerate(operands):
        for dim, axes in enumerate(spec.dims):
            if axes and factors.leading_factor(k, dim) == factor:
                return axes
    return ()


def _swaps(
    factors: Factors, factor: int, axes: tuple[int, ...], arrays: Sequence[Dims], specs: Sequence[Spec]
) -> tuple[ReshardStep | None, ...]:
    moved = {factor, factors.rings.get(factor, factor)}
    steps = []
    for dims, spec in zip(arrays, specs, strict=True):
        dim = next((d for d, dim in enumerate(dims) if moved & set(dim) and spec.dims[d]), None)
        steps.append(None if dim is None else ReshardStep(kind="swap", axes=axes, src=spec, dst=spec, dim=dim))
    return tuple(steps)
