"""Control flow: `scan`, `while` and `cond`, by the rules of the equations inside them (see `body_factors`).

    scan   consts, carries, [T xs] -> carries, [T ys]   T is blocked; a carry keeps its factors over all iterations
    while  consts, carries -> carries                   what decides on the next iteration is the same in all shards
    cond   index, operands -> results                   branches agree on the factors of their operands and results

Gradients of weights that the body sums over examples, in a carry or for each iteration, are partial sums.
Flops: those of the body for each iteration of scan, for one iteration of while; those of the largest branch of cond.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import JaxprEqn

from minialpa.rules.body_factors import Links, Node, Outcome, Region, follow, link, local_jaxpr, node_of, zero_arrays
from minialpa.rules.common import FactorTable, Shapes
from minialpa.rules.factors import Dims, Factors, rule
from minialpa.tracing.jaxprs import Atom, FlatJaxpr, flatten_calls, fresh_var, is_literal, shape_of


@dataclass(frozen=True, slots=True)
class _Control:
    """A region, and what splitting each group of its inputs and results does. Groups that are not listed are blocked.

    part_flops: for one run of each part of the region.
    """

    region: Region
    links: Links
    outcomes: dict[Node, Outcome]
    part_flops: tuple[float, ...]


def _control(region: Region) -> _Control:
    links, zeros = link(region), zero_arrays(region)
    boundary = [*region.inputs, *(atom for atoms in region.results for atom in atoms)]
    groups = dict.fromkeys(g for atom in boundary for g in links.groups(atom))
    found = {g: follow(region, links, g, zeros) for g in groups if g not in links.blocked and links.sizes[g] > 1}
    flops = tuple(sum(region.factors[id(eqn)].flops for eqn in part.eqns) for part in region.parts)
    return _Control(region, links, {g: o for g, o in found.items() if o is not None}, flops)


def _inlined(closed: Any, inputs: Sequence[Atom] | None = None) -> FlatJaxpr:
    """The program of a closed jaxpr without calls, on given variables instead of its own."""
    flat = flatten_calls(getattr(closed, "jaxpr", closed), tuple(getattr(closed, "consts", ())))
    if inputs is None:
        return flat
    renamed = dict(zip(flat.invars, inputs, strict=True))

    def read(atom: Atom) -> Atom:
        return atom if is_literal(atom) else renamed.get(atom, atom)

    eqns = tuple(eqn.replace(invars=[read(v) for v in eqn.invars]) for eqn in flat.eqns)
    return replace(flat, invars=tuple(inputs), eqns=eqns, outvars=tuple(read(v) for v in flat.outvars))


# A step asks for the factors of an equation several times. Jaxprs are compared by identity.
_remember = functools.lru_cache(maxsize=256)


@_remember
def _scan_control(body: Any, n_consts: int, n_carry: int) -> _Control:
    flat = _inlined(body)
    carried = tuple((i, n_consts + i) for i in range(n_carry))
    return _control(Region((flat,), flat.invars, tuple((v,) for v in flat.outvars), carried))


@_remember
def _while_control(condition: Any, body: Any, n_condition_consts: int, n_body_consts: int) -> _Control:
    flat = _inlined(body)
    consts = tuple(fresh_var(v.aval) for v in _inlined(condition).invars[:n_condition_consts])
    test = _inlined(condition, (*consts, *flat.invars[n_body_consts:]))
    n_consts = n_condition_consts + n_body_consts
    carried = tuple((i, n_consts + i) for i in range(len(flat.outvars)))
    results = tuple((v,) for v in flat.outvars)
    return _control(Region((test, flat), (*consts, *flat.invars), results, carried, test.outvars))


@_remember
def _cond_control(branches: tuple[Any, ...]) -> _Control:
    first = _inlined(branches[0])
    parts = (first, *(_inlined(branch, first.invars) for branch in branches[1:]))
    return _control(Region(parts, first.invars, tuple(zip(*(part.outvars for part in parts), strict=True))))


@dataclass(slots=True)
class _Boundary:
    """Lays out the operands and results of a control flow equation: one factor for each group."""

    control: _Control
    table: FactorTable
    factors: dict[Node, int]

    def dims(self, atom: Atom) -> Dims:
        return tuple(self._dim(node_of(atom, d), size) for d, size in enumerate(shape_of(atom)))

    def _dim(self, node: Node, size: int) -> tuple[int, ...]:
        group = self.control.links.find(node)
        outcome = self.control.outcomes.get(group)
        if outcome is None or size <= 1:
            return self.table.dim(size, blocked=size > 1)
        n_blocks = self.control.links.sizes[group]
        if group not in self.factors:
            (self.factors[group],) = self.table.dim(n_blocks, reduction=self._reduction(outcome))
        rest = self.table.dim(size // n_blocks, blocked=True) if size != n_blocks else ()
        return (self.factors[group], *rest)

    @staticmethod
    def _reduction(outcome: Outcome) -> Any:
        # A factor of operands that nothing depends on counts as reduced, with no partial results.
        return outcome.reduction or (None if "split" in outcome.results else "sum")

    def build(self, eqn: JaxprEqn, operands: Sequence[Dims], results: Sequence[Dims], flops: float) -> Factors:
        """The factors of the equation, whose last operands are the inputs of the region."""
        n_before = len(operands) - len(self.control.region.inputs)
        outcomes = [(f, self.control.outcomes[group]) for group, f in self.factors.items()]
        return replace(
            self.table.build(eqn, operands, results, flops=flops),
            unaffected=frozenset((f, r) for f, o in outcomes if f in self.table.reductions for r in o.whole),
            once=frozenset((f, n_before + i) for f, o in outcomes for i in o.sums),
        )


def _n_splits(control: _Control, local: Sequence[tuple[Atom, tuple[int, ...]]]) -> dict[Node, int]:
    """Into how many parts each group is cut, from the local shapes of inputs and results."""
    out: dict[Node, int] = {}
    for atom, shape in local:
        for d, (size, part) in enumerate(zip(shape_of(atom), shape, strict=True)):
            if part != size:
                out[control.links.find(node_of(atom, d))] = size // part
    return out


def _local(control: _Control, inputs: Shapes, results: Shapes) -> Callable[[int], Any]:
    """From the number of a part of the region to that part on shards."""
    atoms = [*control.region.inputs, *(atoms[0] for atoms in control.region.results)]
    n_splits = _n_splits(control, list(zip(atoms, (*inputs, *results), strict=True)))
    return lambda i: local_jaxpr(control.region.parts[i], control.region, control.links, n_splits)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Number of consts and of carries."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.11 and later
    return len(consts), len(carry)


def _local_scan(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    n_consts, n_carry = scan_counts(eqn)
    lead = n_consts + n_carry
    inputs = (*operands[:lead], *(shape[1:] for shape in operands[lead:]))
    out = (*results[:n_carry], *(shape[1:] for shape in results[n_carry:]))
    local = _local(_scan_control(eqn.params["jaxpr"], n_consts, n_carry), inputs, out)
    return dict(eqn.params, jaxpr=local(0))


@rule("scan", localize=_local_scan)
def _scan(eqn: JaxprEqn) -> Factors:
    n_consts, n_carry = scan_counts(eqn)
    control = _scan_control(eqn.params["jaxpr"], n_consts, n_carry)
    boundary = _Boundary(control, FactorTable(), {})
    time = boundary.table.dim(eqn.params["length"], blocked=True)
    inputs = [boundary.dims(v) for v in control.region.inputs]
    results = [boundary.dims(v) for (v,) in control.region.results]
    operands = [dims if k < n_consts + n_carry else (time, *dims) for k, dims in enumerate(inputs)]
    results = [dims if r < n_carry else (time, *dims) for r, dims in enumerate(results)]
    return boundary.build(eqn, operands, results, eqn.params["length"] * control.part_flops[0])


def _while_parts(eqn: JaxprEqn) -> _Control:
    params = eqn.params
    return _while_control(params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"])


def _local_while(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    local = _local(_while_parts(eqn), operands, results)
    return dict(eqn.params, cond_jaxpr=local(0), body_jaxpr=local(1))


@rule("while", localize=_local_while)
def _while(eqn: JaxprEqn) -> Factors:
    control = _while_parts(eqn)
    boundary = _Boundary(control, FactorTable(), {})
    operands = [boundary.dims(v) for v in control.region.inputs]
    results = [boundary.dims(v) for (v,) in control.region.results]
    return boundary.build(eqn, operands, results, sum(control.part_flops))


def _local_cond(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    control = _cond_control(eqn.params["branches"])
    local = _local(control, operands[1:], results)
    return dict(eqn.params, branches=tuple(local(i) for i in range(len(control.region.parts))))


@rule("cond", localize=_local_cond)
def _cond(eqn: JaxprEqn) -> Factors:
    control = _cond_control(eqn.params["branches"])
    boundary = _Boundary(control, FactorTable(), {})
    operands = [boundary.dims(v) for v in control.region.inputs]
    results = [boundary.dims(atoms[0]) for atoms in control.region.results]
    index = boundary.table.dims(shape_of(eqn.invars[0]), blocked=True)
    return boundary.build(eqn, [index, *operands], results, max(control.part_flops))
