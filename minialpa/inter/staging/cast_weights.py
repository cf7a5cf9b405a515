"""Weights are cast once per step: a split step in; the same step, whose loops read weights in narrower types, out.
The README of the package has the reasons.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from minialpa.inter.microbatch.batching import is_barrier
from minialpa.inter.microbatch.split_step import PROLOGUE, SplitStep, is_loop
from minialpa.intra.strategies.sharing import shared_copies
from minialpa.ir.block import Block
from minialpa.ir.equations import (
    Atom,
    aval_of,
    fresh_var,
    is_inexact,
    is_literal,
    operand_vars,
    reading,
    scan_counts,
    with_bodies,
)
from minialpa.ir.op import Op
from minialpa.rules.expensive import is_view, reads_in_place
from minialpa.support.private_jax import changed_aval
from minialpa.tracing.flattening import flat_body
from minialpa.tracing.new_equations import equations_for

#: By variable, the variable with its value in a narrower type.
_Narrow = Mapping[Var, Var]


def casts_weights(split: SplitStep) -> bool:
    return with_weights_cast_once(split) is not split


def with_weights_cast_once(split: SplitStep) -> SplitStep:
    """`split` with loops that cast no weight to a narrower type; the same object if its loops cast no weight."""
    weights = {v for v in set(split.inputs) - split.traced.examples if is_inexact(v)}
    in_loops = [op.eqn for op in split.ops if is_loop(op.segment)]
    read_elsewhere = {*split.results, *(value for value, _ in split.combined)}
    read_elsewhere.update(v for op in split.ops if not is_loop(op.segment) for v in operand_vars(op.eqn))
    loops = _Equations(in_loops, read_elsewhere - weights)

    casts, rewriting = _Casts(), _Rewriting(loops)
    ops: list[Op] = []
    for op in split.ops:
        if is_loop(op.segment):
            given = {v: casts.of(v, dtype, op) for v, dtype in loops.narrow_reads(op.eqn, weights).items()}
            ops += [replace(op, eqn=eqn) for eqn in rewriting.rewritten(op.eqn, given)]
        else:
            ops.append(op)
    return replace(split, ops=(*casts.ops, *ops)) if casts.ops else split


class _Casts:
    """The casts before the first loop.

    A cast is sharded like its weight. A copy follows, whose spec in the loops the planner chooses.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._copy_of = shared_copies()
        self._copies: dict[tuple[Var, np.dtype[Any]], Var] = {}

    def of(self, weight: Var, dtype: np.dtype[Any], reader: Op) -> Var:
        if (weight, dtype) not in self._copies:
            cast, (narrow,) = equations_for(lambda x: lax.convert_element_type(x, dtype), weight)
            assert not is_literal(narrow)
            copying, self._copies[weight, dtype] = self._copy_of(narrow)
            self.ops += [replace(reader, eqn=eqn, segment=PROLOGUE) for eqn in (*cast, copying)]
        return self._copies[weight, dtype]


# ---- what is read in a narrower type ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Equations:
    """The equations of the loops or of the body of a scan. left: values with other readers."""

    eqns: Sequence[JaxprEqn]
    left: AbstractSet[Var]
    _bodies: dict[JaxprEqn, _Body] = field(default_factory=dict)

    def narrow_reads(self, eqn: JaxprEqn, values: AbstractSet[Var]) -> dict[Var, np.dtype[Any]]:
        """The operands among `values` that an equation needs only in a narrower type, with that type."""
        found: dict[Var, np.dtype[Any]] = {}
        for v in dict.fromkeys(v for v in eqn.invars if not is_literal(v) and v in values):
            types = {self._type_read(eqn, k) for k, atom in enumerate(eqn.invars) if atom is v}
            dtype = types.pop()
            if dtype is not None and not types:
                found[v] = dtype
        return found

    def _type_read(self, eqn: JaxprEqn, k: int) -> np.dtype[Any] | None:
        """The type to which `eqn` narrows operand `k`, or None."""
        if self._is_narrowing_cast(eqn):
            dtype: np.dtype[Any] = np.dtype(eqn.params["new_dtype"])
            return dtype
        if is_barrier(eqn):
            return self.type_of(eqn.outvars[k])
        if eqn.primitive.name == "scan":
            body = self.body(eqn)
            return None if k in body.carries else body.inside.type_of(body.flat.invars[k])
        return None

    def _is_narrowing_cast(self, eqn: JaxprEqn) -> bool:
        if eqn.primitive.name != "convert_element_type":
            return False
        before, after = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
        is_float = is_inexact(eqn.invars[0]) and is_inexact(eqn.outvars[0])
        is_plain = not after.weak_type and eqn.outvars[0] not in self.left
        return is_float and is_plain and after.dtype.itemsize < before.dtype.itemsize

    def type_of(self, var: Var) -> np.dtype[Any] | None:
        """The narrower type in which all readers of a value can read it, or None."""
        types = {self._type_read(eqn, k) for eqn, k in self._readers.get(var, ())}
        return types.pop() if len(types) == 1 and var not in self.left else None

    def is_read_in_place(self, var: Var) -> bool:
        """Whether only products, lookups, and scans with products in them read the cast value."""
        return all(
            self.is_read_in_place(eqn.outvars[0])
            if self._is_narrowing_cast(eqn) or is_view(eqn)
            else reads_in_place(eqn)
            for eqn, _ in self._readers.get(var, ())
        )

    @cached_property
    def _readers(self) -> Mapping[Var, Sequence[tuple[JaxprEqn, int]]]:
        found = defaultdict[Var, list[tuple[JaxprEqn, int]]](list)
        for eqn in self.eqns:
            for k, atom in enumerate(eqn.invars):
                if not is_literal(atom):
                    found[atom].append((eqn, k))
        return found

    def body(self, eqn: JaxprEqn) -> _Body:
        if eqn not in self._bodies:
            closed, (n_consts, n_carry) = eqn.params["jaxpr"], scan_counts(eqn)
            flat = flat_body(closed.jaxpr, tuple(closed.consts))
            inside = _Equations(flat.eqns, {v for v in flat.outvars if not is_literal(v)})
            self._bodies[eqn] = _Body(eqn, flat, inside, range(n_consts, n_consts + n_carry))
        return self._bodies[eqn]


