"""The dimensions of an equation's arrays in, its `Factors` out. A rule for a product of matrices:

table = FactorTable()
i, j, k = table.dim(4), table.dim(6), table.dim(8, reduction="sum")
return table.build(eqn, [(i, k), (k, j)], [(i, j)])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import shape_of
from minialpa.rules.factors import Dims, Factors, Ramp, Reduction

#: Factors of one dimension, outermost first.
Dim = tuple[int, ...]


@dataclass(slots=True)
class FactorTable:
    """Factors so far, as in `Factors`."""

    sizes: list[int] = field(default_factory=list)
    blocked: set[int] = field(default_factory=set)
    positional: set[int] = field(default_factory=set)
    reductions: dict[int, Reduction] = field(default_factory=dict)
    shifts: dict[int, int] = field(default_factory=dict)

    def dim(
        self,
        size: int,
        *,
        blocked: bool = False,
        positional: bool = False,
        reduction: Reduction | None = None,
        shift: int | None = None,
    ) -> Dim:
        """A dimension that is one new factor. Positional and shifted factors are blocked."""
        factor = len(self.sizes)
        self.sizes.append(size)
        if blocked or positional or shift is not None:
            self.blocked.add(factor)
        if positional:
            self.positional.add(factor)
        if shift is not None:
            self.shifts[factor] = shift
        if reduction is not None:
            self.reductions[factor] = reduction
        return (factor,)

    def dims(self, shape: Iterable[int], *, blocked: bool = False, positional: bool = False) -> Dims:
        return tuple(self.dim(size, blocked=blocked, positional=positional) for size in shape)

    def build(
        self,
        eqn: JaxprEqn,
        operands: Iterable[Dims],
        results: Iterable[Dims],
        *,
        linear: Literal["none", "joint", "each"] = "none",
        linear_operands: Sequence[int] = (),
        flops: float = 0.0,
        ramps: Mapping[int, Ramp] = MappingProxyType({}),
        rings: Mapping[int, int] = MappingProxyType({}),
    ) -> Factors:
        """Booleans and keys have no sum, so their equations are not linear."""
        summed = [*(eqn.invars[i] for i in linear_operands), *eqn.outvars]
        if not linear_operands or not all(is_summable(atom) for atom in summed):
            linear, linear_operands = "none", ()

        reductions = dict(self.reductions)
        for f, how in self.reductions.items():
            # XLA computes products of matrices of booleans with `and` and `or`.
            if how == "sum" and all(map(is_boolean, eqn.outvars)):
                reductions[f] = "or"
            # The maximum of complex numbers with a NaN depends on their order.
            if how in ("max", "min") and any(map(is_complex, eqn.outvars)):
                self.blocked.add(f)
                del reductions[f]

        return Factors(
            sizes=tuple(self.sizes),
            operands=tuple(operands),
            results=tuple(results),
            reductions=reductions,
            blocked=frozenset(self.blocked),
            positional=frozenset(self.positional),
            linear=linear,
            linear_operands=tuple(linear_operands),
            flops=flops,
            ramps=ramps,
            shifts=self.shifts,
            rings=rings,
        )


def is_summable(atom: Any) -> bool:
    return bool(jnp.issubdtype(getattr(atom.aval, "dtype", np.bool_), np.number))


def is_boolean(atom: Any) -> bool:
    return bool(jnp.issubdtype(getattr(atom.aval, "dtype", np.int32), np.bool_))


def is_complex(atom: Any) -> bool:
    return bool(jnp.issubdtype(getattr(atom.aval, "dtype", np.int32), np.complexfloating))


def n_elements(atom: Any) -> int:
    return math.prod(shape_of(atom))
