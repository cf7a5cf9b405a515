"""Stacks: a traced step in, its arrays with one row for each layer of a scan out (`find_stacks`).

A scan over L layers reads stacked weights [L, ...] and writes stacked residuals. Its backward scan reads both and
writes stacked gradients, from which the update computes new weights, row by row. All of these arrays are one *stack*:
dimension 0 is the number of the layer. In an equation that keeps the rows apart, dimension 0 is a named factor of its
own, which may be cut into blocks of any lengths.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.batching import is_barrier
from minialpa.ir.equations import Atom, is_literal, operand_vars, scan_counts, shape_of, sub_jaxprs
from minialpa.rules.expensive import has_contraction, is_contraction
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of
from minialpa.support.disjoint_sets import DisjointSets
from minialpa.tracing.flattening import flatten_calls
from minialpa.tracing.trace import TracedStep


@dataclass(frozen=True, slots=True)
class BlockwiseEquation:
    """An equation that can be computed in blocks of the rows of `stack`.

    `factor` counts the rows; it is None for a scan and for a barrier, which are cut without factors.
    """

    stack: int
    factor: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The stacks of a step, numbered by their first scans.

    A stack is a set of arrays with one row for each layer of a scan: weights [L, n, n], their gradients and new values.

    Attributes:
        lengths: the number of rows of each stack.
        stack_of: the stack of each stacked variable.
        blockwise: by number, the equations that can be computed in blocks of rows.
        first_groups: the forward group of the first scan of each stack.
        scan_groups: the stack of each forward group that has a scan.
        weight_groups: the stack of each forward group that computes rows from weights alone, such as a cast.
        constants: the equation of each variable that is computed from literals alone, such as masks and angles. Jax
            takes these out of the bodies of scans.
    """

    lengths: tuple[int, ...] = ()
    stack_of: Mapping[Var, int] = field(default_factory=dict)
    blockwise: Mapping[int, BlockwiseEquation] = field(default_factory=dict)
    first_groups: tuple[int, ...] = ()
    scan_groups: Mapping[int, int] = field(default_factory=dict)
    weight_groups: Mapping[int, int] = field(default_factory=dict)
    constants: Mapping[Var, JaxprEqn] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _SharedRows:
    """Operands and results of one equation whose dimension 0 counts the same rows, along `factor` if not None."""

    factor: int | None
    arrays: tuple[Var, ...]


def find_stacks(traced: TracedStep) -> Stacks:
    """The stacks of a step. Scans of recurrent models are not stacks: their weights are the same in every iteration."""
    eqns = traced.flat.eqns
    varying = _dependent_on_batch(traced)
    scans = _scans_over_layers(traced, varying)
    if not scans:
        return Stacks()

    lengths = {eqns[i].params["length"] for i in scans}
    # Arrays with the same rows: in one equation, then in the step.
    shared = {i: found for i, eqn in enumerate(eqns) if (found := _shared_rows(eqn, lengths))}
    row_sets = _join_rows(traced, shared, lengths)
    first_scans = _first_scans(traced, scans, row_sets)
    number = {root: stack for stack, root in enumerate(first_scans)}

    stack_of = {v: number[root] for v in row_sets if (root := row_sets.find(v)) in number}
    n_rows = {stack: shape_of(v)[0] for v, stack in stack_of.items()}
    blockwise = _blockwise(shared, stack_of)
    scan_groups, weight_groups = _stacks_of_groups(traced, blockwise, varying)
    return Stacks(
        lengths=tuple(n_rows[stack] for stack in range(len(number))),
        stack_of=stack_of,
        blockwise=blockwise,
        first_groups=tuple(_forward_group(traced, i) for i in first_scans.values()),
        scan_groups=scan_groups,
        weight_groups=weight_groups,
        constants=_constants(traced),
    )


# ---- scans over layers -----------------------------------------------------------------------------------------------


def _dependent_on_batch(traced: TracedStep) -> set[Var]:
    varying = set(traced.examples)
    for eqn in traced.flat.eqns:
        if any(operand in varying for operand in operand_vars(eqn)):
            varying.update(eqn.outvars)
    return varying