@dataclass(frozen=True, slots=True)
class _Body:
    """The body of the scan `eqn`, with inlined calls. carries: the numbers of the operands that are carries."""

    eqn: JaxprEqn
    flat: Block
    inside: _Equations
    carries: range


# ---- reading it in that type -----------------------------------------------------------------------------------------


class _Rewriting:
    def __init__(self, equations: _Equations) -> None:
        self._equations = equations
        self._narrow: dict[Var, Var] = {}  # result of a barrier -> narrower result
        self._names: dict[Var, Var] = {}  # result of a removed cast -> narrower operand

    def rewritten(self, eqn: JaxprEqn, given: _Narrow) -> list[JaxprEqn]:
        """Equations with the results of `eqn` from the operands in narrower types `given`; empty for a cast."""
        narrow = {**given, **{v: self._narrow[v] for v in eqn.invars if not is_literal(v) and v in self._narrow}}
        if not narrow:
            return [reading(eqn, self._names)]
        if is_barrier(eqn):
            return self._narrow_barrier(eqn, narrow)
        if eqn.primitive.name == "scan":
            scan = _scan_of(self._equations.body(eqn), narrow)
            return [reading(scan, self._names)]
        (weight,) = operand_vars(eqn)
        self._names[eqn.outvars[0]] = narrow[weight]
        return []

    def _narrow_barrier(self, eqn: JaxprEqn, narrow: _Narrow) -> list[JaxprEqn]:
        """The barrier on narrower arrays, if any arrays are left; all readers of its results read them narrow."""
        passed: list[tuple[Atom, Var]] = []
        for atom, result in zip(eqn.invars, eqn.outvars, strict=True):
            if is_literal(atom) or atom not in narrow:
                passed.append((atom, result))
            elif self._equations.is_read_in_place(result):
                self._narrow[result] = narrow[atom]
            else:
                self._narrow[result] = fresh_var(aval_of(narrow[atom]))
                passed.append((narrow[atom], self._narrow[result]))
        if not passed:
            return []
        barrier = eqn.replace(invars=[atom for atom, _ in passed], outvars=[result for _, result in passed])
        return [reading(barrier, self._names)]


def _scan_of(body: _Body, narrow: _Narrow) -> JaxprEqn:
    """The scan of `body` with the operands `narrow` in their narrower types, and without their casts."""
    given = {
        inner: fresh_var(changed_aval(aval_of(inner), dtype=aval_of(narrow[outer]).dtype))
        for outer, inner in zip(body.eqn.invars, body.flat.invars, strict=True)
        if not is_literal(outer) and outer in narrow
    }
    rewriting = _Rewriting(body.inside)
    eqns: list[JaxprEqn] = []
    for one in body.flat.eqns:
        eqns += rewriting.rewritten(one, {v: given[v] for v in operand_vars(one) if v in given})

    flat = body.flat
    program = body.eqn.params["jaxpr"].jaxpr.replace(
        constvars=list(flat.constvars),
        invars=[given.get(v, v) for v in flat.invars],
        eqns=eqns,
        outvars=list(flat.outvars),
    )
    return with_bodies(reading(body.eqn, narrow), {"jaxpr": ClosedJaxpr(program, list(flat.consts))})
