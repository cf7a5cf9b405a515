"""Stacks: which arrays of a step have one row for each layer that a scan applies.

A scan over layers has stacked weights as inputs, and leaves stacked residuals; its backward scan takes these and leaves
stacked gradients; the update computes new weights from these, row by row. All of them are one *stack*: dimension 0 of
each is the number of the layer. Rules of named factors say through which equations it goes: those where it is a factor
of its own, that may be cut into blocks of any lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.batching import is_barrier
from minialpa.intra.strategies.strategies import has_contraction, is_contraction
from minialpa.rules.control import scan_counts
from minialpa.rules.factors import Factors, factors_of
from minialpa.tracing.jaxprs import Atom, flatten_calls, is_literal, operand_vars, shape_of, sub_jaxprs
from minialpa.tracing.trace import TracedStep


@dataclass(frozen=True, slots=True)
class Cut:
    """An equation that can be done in blocks of the rows of `stack`: along `factor`; a scan or a barrier has none."""

    stack: int
    factor: int | None


@dataclass(frozen=True, slots=True)
class Stacks:
    """lengths: rows of each stack, which are numbered by their first scan. of: the stacked variables.
    cuts: equations by number. groups: forward group of the first scan of each stack.
    scanned: the stack of each forward group that has a scan. early: that of each forward group of what is made row by
        row of weights alone, such as casts.
    fixed: what is made of literals alone, such as masks and angles, and belongs to no layer, with its equation. Jax
        takes it out of the bodies of scans.
    """

    lengths: tuple[int, ...]
    of: Mapping[Var, int]
    cuts: Mapping[int, Cut]
    groups: tuple[int, ...]
    scanned: Mapping[int, int] = field(default_factory=dict)
    early: Mapping[int, int] = field(default_factory=dict)
    fixed: Mapping[Var, JaxprEqn] = field(default_factory=dict)


def find_stacks(traced: TracedStep) -> Stacks:
    """The stacks of a step. Scans of recurrent models have none: their weights are the same in every iteration."""
    eqns = traced.flat.eqns
    varies = _dependent_on_batch(traced)
    scans = [
        i
        for i, origin in enumerate(traced.origins)
        if origin.direction == "forward" and origin.group is not None and _applies_layers(eqns[i], varies)
    ]
    if not scans:
        return Stacks((), {}, {}, ())
    lengths = {eqns[i].params["length"] for i in scans}
    rows = _Rows()
    found = {i: links for i, eqn in enumerate(eqns) if (links := _links(eqn, lengths))}
    for links in found.values():
        for link in links:
            rows.join(link.arrays)
    for v, alias in zip(traced.flat.outvars, traced.layouts, strict=True):
        if alias is not None and not is_literal(v) and shape_of(v) and shape_of(v)[0] in lengths:
            rows.join((v, traced.flat.invars[alias]))
    batch = {v for v, dim in zip(traced.flat.invars, traced.batch_dims, strict=True) if dim is not None}
    of_examples = {rows.root(v) for v in batch}
    given = {rows.root(v) for v in traced.flat.invars if v not in batch}
    number: dict[Var, int] = {}
    groups: list[int] = []
    for i in scans:
        root = rows.root(_stacked(eqns[i])[0])
        if root in given - of_examples and root not in number:
            number[root] = len(number)
            group = traced.origins[i].group
            assert group is not None
            groups.append(group)
    cuts = {}
    for i, links in found.items():
        known = [(number[rows.root(link.arrays[0])], link) for link in links if rows.root(link.arrays[0]) in number]
        if known:
            cuts[i] = Cut(known[0][0], known[0][1].factor)
    of = {v: number[root] for v in rows.parent if (root := rows.root(v)) in number}
    size = {of[v]: shape_of(v)[0] for v in of}
    forward = [(i, cut) for i, cut in cuts.items() if traced.origins[i].direction == "forward"]
    grouped = [(eqns[i], g, cut.stack) for i, cut in forward if (g := traced.origins[i].group) is not None]
    scanned = {g: s for eqn, g, s in grouped if eqn.primitive.name == "scan"}
    early = {g: s for eqn, g, s in grouped if g not in scanned and not any(v in varies for v in eqn.outvars)}
    lengths_of = tuple(size[s] for s in range(len(number)))
    return Stacks(lengths_of, of, cuts, tuple(groups), scanned, early, _fixed(traced))


def _fixed(traced: TracedStep) -> dict[Var, JaxprEqn]:
    made: dict[Var, JaxprEqn] = {}
    for eqn, origin in zip(traced.flat.eqns, traced.origins, strict=True):
        is_plain = origin.direction == "other" and not eqn.effects and not sub_jaxprs(eqn)
        if is_plain and all(is_literal(v) or v in made for v in eqn.invars):
            made.update((v, eqn) for v in eqn.outvars)
    return made


class _Rows:
    """Arrays whose first dimensions count the same rows, as sets: a union-find."""

    def __init__(self) -> None:
        self.parent: dict[Var, Var] = {}

    def root(self, v: Var) -> Var:
        while (above := self.parent.get(v, v)) is not v:
            self.parent[v] = self.parent.get(above, above)
            v = above
        return v

    def join(self, arrays: Sequence[Var]) -> None:
        first = self.root(arrays[0])
        for v in arrays:
            self.parent.setdefault(v, v)
            self.parent[self.root(v)] = first
        self.parent[first] = first


@dataclass(frozen=True, slots=True)
class _Link:
    factor: int | None
    arrays: tuple[Var, ...]


def _links(eqn: JaxprEqn, lengths: set[int]) -> list[_Link]:
    """Sets of operands and results of an equation whose first dimensions are the same rows, of one of the `lengths`."""
    if eqn.primitive.name == "scan":
        return [_Link(None, stacked)] if eqn.params["length"] in lengths and (stacked := _stacked(eqn)) else []
    atoms = (*eqn.invars, *eqn.outvars)
    if eqn.effects or sub_jaxprs(eqn) or not any(shape_of(v) and shape_of(v)[0] in lengths for v in atoms):
        return []
    if is_barrier(eqn):
        pairs = zip(eqn.invars, eqn.outvars, strict=True)
        return [
            _Link(None, (v, out))
            for v, out in pairs
            if not is_literal(v) and shape_of(v)[:1] and shape_of(v)[0] in lengths
        ]
    factors = factors_of(eqn)
    dims = (*factors.operands, *factors.results)
    firsts = dict.fromkeys(d[0][0] for d in dims if d and len(d[0]) == 1)
    return [
        _Link(f, tuple(v for v, d in zip(atoms, dims, strict=True) if d and d[0] == (f,) and not is_literal(v)))
        for f in firsts
        if factors.sizes[f] in lengths and _is_cut(eqn, factors, f)
    ]


def _is_cut(eqn: JaxprEqn, factors: Factors, f: int) -> bool:
    """Whether blocks of any lengths along `f`, the first dimension of what has it, make blocks or parts of results."""
    arrays = (*factors.operands, *factors.results)
    return (
        f not in factors.blocked
        and not any(f in dim and (d > 0 or dim != (f,)) for dims in arrays for d, dim in enumerate(dims))
        and all(dims[:1] == ((f,),) or factors.is_partial(f, r) for r, dims in enumerate(factors.results))
        and not any(factors.takes_part_once(f, k) for k in range(len(eqn.invars)))
    )


def _stacked(eqn: JaxprEqn) -> tuple[Var, ...]:
    n_consts, n_carry = scan_counts(eqn)
    atoms: list[Atom] = [*eqn.invars[n_consts + n_carry :], *eqn.outvars[n_carry:]]
    return tuple(v for v in atoms if not is_literal(v))


def _dependent_on_batch(traced: TracedStep) -> set[Var]:
    varies = {v for v, dim in zip(traced.flat.invars, traced.batch_dims, strict=True) if dim is not None}
    for eqn in traced.flat.eqns:
        if any(v in varies for v in operand_vars(eqn)):
            varies.update(eqn.outvars)
    return varies


def _applies_layers(eqn: JaxprEqn, varies: set[Var]) -> bool:
    """Whether this is a scan with a matrix product of what comes from stacked inputs alone, that is, of weights."""
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2 or eqn.effects or not has_contraction(eqn):
        return False
    n_consts, n_carry = scan_counts(eqn)
    body = flatten_calls(eqn.params["jaxpr"].jaxpr, tuple(eqn.params["jaxpr"].consts))
    same = {*body.constvars, *body.invars[:n_consts]}
    xs = zip(body.invars[n_consts + n_carry :], eqn.invars[n_consts + n_carry :], strict=True)
    weights = {inner for inner, v in xs if not is_literal(v) and v not in varies}
    for inner in body.eqns:
        read = operand_vars(inner)
        if is_contraction(inner):
            if any(v in weights for v in read):
                return True
        elif sub_jaxprs(inner) and has_contraction(inner) and any(v in weights for v in read):
            return True
        elif any(v in weights for v in read) and all(v in weights or v in same for v in read):
            weights.update(inner.outvars)
        elif all(v in same for v in read):
            same.update(inner.outvars)
    return False