def _scans_over_layers(traced: TracedStep, varying: Container[Var]) -> list[int]:
    """The forward scans that apply layers, such as x -> tanh(x @ w[l]), by number.

    varying: the variables that depend on the batch.
    """
    return [
        i
        for i, (eqn, origin) in enumerate(zip(traced.flat.eqns, traced.origins, strict=True))
        if origin.direction == "forward" and origin.group is not None and _applies_layers(eqn, varying)
    ]


def _applies_layers(eqn: JaxprEqn, varying: Container[Var]) -> bool:
    """Whether the equation is a scan that multiplies a matrix by stacked weights, or by values of weights alone."""
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2 or eqn.effects or not has_contraction(eqn):
        return False

    n_consts, n_carry = scan_counts(eqn)
    body = flatten_calls(eqn.params["jaxpr"].jaxpr, tuple(eqn.params["jaxpr"].consts))
    shared = {*body.constvars, *body.invars[:n_consts]}
    rows = zip(body.invars[n_consts + n_carry :], eqn.invars[n_consts + n_carry :], strict=True)
    weights = {row for row, stacked in rows if not is_literal(stacked) and stacked not in varying}
    return _multiplies(body.eqns, weights, shared)


def _multiplies(eqns: Sequence[JaxprEqn], weights: set[Var], shared: set[Var]) -> bool:
    """Whether the body of a scan multiplies a matrix by weights of a row.

    Grows both sets: `shared` by values of shared values alone, `weights` by values that also depend on a row's weights.
    """
    for eqn in eqns:
        operands = operand_vars(eqn)
        reads_weights = any(operand in weights for operand in operands)
        if reads_weights and has_contraction(eqn):
            return True

        if is_contraction(eqn):
            continue
        if reads_weights and all(operand in weights or operand in shared for operand in operands):
            weights.update(eqn.outvars)
        elif all(operand in shared for operand in operands):
            shared.update(eqn.outvars)
    return False


# ---- arrays with the same rows ---------------------------------------------------------------------------------------


def _shared_rows(eqn: JaxprEqn, lengths: Container[int]) -> list[_SharedRows]:
    """Sets of operands and results of an equation that have the same rows, of one of the `lengths`."""
    if eqn.primitive.name == "scan":
        stacked = _stacked_arrays(eqn)
        return [_SharedRows(None, stacked)] if eqn.params["length"] in lengths and stacked else []

    atoms = (*eqn.invars, *eqn.outvars)
    if eqn.effects or sub_jaxprs(eqn) or not any(_has_rows(atom, lengths) for atom in atoms):
        return []
    if is_barrier(eqn):
        pairs = zip(eqn.invars, eqn.outvars, strict=True)
        return [_SharedRows(None, (v, out)) for v, out in pairs if not is_literal(v) and _has_rows(v, lengths)]
    return _rows_shared_by_factors(factors_of(eqn), atoms, lengths)


def _stacked_arrays(eqn: JaxprEqn) -> tuple[Var, ...]:
    n_consts, n_carry = scan_counts(eqn)
    atoms: list[Atom] = [*eqn.invars[n_consts + n_carry :], *eqn.outvars[n_carry:]]
    return tuple(atom for atom in atoms if not is_literal(atom))


def _has_rows(atom: Atom, lengths: Container[int]) -> bool:
    shape = shape_of(atom)
    return bool(shape) and shape[0] in lengths


def _rows_shared_by_factors(factors: Factors, atoms: Sequence[Atom], lengths: Container[int]) -> list[_SharedRows]:
    """Arrays whose dimension 0 is a factor that can be cut."""
    arrays = (*factors.operands, *factors.results)
    firsts = dict.fromkeys(dims[0][0] for dims in arrays if dims and len(dims[0]) == 1)
    return [
        _SharedRows(
            f, tuple(v for v, dims in zip(atoms, arrays, strict=True) if dims[:1] == ((f,),) and not is_literal(v))
        )
        for f in firsts
        if factors.sizes[f] in lengths and _can_be_cut(factors, f)
    ]


