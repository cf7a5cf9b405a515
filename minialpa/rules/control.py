"""Control flow: `scan`, `while` and `cond`, by the rules of the equations inside them (see `body_factors`).

    scan   consts, carries, [T xs] -> carries, [T ys]   T is blocked; a carry keeps its factors over all iterations
    while  consts, carries -> carries                   the test for another iteration is the same in all shards
    cond   index, operands -> results                   branches agree on the factors of their operands and results

Gradients of weights that the body sums over examples, in a carry or for each iteration, are partial sums.
Flops: those of the body for each iteration of scan, for one iteration of while; those of the largest branch of cond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import JaxprEqn

from minialpa.rules.body_factors import Links, Node, Outcome, Region, follow, link, local_jaxpr, node_of, zero_arrays
from minialpa.rules.common import FactorTable, Shapes
from minialpa.rules.factors import Dims, Factors, cached, rule
from minialpa.tracing.jaxprs import Atom, FlatJaxpr, flatten_calls, fresh_var, is_literal, shape_of


@dataclass(frozen=True, slots=True)
class _Control:
    """The region of a control flow equation, and what splitting each group of its inputs and results does.

    Attributes:
        region: the equations inside.
        links: their groups.
        outcomes: for each group that may be split; all others are blocked.
        part_flops: floating point operations of one run of each part of the region.
    """

    region: Region
    links: Links
    outcomes: dict[Node, Outcome]
    part_flops: tuple[float, ...]


def _control(region: Region) -> _Control:
    links, zeros = link(region), zero_arrays(region)
    boundary = [*region.inputs, *(atom for atoms in region.results for atom in atoms)]
    groups = dict.fromkeys(group for atom in boundary for group in links.groups(atom))

    outcomes: dict[Node, Outcome] = {}
    for group in groups:
        if group not in links.blocked and links.sizes[group] > 1:
            outcome = follow(region, links, group, zeros)
            if outcome is not None:
                outcomes[group] = outcome

    flops = tuple(sum(region.factors[id(eqn)].flops for eqn in part.eqns) for part in region.parts)
    return _Control(region, links, outcomes, flops)


def _inlined(closed: Any, inputs: Sequence[Atom] | None = None) -> FlatJaxpr:
    """The program of a closed jaxpr with calls inlined, on `inputs` instead of its own variables if they are given."""
    flat = flatten_calls(getattr(closed, "jaxpr", closed), tuple(getattr(closed, "consts", ())))
    if inputs is None:
        return flat
    renamed = dict(zip(flat.invars, inputs, strict=True))

    def read(atom: Atom) -> Atom:
        return atom if is_literal(atom) else renamed.get(atom, atom)

    eqns = tuple(eqn.replace(invars=[read(atom) for atom in eqn.invars]) for eqn in flat.eqns)
    return replace(flat, invars=tuple(inputs), eqns=eqns, outvars=tuple(read(atom) for atom in flat.outvars))


# Planning asks for the factors of an equation several times. Jaxprs are compared by identity.
_remember = cached(maxsize=256)


@_remember
def _scan_control(body: Any, n_consts: int, n_carry: int) -> _Control:
    flat = _inlined(body)
    carried = tuple((i, n_consts + i) for i in range(n_carry))
    results = tuple((atom,) for atom in flat.outvars)
    return _control(Region(parts=(flat,), inputs=flat.invars, results=results, carried=carried))


@_remember
def _while_control(condition: Any, body: Any, n_condition_consts: int, n_body_consts: int) -> _Control:
    flat = _inlined(body)
    # Condition and body have constants of their own, and share the carries.
    consts = tuple(fresh_var(var.aval) for var in _inlined(condition).invars[:n_condition_consts])
    test = _inlined(condition, (*consts, *flat.invars[n_body_consts:]))
    n_consts = n_condition_consts + n_body_consts

    return _control(
        Region(
            parts=(test, flat),
            inputs=(*consts, *flat.invars),
            results=tuple((atom,) for atom in flat.outvars),
            carried=tuple((i, n_consts + i) for i in range(len(flat.outvars))),
            tests=test.outvars,
        )
    )


@_remember
def _cond_control(branches: tuple[Any, ...]) -> _Control:
    first = _inlined(branches[0])
    parts = (first, *(_inlined(branch, first.invars) for branch in branches[1:]))
    results = tuple(zip(*(part.outvars for part in parts), strict=True))
    return _control(Region(parts=parts, inputs=first.invars, results=results))


@dataclass(slots=True)
class _Boundary:
    """Gives the dimensions of a control flow equation's operands and results their factors, one for each group.

    Attributes:
        control: the equation's region.
        table: the factors of the equation.
        factors: the factor of each group that has one so far.
    """

    control: _Control
    table: FactorTable
    factors: dict[Node, int]

    def dims(self, atom: Atom) -> Dims:
        """Factors of an input or result of the region."""
        return tuple(self._dim(node_of(atom, d), size) for d, size in enumerate(shape_of(atom)))

    def _dim(self, node: Node, size: int) -> tuple[int, ...]:
        group = self.control.links.find(node)
        outcome = self.control.outcomes.get(group)
        if outcome is None or size <= 1:
            return self.table.dim(size, blocked=size > 1)

        # A group can be cut into at most `n_blocks`; what is left of the dimension stays together.
        n_blocks = self.control.links.sizes[group]
        if group not in self.factors:
            (self.factors[group],) = self.table.dim(n_blocks, reduction=self._reduction(outcome))
        rest = self.table.dim(size // n_blocks, blocked=True) if size != n_blocks else ()
        return (self.factors[group], *rest)

    @staticmethod
    def _reduction(outcome: Outcome) -> Any:
        # A factor of operands that no result depends on counts as reduced, without partial results.
        return outcome.reduction or (None if "split" in outcome.results else "sum")

    def build(self, eqn: JaxprEqn, operands: Sequence[Dims], results: Sequence[Dims], flops: float) -> Factors:
        """The factors of the equation, whose last operands are the inputs of the region."""
        n_before = len(operands) - len(self.control.region.inputs)
        outcomes = {f: self.control.outcomes[group] for group, f in self.factors.items()}
        reduced = {f: outcome for f, outcome in outcomes.items() if f in self.table.reductions}
        return replace(
            self.table.build(eqn, operands, results, flops=flops),
            unaffected=frozenset((f, r) for f, outcome in reduced.items() for r in outcome.replicated),
            once=frozenset((f, n_before + i) for f, outcome in outcomes.items() for i in outcome.sums),
        )


def _n_splits(control: _Control, local: Sequence[tuple[Atom, tuple[int, ...]]]) -> dict[Node, int]:
    """How many parts each group is cut into, from the local shapes of inputs and results."""
    n_splits: dict[Node, int] = {}
    for atom, shape in local:
        for d, (size, local_size) in enumerate(zip(shape_of(atom), shape, strict=True)):
            if local_size != size:
                n_splits[control.links.find(node_of(atom, d))] = size // local_size
    return n_splits


def _local(control: _Control, inputs: Shapes, results: Shapes) -> Callable[[int], Any]:
    """A function from the number of a part of the region to that part on shards of these shapes."""
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
    n_unstacked = n_consts + n_carry
    body_inputs = (*operands[:n_unstacked], *(shape[1:] for shape in operands[n_unstacked:]))
    body_results = (*results[:n_carry], *(shape[1:] for shape in results[n_carry:]))
    local = _local(_scan_control(eqn.params["jaxpr"], n_consts, n_carry), body_inputs, body_results)
    return dict(eqn.params, jaxpr=local(0))


@rule("scan", localize=_local_scan)
def _scan(eqn: JaxprEqn) -> Factors:
    n_consts, n_carry = scan_counts(eqn)
    control = _scan_control(eqn.params["jaxpr"], n_consts, n_carry)
    boundary = _Boundary(control, FactorTable(), {})
    time = boundary.table.dim(eqn.params["length"], blocked=True)
    inputs = [boundary.dims(atom) for atom in control.region.inputs]
    results = [boundary.dims(atom) for (atom,) in control.region.results]
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
    operands = [boundary.dims(atom) for atom in control.region.inputs]
    results = [boundary.dims(atom) for (atom,) in control.region.results]
    return boundary.build(eqn, operands, results, sum(control.part_flops))


def _local_cond(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    control = _cond_control(eqn.params["branches"])
    local = _local(control, operands[1:], results)
    return dict(eqn.params, branches=tuple(local(i) for i in range(len(control.region.parts))))


@rule("cond", localize=_local_cond)
def _cond(eqn: JaxprEqn) -> Factors:
    control = _cond_control(eqn.params["branches"])
    boundary = _Boundary(control, FactorTable(), {})
    operands = [boundary.dims(atom) for atom in control.region.inputs]
    results = [boundary.dims(atoms[0]) for atoms in control.region.results]
    index = boundary.table.dims(shape_of(eqn.invars[0]), blocked=True)
    return boundary.build(eqn, [index, *operands], results, max(control.part_flops))
