"""Control flow: `scan`, `while` and `cond`, by the rules of the equations inside them.

    scan   consts, carries, [T xs] -> carries, [T ys]   a carry keeps its factors over all iterations; T is blocked if
                                                        an iteration reads what an earlier one has changed
    while  consts, carries -> carries                   the test is the same in all shards, or each may end by itself
    cond   index, operands -> results                   branches agree on the factors of their operands and results

The equations inside are a region (`body_region`). Dimensions that are split together are a group (`body_groups`), and
each group that may be split (`body_outcomes`) is a factor. What is made inside by position, such as random bits, makes
a factor positional: the equation then runs through `on_shards`, whose positions are constants of the body.

Gradients of weights that the body sums over examples, in a carry or for each iteration, are partial sums.
Flops: those of the body for each iteration of scan, for one iteration of while; those of the largest branch of cond.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from minialpa.rules.body_groups import Groups, find_groups
from minialpa.rules.body_outcomes import Outcome, follow, zero_arrays
from minialpa.rules.body_region import Node, Region, node_of
from minialpa.rules.body_shards import BodyShards
from minialpa.rules.body_sums import summed_carries
from minialpa.rules.common import FactorTable
from minialpa.rules.factors import Dims, Factors, Shapes, Starts, cached, equal_operands, rule
from minialpa.tracing.jaxprs import (
    Atom,
    FlatJaxpr,
    eval_on_shards,
    flatten_calls,
    fresh_var,
    is_literal,
    scan_counts,
    shape_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Control:
    """The region of a control flow equation, and what splitting each group of its inputs and results does.

    Attributes:
        region: the equations inside.
        groups: the dimensions that are split together.
        outcomes: for each group that may be split; all others are blocked.
        part_flops: floating point operations of one run of each part of the region.
    """

    region: Region
    groups: Groups
    outcomes: dict[Node, Outcome]
    part_flops: tuple[float, ...]


def _control(region: Region) -> _Control:
    groups, zeros = find_groups(region), zero_arrays(region)
    at_boundary = dict.fromkeys(group for atom in (*region.inputs, *region.result_atoms) for group in groups.of(atom))

    outcomes: dict[Node, Outcome] = {}
    for group in at_boundary:
        if group not in groups.blocked and groups.sizes[group] > 1:
            outcome = follow(region, groups, group, zeros)
            if outcome is not None:
                outcomes[group] = outcome

    flops = tuple(sum(region.factors[id(eqn)].flops for eqn in part.eqns) for part in region.parts)
    return _Control(region=region, groups=groups, outcomes=outcomes, part_flops=flops)


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
def _while_control(
    condition: Any, body: Any, n_condition_consts: int, n_body_consts: int, equal: tuple[int, ...]
) -> _Control:
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
            equal=equal,
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
        group = self.control.groups.find(node)
        outcome = self.control.outcomes.get(group)
        if outcome is None or size <= 1:
            return self.table.dim(size, blocked=size > 1)

        # A group can be cut into at most `n_blocks`; what is left of the dimension stays together.
        n_blocks = self.control.groups.sizes[group]
        if group not in self.factors:
            is_positional = group in self.control.groups.positional
            reduction = self._reduction(outcome)
            (self.factors[group],) = self.table.dim(n_blocks, positional=is_positional, reduction=reduction)
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
                n_splits[control.groups.find(node_of(atom, d))] = size // local_size
    return n_splits


def _local(
    eqn: JaxprEqn, control: _Control, inputs: Shapes, results: Shapes, named: Callable[[Callable[[int], Any]], Any]
) -> dict[str, Any]:
    """The parameters of a control flow equation on shards of these shapes.

    Programs that depend on where their shards begin are not known yet. A parameter `shards` says how they are cut; no
    primitive has such a parameter, so the equation cannot run before `on_shards` has put programs in its place.

    named: from a function that gives the part of a number on shards to the parameters that hold these parts.
    """
    atoms = [*control.region.inputs, *(atoms[0] for atoms in control.region.results)]
    n_splits = _n_splits(control, list(zip(atoms, (*inputs, *results), strict=True)))
    shards = BodyShards(region=control.region, groups=control.groups, n_splits=n_splits, starts={})
    if not control.groups.positional.isdisjoint(n_splits):
        return dict(eqn.params, shards=shards)
    return dict(eqn.params, **named(shards.program))


def _started(shards: BodyShards, starts: Starts, n_before: int) -> BodyShards:
    """The shards with the blocks at which they begin, as int32s.

    n_before: number of operands before those that are inputs of the region.
    """
    groups, region = shards.groups, shards.region
    known: dict[Node, Any] = {}
    results = (atoms[0] for atoms in region.results)
    for atom, dims in zip((*region.inputs, *results), (*starts.operands[n_before:], *starts.results), strict=True):
        # A stack has the dimension of the iterations before those of a slice.
        own = dims[len(dims) - len(shape_of(atom)) :]
        for d, start in enumerate(own):
            group = groups.find(node_of(atom, d))
            if shape_of(atom)[d] > 1 and group in shards.n_splits and group in groups.positional:
                known[group] = jnp.asarray(start, np.int32)
    return replace(shards, starts=known)


def _local_scan(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    n_consts, n_carry = scan_counts(eqn)
    n_unstacked = n_consts + n_carry
    body_inputs = (*operands[:n_unstacked], *(shape[1:] for shape in operands[n_unstacked:]))
    body_results = (*results[:n_carry], *(shape[1:] for shape in results[n_carry:]))
    stacked = (*operands[n_unstacked:], *results[n_carry:])
    length = stacked[0][0] if stacked else eqn.params["length"]
    control = _scan_control(eqn.params["jaxpr"], n_consts, n_carry)
    named = lambda part: {"jaxpr": part(0)}  # noqa: E731
    return _local(eqn, control, body_inputs, body_results, named) | {"length": length}


def _scan_on_shards(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], starts: Starts) -> list[Any]:
    shards: BodyShards | None = params.get("shards")
    if shards is None:
        return eval_on_shards(eqn, operands, params)

    shards = _started(shards, starts, 0)
    n_consts, n_carry = scan_counts(eqn)
    consts, stacks = operands[:n_consts], operands[n_consts + n_carry :]

    def iteration(carry: Any, slices: Any) -> Any:
        results = shards.run(0, [*consts, *carry, *slices])
        return results[:n_carry], results[n_carry:]

    first = list(operands[n_consts : n_consts + n_carry])
    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(iteration, first, list(stacks), **how)
    return [*carry, *stacked]


@rule("scan", localize=_local_scan, on_shards=_scan_on_shards)
def _scan(eqn: JaxprEqn) -> Factors:
    n_consts, n_carry = scan_counts(eqn)
    length = eqn.params["length"]
    control = _scan_control(eqn.params["jaxpr"], n_consts, n_carry)
    boundary = _Boundary(control, FactorTable(), {})
    sums = _sums_over_time(eqn, control)
    time = boundary.table.dim(length, blocked=sums is None, reduction="sum" if sums else None)

    # The body has slices of what the scan has stacks of.
    slices = [boundary.dims(atom) for atom in control.region.inputs]
    operands = [dims if k < n_consts + n_carry else (time, *dims) for k, dims in enumerate(slices)]
    made = [boundary.dims(atom) for (atom,) in control.region.results]
    results = [dims if r < n_carry else (time, *dims) for r, dims in enumerate(made)]
    factors = boundary.build(eqn, operands, results, length * control.part_flops[0])
    if not sums:
        return factors

    # Shards in time begin each sum once, and pass the other carries unchanged.
    (f,) = time
    constant = {(f, r) for r in range(n_carry) if r not in sums}
    once = {(f, n_consts + i) for i in sums}
    return replace(factors, unaffected=factors.unaffected | constant, once=factors.once | once)


def _sums_over_time(eqn: JaxprEqn, control: _Control) -> frozenset[int] | None:
    """The carries of a scan that are sums over its iterations, if these may run apart; None if they may not."""
    n_consts, n_carry = scan_counts(eqn)
    # A scan may be a loop over the examples of a batch, as `lax.map` is. Nothing else has a position in time.
    sums = summed_carries(control.region)
    if sums is None or eqn.effects or len(eqn.invars) == n_consts + n_carry:
        return None
    # Without sums and stacks of results, no result would tell that iterations are missing.
    return sums if sums or len(eqn.outvars) > n_carry else None


def _while_parts(eqn: JaxprEqn) -> _Control:
    params = eqn.params
    n_consts = params["cond_nconsts"], params["body_nconsts"]
    # Initial values of carries may be equal; carries are not.
    constants = equal_operands(eqn)[: sum(n_consts)]
    equal = (*constants, *range(len(constants), len(eqn.invars)))
    return _while_control(params["cond_jaxpr"], params["body_jaxpr"], *n_consts, equal)


def _local_while(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    named = lambda part: {"cond_jaxpr": part(0), "body_jaxpr": part(1)}  # noqa: E731
    return _local(eqn, _while_parts(eqn), operands, results, named)


def _while_on_shards(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], starts: Starts) -> list[Any]:
    shards: BodyShards | None = params.get("shards")
    if shards is None:
        return eval_on_shards(eqn, operands, params)

    # The blocks at which shards begin are constants of the test and of the body. Under vmap, the test has a result for
    # each example, which `lax.while_loop` does not take.
    known = _started(shards, starts, 0).starts
    begins = list(known.values())
    n_consts, n_test = len(begins), params["cond_nconsts"]

    def part(i: int) -> Any:
        def run(*args: Any) -> list[Any]:
            own = dict(zip(known, args[:n_consts], strict=True))
            return replace(shards, starts=own).run(i, args[n_consts:])

        return jax.make_jaxpr(run)(*begins, *shards.structs(shards.region.parts[i].invars))

    local = {name: value for name, value in params.items() if name != "shards"}
    local |= {"cond_jaxpr": part(0), "body_jaxpr": part(1)}
    local |= {"cond_nconsts": n_test + n_consts, "body_nconsts": params["body_nconsts"] + n_consts}
    return eval_on_shards(eqn, [*begins, *operands[:n_test], *begins, *operands[n_test:]], local)


@rule("while", localize=_local_while, on_shards=_while_on_shards, by_equal_operands=True)
def _while(eqn: JaxprEqn) -> Factors:
    control = _while_parts(eqn)
    boundary = _Boundary(control, FactorTable(), {})
    operands = [boundary.dims(atom) for atom in control.region.inputs]
    results = [boundary.dims(atom) for (atom,) in control.region.results]
    return boundary.build(eqn, operands, results, sum(control.part_flops))


def _local_cond(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    control = _cond_control(eqn.params["branches"])
    n_branches = len(control.region.parts)
    named = lambda part: {"branches": tuple(part(i) for i in range(n_branches))}  # noqa: E731
    return _local(eqn, control, operands[1:], results, named)


def _cond_on_shards(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], starts: Starts) -> list[Any]:
    shards: BodyShards | None = params.get("shards")
    if shards is None:
        return eval_on_shards(eqn, operands, params)

    index, *inputs = operands
    shards = _started(shards, starts, 1)
    n_branches = len(shards.region.parts)
    branches = [functools.partial(lambda i, *args: shards.run(i, args), i) for i in range(n_branches)]
    return list(lax.switch(index, branches, *inputs))


@rule("cond", localize=_local_cond, on_shards=_cond_on_shards)
def _cond(eqn: JaxprEqn) -> Factors:
    control = _cond_control(eqn.params["branches"])
    boundary = _Boundary(control, FactorTable(), {})
    operands = [boundary.dims(atom) for atom in control.region.inputs]
    results = [boundary.dims(atoms[0]) for atoms in control.region.results]
    index = boundary.table.dims(shape_of(eqn.invars[0]), blocked=True)
    return boundary.build(eqn, [index, *operands], results, max(control.part_flops))