def _can_be_cut(factors: Factors, f: int) -> bool:
    """Whether blocks of any lengths along factor `f` give blocks or partial reductions of every result.

    `f` has to be all of dimension 0 of each array that has `f`.
    """
    arrays = (*factors.operands, *factors.results)
    return (
        f not in factors.blocked
        and not any(f in dim and (d > 0 or dim != (f,)) for dims in arrays for d, dim in enumerate(dims))
        and all(dims[:1] == ((f,),) or factors.is_partial(f, r) for r, dims in enumerate(factors.results))
        and not any(factors.takes_part_once(f, k) for k in range(len(factors.operands)))
    )


def _join_rows(
    traced: TracedStep, shared: Mapping[int, Sequence[_SharedRows]], lengths: Container[int]
) -> DisjointSets[Var]:
    """Sets of variables with the same rows."""
    row_sets: DisjointSets[Var] = DisjointSets()
    for found in shared.values():
        for rows in found:
            for array in rows.arrays:
                row_sets.join(rows.arrays[0], array)

    # A result that replaces an argument has its rows.
    for result, replaced in zip(traced.flat.outvars, traced.layouts, strict=True):
        if replaced is not None and not is_literal(result) and _has_rows(result, lengths):
            row_sets.join(result, traced.flat.invars[replaced])
    return row_sets


# ---- stacks and what belongs to them ---------------------------------------------------------------------------------


def _first_scans(traced: TracedStep, scans: Sequence[int], row_sets: DisjointSets[Var]) -> dict[Var, int]:
    """The first scan of each stack, by the root of its row set. A stack has arguments, but no batch arguments."""
    batch = traced.examples
    of_batch = {row_sets.find(argument) for argument in batch}
    of_state = {row_sets.find(argument) for argument in traced.flat.invars if argument not in batch}

    first: dict[Var, int] = {}
    for i in scans:
        root = row_sets.find(_stacked_arrays(traced.flat.eqns[i])[0])
        if root in of_state and root not in of_batch:
            first.setdefault(root, i)
    return first


def _forward_group(traced: TracedStep, i: int) -> int:
    group = traced.origins[i].group
    assert group is not None, i
    return group


def _blockwise(
    shared: Mapping[int, Sequence[_SharedRows]], stack_of: Mapping[Var, int]
) -> dict[int, BlockwiseEquation]:
    """An equation with rows of several stacks belongs to the first of them."""
    blockwise: dict[int, BlockwiseEquation] = {}
    for i, found in shared.items():
        stacked = [rows for rows in found if rows.arrays[0] in stack_of]
        if stacked:
            blockwise[i] = BlockwiseEquation(stack_of[stacked[0].arrays[0]], stacked[0].factor)
    return blockwise


def _stacks_of_groups(
    traced: TracedStep, blockwise: Mapping[int, BlockwiseEquation], varying: Container[Var]
) -> tuple[dict[int, int], dict[int, int]]:
    """`Stacks.scan_groups` and `Stacks.weight_groups`."""
    scan_groups: dict[int, int] = {}
    from_weights: dict[int, int] = {}
    for i, cut in blockwise.items():
        eqn, origin = traced.flat.eqns[i], traced.origins[i]
        if origin.direction != "forward" or origin.group is None:
            continue
        if eqn.primitive.name == "scan":
            scan_groups[origin.group] = cut.stack
        if not any(result in varying for result in eqn.outvars):
            from_weights[origin.group] = cut.stack
    return scan_groups, {group: stack for group, stack in from_weights.items() if group not in scan_groups}


def _constants(traced: TracedStep) -> dict[Var, JaxprEqn]:
    equation_of: dict[Var, JaxprEqn] = {}
    for eqn, origin in zip(traced.flat.eqns, traced.origins, strict=True):
        is_plain = origin.direction == "other" and not eqn.effects and not sub_jaxprs(eqn)
        if is_plain and all(is_literal(operand) or operand in equation_of for operand in eqn.invars):
            equation_of.update((result, eqn) for result in eqn.outvars)
    return equation_of
