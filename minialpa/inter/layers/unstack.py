"""Unstacking: a step with scans over layers in, the step with a scan for each block of layers out.

A scan is one equation, and stacked weights are single arrays, so a stage cannot end inside. Cut into blocks of 3 and 2
rows,

    carry_1, ys[0:3] = scan(carry_0, xs[0:3])        carry_2, ys[3:5] = scan(carry_1, xs[3:5])

every stacked array (argument, residual, gradient, moment of the optimizer, new weight) is one array for each block, and
stages take blocks like other equations. A block of one row has no scan.

    scans                                one for each block, chained by the carry                  -> _cut_scan
    barriers                             one for each block, and one for arrays without a stack    -> _cut_barrier
    row by row, as most of the update    once for each block                                       -> _cut_rows
    reductions over the rows             of each block, then of the results of the blocks          -> _cut_rows
    anything else                        on the joined blocks                                      -> _cut_equation

`stacks` finds the stacked arrays, `row_blocks` has the variables of blocks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn, Var

from minialpa.errors import VerifyError
from minialpa.inter.layers.row_blocks import BlockedProgram, GroupKey, Owner, RowBlocks, block_layout
from minialpa.inter.layers.stacks import BlockwiseEquation, Stacks, find_stacks
from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, aval_of, fresh_var, is_literal, live_equations, renamed, scan_counts, shape_of
from minialpa.ir.op import Op, Origin
from minialpa.rules.factors import Reduction, combine
from minialpa.rules.known_rules import factors_of
from minialpa.rules.shards import localize
from minialpa.support.private_jax import changed_aval, in_scope, name_stack
from minialpa.tracing.flattening import flatten_calls
from minialpa.tracing.trace import LeafPart, TracedStep

#: The owner of equations that join or cut the results of the step: they belong to no forward group.
_OF_RESULTS = Owner(Origin(direction="other", group=None, layer=0), None)


@dataclass(frozen=True, slots=True)
class Unstacked:
    """A step in blocks of rows.

    `groups` has, for each forward group of `step`, its group and first row in the step with scans.
    """

    step: TracedStep
    groups: tuple[GroupKey, ...]


def unstack(traced: TracedStep, stacks: Stacks, blocks: Sequence[Sequence[int]], *, inline: bool = True) -> Unstacked:
    """The step with the rows of each stack in blocks.

    blocks: for each stack, the number of rows of each block.
    inline: whether a block of one row becomes its equations, without a scan.
    """
    program = BlockedProgram(block_layout(stacks, blocks))
    program.add_constants(traced.flat)

    inputs = _cut_inputs(program, traced)
    for i, (eqn, origin) in enumerate(zip(traced.flat.eqns, traced.origins, strict=True)):
        _cut_equation(program, eqn, origin, stacks.blockwise.get(i), inline=inline)
    outputs = _outputs(program, traced.flat.outvars, traced.out_paths)
    of_gradients = _outputs(program, traced.gradients, [""] * len(traced.gradients))
    gradients = tuple(leaf.atom for leaf in of_gradients if not is_literal(leaf.atom))
    return _finished_step(program, traced, inputs, outputs, gradients)


def with_row_blocks(traced: TracedStep, row_blocks: RowBlocks) -> Unstacked:
    """The step with its scans cut into these blocks of a plan. Raises VerifyError if they do not fit."""
    stacks = find_stacks(traced)
    if tuple(map(sum, row_blocks)) != stacks.lengths:
        raise VerifyError(
            "The plan was made for another model, as `plan.row_blocks` cuts scans over "
            f"{', '.join(str(sum(one)) for one in row_blocks)} layers in place of "
            f"{', '.join(map(str, stacks.lengths)) or 0} layers. Make a new plan of the step."
        )
    return unstack(traced, stacks, row_blocks)


# ---- equations -------------------------------------------------------------------------------------------------------


def _cut_equation(
    program: BlockedProgram, eqn: JaxprEqn, origin: Origin, cut: BlockwiseEquation | None, *, inline: bool
) -> None:
    """Write an equation in blocks; on joined blocks if `cut` is None."""
    if cut is None or len(program.layout.sizes[cut.stack]) == 1:
        owner = program.layout.owner(origin)
        program.add(eqn.replace(invars=[program.joined(v, owner) for v in eqn.invars]), owner)
    elif eqn.primitive.name == "scan":
        _cut_scan(program, eqn, origin, cut.stack, inline=inline)
    elif cut.factor is None:
        _cut_barrier(program, eqn, origin)
    else:
        _cut_rows(program, eqn, origin, cut.stack, cut.factor)


def _cut_scan(program: BlockedProgram, eqn: JaxprEqn, origin: Origin, stack: int, *, inline: bool) -> None:
    n_consts, n_carry = scan_counts(eqn)
    sizes = program.layout.sizes[stack]
    owner = program.layout.owner(origin)
    carry = [program.joined(v, owner) for v in eqn.invars[n_consts : n_consts + n_carry]]
    stacked = [program.blocks(v, owner) for v in eqn.invars[n_consts + n_carry :] if not is_literal(v)]
    body = _body(program, eqn) if inline and 1 in sizes else None

    # The carry passes through the blocks in the order of the scan's iterations.
    results: list[Sequence[Atom]] = [() for _ in sizes]
    for block in reversed(range(len(sizes))) if eqn.params["reverse"] else range(len(sizes)):
        here = program.layout.owner_of_block(origin, stack, block)
        consts = [program.near(v, stack, block, here) for v in eqn.invars[:n_consts]]
        operands = [*consts, *carry, *(blocks[block] for blocks in stacked)]
        if sizes[block] == 1 and body is not None:
            out = _one_iteration(program, body, operands, n_consts + n_carry, n_carry, here)
        else:
            unroll = min(eqn.params.get("unroll", 1), sizes[block])
            out = program.add_like(eqn, operands, here, dict(eqn.params, length=sizes[block], unroll=unroll))
        carry, results[block] = out[:n_carry], out[n_carry:]

    for v, last in zip(eqn.outvars[:n_carry], carry, strict=True):
        program.rename(v, last)
    for k, v in enumerate(eqn.outvars[n_carry:]):
        program.set_blocks(v, [of_block[k] for of_block in results])


def _body(program: BlockedProgram, eqn: JaxprEqn) -> Block:
    """The body of a scan, in the name scopes of the scan. Its constants become constants of the program."""
    # A forward and a backward scan share only residuals, and `jax.checkpoint` in a scan relies on that; without scans,
    # barriers have to ensure it.
    closed = eqn.params["jaxpr"]
    body = flatten_calls(closed.jaxpr, tuple(closed.consts), always_barriers=True)
    program.add_constants(body)
    scope = name_stack(eqn)
    return body.with_eqns([in_scope(one, f"{scope}/{name_stack(one)}") for one in body.eqns])


def _one_iteration(
    program: BlockedProgram, body: Block, operands: Sequence[Atom], n_plain: int, n_carry: int, owner: Owner
) -> list[Atom]:
    """The results of a scan of one row, computed by its body. The first `n_plain` operands have no rows."""
    rows = [program.only_row(block, owner) for block in operands[n_plain:]]
    env: dict[Var, Atom] = dict(zip(body.invars, [*operands[:n_plain], *rows], strict=True))
    for eqn in body.eqns:
        env.update(zip(eqn.outvars, program.add_copy(eqn, renamed(eqn.invars, env), owner), strict=True))
    results = renamed(body.outvars, env)
    return [*results[:n_carry], *(program.as_block(row, owner) for row in results[n_carry:])]


def _cut_barrier(program: BlockedProgram, eqn: JaxprEqn, origin: Origin) -> None:
    owner = program.layout.owner(origin)
    stacked: dict[int, list[tuple[tuple[Atom, ...], Var]]] = {}
    others: list[tuple[Atom, Var]] = []
    for v, result in zip(eqn.invars, eqn.outvars, strict=True):
        if program.layout.is_cut(v):
            stacked.setdefault(program.layout.stacks.stack_of[v], []).append((program.blocks(v, owner), result))
        else:
            others.append((program.joined(v, owner), result))

    for stack, operands in stacked.items():
        block_results = [
            program.add_like(eqn, list(of_block), program.layout.owner_of_block(origin, stack, block))
            for block, of_block in enumerate(zip(*(blocks for blocks, _ in operands), strict=True))
        ]
        for k, (_, result) in enumerate(operands):
            program.set_blocks(result, [of_block[k] for of_block in block_results])

    if others:
        program.add(eqn.replace(invars=[v for v, _ in others], outvars=[result for _, result in others]), owner)


def _cut_rows(program: BlockedProgram, eqn: JaxprEqn, origin: Origin, stack: int, factor: int) -> None:
    factors = factors_of(eqn)
    results: list[list[Var]] = []
    for block, n_rows in enumerate(program.layout.sizes[stack]):
        owner = program.layout.owner_of_block(origin, stack, block)
        operands = [
            program.blocks(v, owner)[block]
            if not is_literal(v) and dims[:1] == ((factor,),)
            else program.joined(v, owner)
            for v, dims in zip(eqn.invars, factors.operands, strict=True)
        ]
        # Parameters depend on the number of rows: a slice, for example, has its sizes there.
        sizes = (*factors.sizes[:factor], n_rows, *factors.sizes[factor + 1 :])
        results.append(program.add_like(eqn, operands, owner, localize(eqn, replace(factors, sizes=sizes), {})))

    for r, (v, dims) in enumerate(zip(eqn.outvars, factors.results, strict=True)):
        blocks = [of_block[r] for of_block in results]
        if dims[:1] == ((factor,),):
            program.set_blocks(v, blocks)
        else:
            program.rename(
                v, _combine_blocks(program, factors.reductions[factor], blocks, program.layout.owner(origin))
            )


def _combine_blocks(
    program: BlockedProgram, reduction: Reduction, partial_results: Sequence[Atom], owner: Owner
) -> Atom:
    pair = functools.partial(combine, reduction)
    return program.compute(reduction, lambda *xs: functools.reduce(pair, xs), *partial_results, owner=owner)


# ---- arguments and results -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Leaf:
    """An argument or result of the new step, and its part of the old leaf."""

    atom: Atom
    path: str
    part: LeafPart


def _cut_inputs(program: BlockedProgram, traced: TracedStep) -> list[_Leaf]:
    """The inputs of the new step, one for each block of a cut input. Sets these blocks in `program`."""
    inputs = []
    for i, (v, path) in enumerate(zip(traced.flat.invars, traced.in_paths, strict=True)):
        if not program.layout.is_cut(v):
            inputs.append(_Leaf(v, path, LeafPart(i, rows=None)))
            continue
        ranges = program.layout.ranges_of(v)
        blocks = [fresh_var(changed_aval(aval_of(v), shape=(stop - start, *shape_of(v)[1:]))) for start, stop in ranges]
        program.set_blocks(v, blocks)
        inputs += [_Leaf(block, path, LeafPart(i, rows)) for block, rows in zip(blocks, ranges, strict=True)]
    return inputs


def _outputs(program: BlockedProgram, atoms: Sequence[Atom], paths: Sequence[str]) -> list[_Leaf]:
    outputs = []
    for i, (v, path) in enumerate(zip(atoms, paths, strict=True)):
        if not program.layout.is_cut(v):
            outputs.append(_Leaf(program.joined(v, _OF_RESULTS), path, LeafPart(i, rows=None)))
            continue
        blocks = zip(program.blocks(v, _OF_RESULTS), program.layout.ranges_of(v), strict=True)
        outputs += [_Leaf(block, path, LeafPart(i, rows)) for block, rows in blocks]
    return outputs


def _replaced_arguments(
    old: Sequence[int | None], inputs: Sequence[_Leaf], outputs: Sequence[_Leaf]
) -> tuple[int | None, ...]:
    """For each result, the argument that is the same part of the leaf `old` of the result, or None."""
    number = {leaf.part: k for k, leaf in enumerate(inputs)}
    leaves = [(old[output.part.leaf], output.part.rows) for output in outputs]
    return tuple(None if leaf is None else number.get(LeafPart(leaf, rows)) for leaf, rows in leaves)


def _finished_step(
    program: BlockedProgram,
    traced: TracedStep,
    inputs: Sequence[_Leaf],
    outputs: Sequence[_Leaf],
    gradients: tuple[Var, ...],
) -> Unstacked:
    """The new step, without equations that no result needs; its forward groups are in the order of their keys."""
    is_live = live_equations(program.eqns, [leaf.atom for leaf in outputs])
    owners = tuple(itertools.compress(program.owners, is_live))
    groups = tuple(sorted({owner.group for owner in owners if owner.group is not None}))

    flat = Block(
        constvars=tuple(program.constvars),
        consts=tuple(program.consts),
        invars=tuple(leaf.atom for leaf in inputs),
        ops=_operations(itertools.compress(program.eqns, is_live), owners, groups),
        outvars=tuple(leaf.atom for leaf in outputs),
    )
    step = replace(
        traced,
        flat=flat,
        in_paths=tuple(leaf.path for leaf in inputs),
        out_paths=tuple(leaf.path for leaf in outputs),
        batch_dims=tuple(traced.batch_dims[leaf.part.leaf] for leaf in inputs),
        aliases=_replaced_arguments(traced.aliases, inputs, outputs),
        layouts=_replaced_arguments(traced.layouts, inputs, outputs),
        gradients=gradients,
        in_parts=tuple(leaf.part for leaf in inputs),
        out_parts=tuple(leaf.part for leaf in outputs),
    )
    return Unstacked(step, groups)


def _operations(eqns: Iterable[JaxprEqn], owners: Sequence[Owner], groups: Sequence[GroupKey]) -> tuple[Op, ...]:
    number: dict[GroupKey | None, int | None] = {group: i for i, group in enumerate(groups)}
    number[None] = None
    pairs = zip(eqns, owners, strict=True)
    return tuple(Op(eqn, origin=replace(owner.origin, group=number[owner.group])) for eqn, owner in pairs)
