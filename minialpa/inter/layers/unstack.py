"""Unstacking: a step with scans over layers in, the same step with each scan cut into scans over blocks of layers out.

A scan is one equation, and stacked weights are single arrays, so a stage cannot end inside. Cut into blocks, with

    carry_1, ys[0:3] = scan(carry_0, xs[0:3])        carry_2, ys[3:5] = scan(carry_1, xs[3:5])

for blocks of 3 and 2 rows, every stacked array (argument, residual, gradient, moment of the optimizer, new weight) is
one array for each block, and blocks go to stages like other equations. A block of one row has no scan. What is computed
row by row, as most of the update, is computed for each block; reductions over the rows leave a part for each block,
which are combined; anything else puts the blocks together again. See `stacks` for what is stacked.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.errors import VerifyError
from minialpa.inter.layers.stacks import Stacks, find_stacks
from minialpa.rules.control import scan_counts
from minialpa.rules.factors import factors_of, localize
from minialpa.tracing.jaxprs import (
    Atom,
    EquationMaker,
    FlatJaxpr,
    aval_of,
    flatten_calls,
    fresh_var,
    is_literal,
    live_equations,
    shape_of,
    unary_equation,
)
from minialpa.tracing.trace import Origin, Part, TracedStep

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_COMBINE: Mapping[str, Callable[[Any, Any], Any]] = {
    "and": operator.and_,
    "max": lax.max,
    "min": lax.min,
    "or": operator.or_,
    "prod": operator.mul,
    "sum": operator.add,
}

#: A forward group of the step with scans, and the first of its rows that a group of the new step has.
GroupKey = tuple[int, int]
#: For each stack, the rows of each of its blocks.
RowBlocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Unstacked:
    """A step in blocks of rows, and what each of its forward groups was."""

    step: TracedStep
    groups: tuple[GroupKey, ...]


def unstack(traced: TracedStep, stacks: Stacks, blocks: Sequence[Sequence[int]], *, inline: bool = True) -> Unstacked:
    """`blocks[s]`: rows of each block of stack s. Without `inline`, blocks of one row are scans too."""
    for s, (sizes, length) in enumerate(zip(blocks, stacks.lengths, strict=True)):
        assert sum(sizes) == length and min(sizes) > 0, (s, sizes, length)
    return _Unstacker(traced, stacks, blocks, inline).run()


def with_row_blocks(traced: TracedStep, row_blocks: RowBlocks) -> Unstacked:
    """The step with its scans cut into these blocks of a plan. Raises VerifyError where they do not fit."""
    stacks = find_stacks(traced)
    if tuple(map(sum, row_blocks)) != stacks.lengths:
        raise VerifyError(
            f"`plan.row_blocks` cuts scans of {', '.join(str(sum(sizes)) for sizes in row_blocks)} layers and the "
            f"model has scans of {', '.join(map(str, stacks.lengths)) or 'none'}: it is another model. Plan it anew."
        )
    return unstack(traced, stacks, row_blocks)


class _Unstacker:
    def __init__(self, traced: TracedStep, stacks: Stacks, blocks: Sequence[Sequence[int]], inline: bool) -> None:
        self.traced, self.stacks, self.blocks, self.inline = traced, stacks, blocks, inline
        self.starts = [tuple(itertools.accumulate(sizes, initial=0))[:-1] for sizes in blocks]
        self.eqns: list[JaxprEqn] = []
        self.origins: list[Origin] = []
        self.keys: list[GroupKey | None] = []
        self.pieces: dict[Var, tuple[Atom, ...]] = {}  # blocks of a stacked variable
        self.whole: dict[Var, Atom] = {}  # other variables that have a new name, and blocks put together again
        self.row: dict[Var, Atom] = {}  # the row of a block that has one
        self.constvars: list[Var] = list(traced.flat.constvars)
        self.consts: list[Any] = list(traced.flat.consts)
        self.near: dict[tuple[Var, int, int], Var] = {}  # a fixed value's copy for a block of a stack
        self.origin = Origin("other", None, 0)
        self.key: GroupKey | None = None
        self.maker = EquationMaker()
        self.squeeze = unary_equation(lambda x: lax.squeeze(x, (0,)))
        self.expand = unary_equation(_as_one_row)

    def run(self) -> Unstacked:
        inputs = self._inputs()
        for i, eqn in enumerate(self.traced.flat.eqns):
            self.origin = self.traced.origins[i]
            cut = self.stacks.cuts.get(i)
            self._place(None, 0)
            if cut is None or len(self.blocks[cut.stack]) == 1:
                self._add(eqn.replace(invars=[self._whole(v) for v in eqn.invars]))
            elif eqn.primitive.name == "scan":
                self._cut_scan(eqn, cut.stack)
            elif cut.factor is None:
                self._cut_barrier(eqn)
            else:
                self._cut_rows(eqn, cut.stack, cut.factor)
        return self._result(inputs)

    # ---- where equations belong -----------------------------------------------------------------------------------

    def _place(self, stack: int | None, block: int) -> None:
        """What is added from now on is for this block of the equation at hand; or for all of it."""
        group = self.origin.group
        if group is None:
            self.key = None
        elif stack is not None and group in self.stacks.weight_groups:
            self.key = (self.stacks.first_groups[stack], self.starts[stack][block])
        elif stack is not None and group in self.stacks.scan_groups:
            self.key = (group, self.starts[stack][block])
        else:
            self.key = (group, 0)

    def _add(self, eqn: JaxprEqn) -> list[Var]:
        self.eqns.append(eqn)
        self.origins.append(self.origin)
        self.keys.append(self.key)
        return list(eqn.outvars)

    def _compute(self, key: Hashable, fun: Callable[..., Any], *operands: Atom) -> Atom:
        """The result of `fun`; functions of one `key` do the same."""
        eqns, (out,) = self.maker.compute(key, fun, *operands)
        for eqn in eqns:
            self._add(eqn)
        return out

    # ---- values ---------------------------------------------------------------------------------------------------

    def _is_cut(self, v: Atom) -> TypeIs[Var]:
        return not is_literal(v) and v in self.stacks.stack_of and len(self.blocks[self.stacks.stack_of[v]]) > 1

    def _rows(self, v: Var) -> list[tuple[int, int]]:
        s = self.stacks.stack_of[v]
        return [(a, a + n) for a, n in zip(self.starts[s], self.blocks[s], strict=True)]

    def _whole(self, v: Atom) -> Atom:
        if is_literal(v):
            return v
        if v in self.pieces and v not in self.whole:
            self.whole[v] = self._compute("whole", lambda *xs: lax.concatenate(xs, 0), *self.pieces[v])
        return self.whole.get(v, v)

    def _blocks(self, v: Var) -> tuple[Atom, ...]:
        if v not in self.pieces:
            here, key, whole = self.stacks.stack_of[v], self.key, self._whole(v)
            cut = []
            for b, (start, stop) in enumerate(self._rows(v)):
                self._place(here, b)
                rows = functools.partial(lax.slice_in_dim, start_index=start, limit_index=stop)
                cut.append(self._compute((start, stop), rows, whole))
            self.pieces[v], self.key = tuple(cut), key
        return self.pieces[v]

    def _nearby(self, v: Atom, stack: int, block: int) -> Atom:
        """The whole value of `v`; where it is fixed, one that is computed for this block.

        What all layers share would be kept in memory from the first of them to the last.
        """
        if is_literal(v) or v not in self.stacks.constants or self.key is None:
            return self._whole(v)
        if (v, stack, block) not in self.near:
            eqn = self.stacks.constants[v]
            invars = [self._nearby(operand, stack, block) for operand in eqn.invars]
            outvars = [fresh_var(aval_of(out)) for out in eqn.outvars]
            self._add(eqn.replace(invars=invars, outvars=outvars))
            self.near.update(((out, stack, block), new) for out, new in zip(eqn.outvars, outvars, strict=True))
        return self.near[v, stack, block]

    def _only_row(self, block: Atom) -> Atom:
        assert not is_literal(block)
        if block not in self.row:
            eqn, self.row[block] = self.squeeze(block)
            self._add(eqn)
        return self.row[block]

    def _as_block(self, row: Atom) -> Atom:
        if is_literal(row):
            return self._compute("expand", _as_one_row, row)
        eqn, block = self.expand(row)
        self._add(eqn)
        self.row[block] = row
        return block

    # ---- equations ------------------------------------------------------------------------------------------------

    def _cut_scan(self, eqn: JaxprEqn, stack: int) -> None:
        n_consts, n_carry = scan_counts(eqn)
        carry = [self._whole(v) for v in eqn.invars[n_consts : n_consts + n_carry]]
        xs = [self._blocks_of_operand(v, stack) for v in eqn.invars[n_consts + n_carry :]]
        sizes = self.blocks[stack]
        ys: list[list[Atom]] = [[] for _ in sizes]
        body = self._body(eqn) if self.inline and 1 in sizes else None
        for b in reversed(range(len(sizes))) if eqn.params["reverse"] else range(len(sizes)):
            self._place(stack, b)
            consts = [self._nearby(v, stack, b) for v in eqn.invars[:n_consts]]
            args = [*consts, *carry, *(x[b] for x in xs)]
            if sizes[b] == 1 and body is not None:
                rows = [self._only_row(v) for v in args[n_consts + n_carry :]]
                results = self._inline(body, [*args[: n_consts + n_carry], *rows])
                results[n_carry:] = [self._as_block(v) for v in results[n_carry:]]
            else:
                unroll = min(eqn.params.get("unroll", 1), sizes[b])
                params = dict(eqn.params, length=sizes[b], unroll=unroll)
                results = list(self._add(self.maker.rebuild(eqn, args, params)))
            carry, ys[b] = results[:n_carry], results[n_carry:]
        self.whole.update(zip(eqn.outvars[:n_carry], carry, strict=True))
        for k, v in enumerate(eqn.outvars[n_carry:]):
            self.pieces[v] = tuple(block[k] for block in ys)

    def _blocks_of_operand(self, v: Atom, stack: int) -> tuple[Atom, ...]:
        assert not is_literal(v) and self.stacks.stack_of[v] == stack, v
        return self._blocks(v)

    def _body(self, eqn: JaxprEqn) -> FlatJaxpr:
        # Between a forward and a backward scan nothing is shared that no residual holds, and `jax.checkpoint` in a scan
        # relies on that; without scans, barriers have to hold it.
        closed = eqn.params["jaxpr"]
        flat = flatten_calls(closed.jaxpr, tuple(closed.consts), always_barriers=True)
        self.constvars += flat.constvars
        self.consts += flat.consts
        return flat

    def _inline(self, body: FlatJaxpr, args: Sequence[Atom]) -> list[Atom]:
        env: dict[Var, Atom] = dict(zip(body.invars, args, strict=True))

        def read(v: Atom) -> Atom:
            return v if is_literal(v) else env.get(v, v)

        for eqn in body.eqns:
            outvars = [fresh_var(aval_of(v)) for v in eqn.outvars]
            self._add(eqn.replace(invars=[read(v) for v in eqn.invars], outvars=outvars))
            env.update(zip(eqn.outvars, outvars, strict=True))
        return [read(v) for v in body.outvars]

    def _cut_barrier(self, eqn: JaxprEqn) -> None:
        """A barrier for each block, and one for what is not in blocks."""
        pairs = list(zip(eqn.invars, eqn.outvars, strict=True))
        rest: list[tuple[Atom, Var]] = []
        of_stack: dict[int, list[tuple[tuple[Atom, ...], Var]]] = {}
        for v, out in pairs:
            if self._is_cut(v):
                of_stack.setdefault(self.stacks.stack_of[v], []).append((self._blocks(v), out))
            else:
                rest.append((self._whole(v), out))
        for s, mine in of_stack.items():
            behind: list[list[Var]] = []
            for b in range(len(self.blocks[s])):
                self._place(s, b)
                behind.append(self._add(self.maker.rebuild(eqn, [blocks[b] for blocks, _ in mine])))
            for k, (_, out) in enumerate(mine):
                self.pieces[out] = tuple(block[k] for block in behind)
        self._place(None, 0)
        if rest:
            self._add(eqn.replace(invars=[v for v, _ in rest], outvars=[out for _, out in rest]))

    def _cut_rows(self, eqn: JaxprEqn, stack: int, factor: int) -> None:
        """Each block by itself; what is reduced over the rows is put together from the blocks' parts."""
        factors = factors_of(eqn)
        found: list[list[Var]] = []
        for b, n_rows in enumerate(self.blocks[stack]):
            self._place(stack, b)
            args = [
                self._blocks(v)[b] if not is_literal(v) and dims[:1] == ((factor,),) else self._whole(v)
                for v, dims in zip(eqn.invars, factors.operands, strict=True)
            ]
            sizes = (*factors.sizes[:factor], n_rows, *factors.sizes[factor + 1 :])
            found.append(self._add(self.maker.rebuild(eqn, args, localize(eqn, replace(factors, sizes=sizes), {}))))
        self._place(None, 0)
        for r, (v, dims) in enumerate(zip(eqn.outvars, factors.results, strict=True)):
            parts = [results[r] for results in found]
            if dims[:1] == ((factor,),):
                self.pieces[v] = tuple(parts)
            else:
                reduction = factors.reductions[factor]
                combine = _COMBINE[reduction]
                self.whole[v] = self._compute(reduction, lambda *xs, f=combine: functools.reduce(f, xs), *parts)

    # ---- borders --------------------------------------------------------------------------------------------------

    def _inputs(self) -> _Leaves:
        traced, out = self.traced, _Leaves()
        for i, (v, path) in enumerate(zip(traced.flat.invars, traced.in_paths, strict=True)):
            if not self._is_cut(v):
                out.add(v, path, Part(i, None))
            else:
                rows = self._rows(v)
                avals = [aval_of(v).update(shape=(stop - start, *shape_of(v)[1:])) for start, stop in rows]
                self.pieces[v] = tuple(fresh_var(aval) for aval in avals)
                for block, part in zip(self.pieces[v], rows, strict=True):
                    out.add(block, path, Part(i, part))
        return out

    def _result(self, inputs: _Leaves) -> Unstacked:
        traced, outputs = self.traced, _Leaves()
        self.origin = Origin("other", None, 0)
        self._place(None, 0)
        for i, (v, path) in enumerate(zip(traced.flat.outvars, traced.out_paths, strict=True)):
            if not self._is_cut(v):
                outputs.add(self._whole(v), path, Part(i, None))
            else:
                for block, rows in zip(self._blocks(v), self._rows(v), strict=True):
                    outputs.add(block, path, Part(i, rows))
        number = {part: k for k, part in enumerate(inputs.parts)}

        def taken(old: Sequence[int | None]) -> tuple[int | None, ...]:
            leaves = [(old[part.leaf], part.rows) for part in outputs.parts]
            return tuple(None if leaf is None else number.get(Part(leaf, rows)) for leaf, rows in leaves)

        marked = [g for v in traced.gradients for g in (self.pieces[v] if self._is_cut(v) else (self._whole(v),))]
        live = [i for i, keep in enumerate(live_equations(self.eqns, outputs.atoms)) if keep]
        keys = sorted({key for i in live if (key := self.keys[i]) is not None})
        group = {key: g for g, key in enumerate(keys)}
        flat = FlatJaxpr(
            tuple(self.constvars), tuple(self.consts), tuple(inputs.atoms), tuple(self.eqns[i] for i in live),
            ("",) * len(live), tuple(outputs.atoms),
        )  # fmt: skip
        step = replace(
            traced,
            flat=flat,
            origins=tuple(
                replace(self.origins[i], group=None if (key := self.keys[i]) is None else group[key]) for i in live
            ),
            in_paths=tuple(inputs.paths),
            out_paths=tuple(outputs.paths),
            batch_dims=tuple(traced.batch_dims[part.leaf] for part in inputs.parts),
            aliases=taken(traced.aliases),
            layouts=taken(traced.layouts),
            gradients=tuple(g for g in marked if not is_literal(g)),
            in_parts=tuple(inputs.parts),
            out_parts=tuple(outputs.parts),
        )
        return Unstacked(step, tuple(keys))


def _as_one_row(x: Any) -> Any:
    return lax.reshape(x, (1, *x.shape))


@dataclass(slots=True)
class _Leaves:
    """Arguments or results of the new step, as they come."""

    atoms: list[Atom] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def add(self, atom: Atom, path: str, part: Part) -> None:
        self.atoms.append(atom)
        self.paths.append(path)
        self.parts.append(part)
