"""Equations that compute blocks of rows of values: equations and required blocks in, more equations out.

A block of a result needs the same positions of the operands along the factor of its rows. So the cut moves from results
to operands, equation by equation, up to an operation that mixes rows; its results are computed in full and cut. Random
numbers depend on their positions, so each block draws its part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, is_control_flow, is_literal
from minialpa.rules.factors import Dims, Factors
from minialpa.rules.known_rules import factors_of
from minialpa.rules.shards import run_rows
from minialpa.tracing.new_equations import equations_for


@dataclass(frozen=True, slots=True)
class RowRange:
    """Positions of one dimension, from `start` to before `stop`."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _FactorRows:
    """Positions of a factor, from the first to before the second of `rows`."""

    factor: int
    rows: tuple[int, int]


class RowEquations:
    """The equations `eqns`, with more equations that compute blocks of rows.

    Attributes:
        eqns: all equations, in an order in which they can run. Some may be dead.
        blocks: the variable that holds these rows of a variable.
    """

    def __init__(
        self, inputs: Sequence[Var], eqns: Sequence[JaxprEqn], required: Iterable[tuple[Var, RowRange]]
    ) -> None:
        """inputs: the free variables of `eqns`. required: the blocks to compute."""
        self.eqns: list[JaxprEqn] = []
        self.blocks: dict[tuple[Var, RowRange], Atom] = {}
        self._requested: dict[Var, list[RowRange]] = defaultdict(list)
        for var, rows in required:
            self._request(var, rows)

        # Backwards: all readers of a value ask for their rows before its maker is visited.
        cuts = {eqn: self._cuts_of(eqn) for eqn in reversed(eqns)}
        for var in inputs:
            self._slice_blocks(var, self._requested[var])
        for eqn in eqns:
            self.eqns.append(eqn)
            self._add_blocks(eqn, cuts[eqn])

    def _request(self, var: Var, rows: RowRange) -> None:
        if rows not in self._requested[var]:
            self._requested[var].append(rows)

    def _cuts_of(self, eqn: JaxprEqn) -> dict[tuple[int, RowRange], _FactorRows | None]:
        """For each required block of a result, the positions to compute; None to cut the result."""
        cuts: dict[tuple[int, RowRange], _FactorRows | None] = {}
        for r, var in enumerate(eqn.outvars):
            for rows in self._requested[var]:
                factors = factors_of(eqn).on_mesh()
                found = cuts[r, rows] = _factor_rows(eqn, factors, r, rows)
                if found is not None:
                    for atom, dims in zip(eqn.invars, factors.operands, strict=True):
                        mine = _rows_of_factor(factors, dims, found)
                        if mine is not None and not is_literal(atom):
                            self._request(atom, mine)
        return cuts

    def _add_blocks(self, eqn: JaxprEqn, cuts: dict[tuple[int, RowRange], _FactorRows | None]) -> None:
        computed: dict[_FactorRows, list[Atom]] = {}
        for (r, rows), found in cuts.items():
            if found is None:
                self._slice_blocks(eqn.outvars[r], [rows])
                continue
            if found not in computed:
                computed[found] = self._compute_block(eqn, found)
            self.blocks[eqn.outvars[r], rows] = computed[found][r]

    def _compute_block(self, eqn: JaxprEqn, positions: _FactorRows) -> list[Atom]:
        """Results at some positions of a factor, from blocks of operands."""
        factors = factors_of(eqn).on_mesh()
        operands: list[Atom] = []
        for atom, dims in zip(eqn.invars, factors.operands, strict=True):
            mine = _rows_of_factor(factors, dims, positions)
            operands.append(atom if mine is None or is_literal(atom) else self.blocks[atom, mine])

        eqns, results = equations_for(
            lambda *xs: run_rows(eqn, factors, xs, positions.factor, positions.rows), *operands
        )
        self.eqns += eqns
        return results

    def _slice_blocks(self, var: Var, blocks: Iterable[RowRange]) -> None:
        for rows in blocks:
            eqns, (block,) = equations_for(lambda x, r=rows: lax.slice_in_dim(x, r.start, r.stop, axis=r.dim), var)
            self.eqns += eqns
            self.blocks[var, rows] = block


def _factor_rows(eqn: JaxprEqn, factors: Factors, result: int, rows: RowRange) -> _FactorRows | None:
    """The positions of a factor that are these rows of a result; None if the equation cannot compute them alone."""
    dim = factors.results[result][rows.dim]
    factor = factors.leading(dim)
    if factor is None or factor in factors.blocked or factor in factors.reductions or eqn.effects:
        return None
    # Loops and branches have only equal parts, and the rows may be unequal.
    if factor in factors.positional and is_control_flow(eqn):
        return None

    inner = _inner_length(factors, dim, factor)
    leads = all(
        factor not in other or factor == factors.leading(other)
        for dims in (*factors.operands, *factors.results)
        for other in dims
    )
    if rows.start % inner or rows.stop % inner or not leads:
        return None
    return _FactorRows(factor, (rows.start // inner, rows.stop // inner))


def _rows_of_factor(factors: Factors, dims: Dims, positions: _FactorRows) -> RowRange | None:
    """The rows of an array at these positions; None without the factor."""
    factor, (start, stop) = positions.factor, positions.rows
    for d, dim in enumerate(dims):
        if factor in dim:
            inner = _inner_length(factors, dim, factor)
            return RowRange(d, start * inner, stop * inner)
    return None


def _inner_length(factors: Factors, dim: tuple[int, ...], factor: int) -> int:
    """The length of a dimension for each position of its leading factor."""
    return math.prod(factors.sizes[f] for f in dim if f != factor)
