"""A `scan` in; its body out, as equations that are planned like the equations around the scan.

All iterations are sharded alike. Constants, and slices of stacked inputs, have the specs of the operands of the scan.
Carries leave an iteration in the spec in which they enter it. Collectives of the body run in every iteration.

    xs: R,S0      the stacked operand, whose dimension 0 counts iterations and is never split
    x: S0         its slice in the body
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import JaxprEqn, Var

from minialpa.intra.strategies.sharing import share_reads
from minialpa.ir.block import Block
from minialpa.ir.equations import is_literal, scan_counts, shape_of
from minialpa.ir.op import Op
from minialpa.rules.expensive import has_contraction
from minialpa.rules.known_rules import factors_of
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.flattening import flat_body


@dataclass(frozen=True, slots=True)
class ScanBody:
    """One iteration of a scan. flat: from constants, carries and slices to carries and slices of the results."""

    flat: Block
    n_consts: int
    n_carry: int
    length: int

    @property
    def n_lead(self) -> int:
        """Operands before the stacked ones."""
        return self.n_consts + self.n_carry

    @property
    def live_on_entry(self) -> tuple[Var, ...]:
        """Constants and slices, which the iteration before can fetch."""
        return (*self.flat.constvars, *self.flat.invars[: self.n_consts], *self.flat.invars[self.n_lead :])

    @property
    def required_outputs(self) -> tuple[Var, ...]:
        """Carries, for which the next iteration waits."""
        return tuple(v for v in self.flat.outvars[: self.n_carry] if not is_literal(v))

    def inner_operand(self, k: int, spec: Spec) -> Spec:
        """A slice of a stacked operand has one dimension less."""
        return spec if k < self.n_lead else Spec(spec.dims[1:], spec.partial)

    def outer_operand(self, k: int, spec: Spec) -> Spec:
        return spec if k < self.n_lead else Spec(((), *spec.dims), spec.partial)

    def inner_result(self, r: int, spec: Spec) -> Spec:
        return spec if r < self.n_carry else Spec(spec.dims[1:], spec.partial)

    def outer_result(self, r: int, spec: Spec) -> Spec:
        return spec if r < self.n_carry else Spec(((), *spec.dims), spec.partial)


def scan_body(eqn: JaxprEqn) -> ScanBody | None:
    """None without iterations, products and convolutions."""
    if eqn.primitive.name != "scan" or not eqn.params["length"] or not has_contraction(eqn):
        return None
    return ScanBody(_flat_body(eqn.params["jaxpr"]), *scan_counts(eqn), eqn.params["length"])


@functools.lru_cache(maxsize=256)
def _flat_body(body: Any) -> Block:
    flat = flat_body(body.jaxpr, tuple(body.consts))
    placed = share_reads(flat.eqns, [""] * len(flat.eqns))
    return replace(flat, ops=tuple(Op(one.eqn) for one in placed))


def examples_inside(eqn: JaxprEqn, scan: ScanBody, dims: Mapping[Var, int]) -> dict[Var, int]:
    """The dimension of the examples of each variable in the body with examples. dims: the same around the scan."""
    flat = scan.flat
    inside: dict[Var, int] = {}
    for k, (outer, inner) in enumerate(zip(eqn.invars, flat.invars, strict=True)):
        dim = None if is_literal(outer) else dims.get(outer)
        stacked = int(k >= scan.n_lead)
        if dim is not None and dim >= stacked:
            inside[inner] = dim - stacked

    # Another round passes on the examples of a carry that enters without and leaves with examples.
    for _ in range(scan.n_carry + 1):
        for one in flat.eqns:
            inside.update(_made_of_examples(one, inside))
        carried = _carried_examples(scan, inside)
        if not carried:
            break
        inside.update(carried)
    return inside


def _carried_examples(scan: ScanBody, inside: Mapping[Var, int]) -> dict[Var, int]:
    carries = zip(scan.flat.invars[scan.n_consts : scan.n_lead], scan.flat.outvars, strict=False)
    return {var: inside[out] for var, out in carries if not is_literal(out) and out in inside and var not in inside}


def _made_of_examples(eqn: JaxprEqn, dims: Mapping[Var, int]) -> dict[Var, int]:
    """The dimensions of results that have a factor of the examples of an operand."""
    factors = factors_of(eqn)
    leading = {
        factors.leading_factor(k, dims[atom])
        for k, atom in enumerate(eqn.invars)
        if not is_literal(atom) and atom in dims
    } - {None}

    found: dict[Var, int] = {}
    for result, factors_of_dims in zip(eqn.outvars, factors.results, strict=True):
        for dim, of_dim in enumerate(factors_of_dims):
            if factors.leading(of_dim) in leading:
                found.setdefault(result, dim)
    return found


def body_specs(body: ScanBody, chosen: EquationSpecs) -> tuple[dict[Var, Spec], tuple[Spec, ...]]:
    """Of variables, and of results."""
    # Every device has all constants, as parts of the program.
    flat = body.flat
    specs = {var: Spec.replicated(len(shape_of(var))) for var in flat.constvars}
    for k, (var, spec) in enumerate(zip(flat.invars, chosen.operands, strict=True)):
        specs[var] = body.inner_operand(k, spec)
    for eqn, inner in zip(flat.eqns, chosen.body, strict=True):
        specs.update(zip(eqn.outvars, inner.results, strict=True))
    return specs, tuple(body.inner_result(r, spec) for r, spec in enumerate(chosen.results))
