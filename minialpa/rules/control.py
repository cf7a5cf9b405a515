"""Rules of control flow: `scan`, `while` and `cond`, from the rules of the equations inside them.

    scan   consts, carries, [T xs] -> carries, [T ys]   a carry keeps its factors over all iterations; T is blocked if
                                                        iterations depend on each other
    while  consts, carries -> carries                   the test is equal in all shards, or each exits by itself
    cond   index, operands -> results                   branches agree on the factors of operands and results

The equations inside are a region. Its dimensions that are split together are a group (`body_groups`), and each group
that may be split (`body_outcomes`) is a factor. Arrays that depend on positions, such as random bits, make a factor
positional: the equation runs through `on_shards`.

Flops: of the body times the iterations of scan, of one iteration of while, of the largest branch of cond.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, fresh_var, operand_vars, reading, renamed, scan_counts, shape_of
from minialpa.rules.body_factors import BodyShards, BodySplits, BoundaryTable, body_splits, local_params, started
from minialpa.rules.body_groups import Region
from minialpa.rules.factors import Factors, Shapes
from minialpa.rules.known_rules import OnShards, Starts, cached, equal_operands, rule
from minialpa.tracing.evaluation import eval_on_shards
from minialpa.tracing.flattening import flatten_calls


def _inlined_program(closed: Any, inputs: Sequence[Atom] | None = None) -> Block:
    flat = flatten_calls(getattr(closed, "jaxpr", closed), tuple(getattr(closed, "consts", ())))
    if inputs is None:
        return flat
    names = dict(zip(flat.invars, inputs, strict=True))
    flat = flat.with_eqns([reading(eqn, names) for eqn in flat.eqns])
    return replace(flat, invars=tuple(inputs), outvars=tuple(renamed(flat.outvars, names)))


# Jaxprs compare by identity.
_remember = cached(maxsize=256)

#: (equation, operands on a shard, parameters, region with known positions) -> results on the shard.
_Run = Callable[[JaxprEqn, Sequence[Any], Mapping[str, Any], BodyShards], Sequence[Any]]


def _by_position(run: _Run) -> OnShards:
    """`run`, if the parameters leave open the positions on which programs depend."""

    def on_shards(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], starts: Starts) -> Sequence[Any]:
        if "shards" not in params:
            return eval_on_shards(eqn, operands, params)
        return run(eqn, operands, params, started(params["shards"], starts))

    return on_shards


# ---- scan -----------------------------------------------------------------------------------------------------------


@_remember
def _scan_splits(body: Any, n_consts: int, n_carry: int) -> BodySplits:
    flat = _inlined_program(body)
    carried = tuple((i, n_consts + i) for i in range(n_carry))
    results = tuple((atom,) for atom in flat.outvars)
    return body_splits(Region(parts=(flat,), inputs=flat.invars, results=results, carried=carried))


def _local_scan(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    n_consts, n_carry = scan_counts(eqn)
    n_unstacked = n_consts + n_carry

    # The body has slices of the scan's stacks.
    body_inputs = (*operands[:n_unstacked], *(shape[1:] for shape in operands[n_unstacked:]))
    body_results = (*results[:n_carry], *(shape[1:] for shape in results[n_carry:]))
    stacked = (*operands[n_unstacked:], *results[n_carry:])
    length = stacked[0][0] if stacked else eqn.params["length"]

    splits = _scan_splits(eqn.params["jaxpr"], n_consts, n_carry)
    params_of = lambda program: {"jaxpr": program(0)}  # noqa: E731
    return local_params(eqn, splits, body_inputs, body_results, params_of) | {"length": length}


def _run_scan(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], shards: BodyShards) -> list[Any]:
    n_consts, n_carry = scan_counts(eqn)
    consts, stacks = operands[:n_consts], operands[n_consts + n_carry :]

    def iteration(carry: Any, slices: Any) -> Any:
        results = shards.run(0, [*consts, *carry, *slices])
        return results[:n_carry], results[n_carry:]

    first = list(operands[n_consts : n_consts + n_carry])
    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(iteration, first, list(stacks), **how)
    return [*carry, *stacked]


@rule("scan", localize=_local_scan, on_shards=_by_position(_run_scan))
def _scan(eqn: JaxprEqn) -> Factors:
    n_consts, n_carry = scan_counts(eqn)
    length = eqn.params["length"]
    splits = _scan_splits(eqn.params["jaxpr"], n_consts, n_carry)
    boundary = BoundaryTable(splits)
    sums = _sums_over_time(eqn, splits)
    time = boundary.table.dim(length, blocked=sums is None, reduction="sum" if sums else None)

    slices = [boundary.dims(atom) for atom in splits.region.inputs]
    operands = [dims if k < n_consts + n_carry else (time, *dims) for k, dims in enumerate(slices)]
    made = [boundary.dims(atom) for (atom,) in splits.region.results]
    results = [dims if r < n_carry else (time, *dims) for r, dims in enumerate(made)]
    factors = boundary.build(eqn, operands, results, length * splits.part_flops[0])
    if not sums:
        return factors

    # The initial value of a sum counts in one shard of the iterations.
    (f,) = time
    constant = {(f, r) for r in range(n_carry) if r not in sums}
    counted_once = {(f, n_consts + i) for i in sums}
    return replace(factors, unaffected=factors.unaffected | constant, counted_once=factors.counted_once | counted_once)


def _sums_over_time(eqn: JaxprEqn, splits: BodySplits) -> frozenset[int] | None:
    """None if iterations depend on each other."""
    n_consts, n_carry = scan_counts(eqn)
    sums = _summed_carries(splits.region)
    if sums is None or eqn.effects or len(eqn.invars) == n_consts + n_carry:
        return None
    # With neither sums nor stacks, no result would have the factor.
    return sums if sums or len(eqn.outvars) > n_carry else None


# ---- while ----------------------------------------------------------------------------------------------------------


@_remember
def _while_splits(
    condition: Any, body: Any, n_condition_consts: int, n_body_consts: int, equal: tuple[int, ...]
) -> BodySplits:
    """`equal` as in `Region`."""
    flat = _inlined_program(body)
    # Test and body share the carries, not the constants.
    consts = tuple(fresh_var(var.aval) for var in _inlined_program(condition).invars[:n_condition_consts])
    test = _inlined_program(condition, (*consts, *flat.invars[n_body_consts:]))
    n_consts = n_condition_consts + n_body_consts

    return body_splits(
        Region(
            parts=(test, flat),
            inputs=(*consts, *flat.invars),
            results=tuple((atom,) for atom in flat.outvars),
            carried=tuple((i, n_consts + i) for i in range(len(flat.outvars))),
            tests=test.outvars,
            equal=equal,
        )
    )


def _splits_of_while(eqn: JaxprEqn) -> BodySplits:
    params = eqn.params
    n_consts = params["cond_nconsts"], params["body_nconsts"]
    # Equal initial values do not make carries equal.
    constants = equal_operands(eqn)[: sum(n_consts)]
    equal = (*constants, *range(len(constants), len(eqn.invars)))
    return _while_splits(params["cond_jaxpr"], params["body_jaxpr"], *n_consts, equal)


def _local_while(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    params_of = lambda program: {"cond_jaxpr": program(0), "body_jaxpr": program(1)}  # noqa: E731
    return local_params(eqn, _splits_of_while(eqn), operands, results, params_of)


def _run_while(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], shards: BodyShards) -> list[Any]:
    # Positions are constants. `lax.while_loop` takes no test for each example, as under vmap.
    known = shards.starts
    begins = list(known.values())
    n_consts, n_test = len(begins), params["cond_nconsts"]

    def part(i: int) -> Any:
        def run(*args: Any) -> list[Any]:
            known_consts = dict(zip(known, args[:n_consts], strict=True))
            return replace(shards, starts=known_consts).run(i, args[n_consts:])

        return jax.make_jaxpr(run)(*begins, *shards.structs(shards.region.parts[i].invars))

    local = {name: value for name, value in params.items() if name != "shards"}
    local |= {"cond_jaxpr": part(0), "body_jaxpr": part(1)}
    local |= {"cond_nconsts": n_test + n_consts, "body_nconsts": params["body_nconsts"] + n_consts}
    return eval_on_shards(eqn, [*begins, *operands[:n_test], *begins, *operands[n_test:]], local)


@rule("while", localize=_local_while, on_shards=_by_position(_run_while), by_equal_operands=True)
def _while(eqn: JaxprEqn) -> Factors:
    splits = _splits_of_while(eqn)
    boundary = BoundaryTable(splits)
    operands = [boundary.dims(atom) for atom in splits.region.inputs]
    results = [boundary.dims(atom) for (atom,) in splits.region.results]
    return boundary.build(eqn, operands, results, sum(splits.part_flops))


# ---- cond -----------------------------------------------------------------------------------------------------------


@_remember
def _cond_splits(branches: tuple[Any, ...]) -> BodySplits:
    first = _inlined_program(branches[0])
    parts = (first, *(_inlined_program(branch, first.invars) for branch in branches[1:]))
    results = tuple(zip(*(part.outvars for part in parts), strict=True))
    return body_splits(Region(parts=parts, inputs=first.invars, results=results))


def _local_cond(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    splits = _cond_splits(eqn.params["branches"])
    n_branches = len(splits.region.parts)
    params_of = lambda program: {"branches": tuple(program(i) for i in range(n_branches))}  # noqa: E731
    return local_params(eqn, splits, operands[1:], results, params_of)


def _run_cond(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], shards: BodyShards) -> list[Any]:
    index, *inputs = operands
    n_branches = len(shards.region.parts)
    branches = [functools.partial(lambda i, *args: shards.run(i, args), i) for i in range(n_branches)]
    return list(lax.switch(index, branches, *inputs))


@rule("cond", localize=_local_cond, on_shards=_by_position(_run_cond))
def _cond(eqn: JaxprEqn) -> Factors:
    splits = _cond_splits(eqn.params["branches"])
    boundary = BoundaryTable(splits)
    operands = [boundary.dims(atom) for atom in splits.region.inputs]
    results = [boundary.dims(atoms[0]) for atoms in splits.region.results]
    index = boundary.table.dims(shape_of(eqn.invars[0]), blocked=True)
    return boundary.build(eqn, [index, *operands], results, max(splits.part_flops))


def _summed_carries(region: Region) -> frozenset[int] | None:
    """The carries that are sums over iterations, if all others pass unchanged; else None.

    No iteration reads them, so iterations may run in any order.
    """
    (body,) = region.parts
    readers: dict[Atom, list[JaxprEqn]] = defaultdict(list)
    for eqn in body.eqns:
        for atom in operand_vars(eqn):
            readers[atom].append(eqn)

    sums = set()
    for r, i in region.carried:
        if region.results[r][0] is region.inputs[i]:
            continue
        if not _is_summed(region.inputs[i], region.results[r][0], readers, [atom for (atom,) in region.results]):
            return None
        sums.add(r)
    return frozenset(sums)


def _is_summed(carry: Atom, new: Atom, readers: Mapping[Atom, list[JaxprEqn]], results: Sequence[Atom]) -> bool:
    """Whether its next value is the carry plus summands."""
    value = carry
    while not any(value is result for result in results):
        # Exactly one operand of one addition must read it.
        if [eqn.primitive.name for eqn in readers.get(value, [])] not in (["add"], ["add_any"]):
            return False
        value = readers[value][0].outvars[0]
    return value is new and value not in readers and sum(value is result for result in results) == 1
