"""Row blocks: the variables of a step whose stacked arrays are several variables, one for each block of rows.

`BlockLayout` holds the rows and the forward group of each block. `BlockedProgram` collects the equations of the new
program and maps each old variable to the variables of its blocks, or to one variable for all rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.layers.stacks import Stacks
from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, aval_of, fresh_var, is_literal
from minialpa.ir.op import Origin
from minialpa.tracing.new_equations import EquationMaker, unary_equation

if TYPE_CHECKING:
    from typing_extensions import TypeIs

#: A forward group of the step with scans, and the first of its rows that a group of the new step has.
GroupKey = tuple[int, int]
#: For each stack, the rows of each of its blocks.
RowBlocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Owner:
    """The origin of the old equation, and the forward group of the new equation in the new step, or None."""

    origin: Origin
    group: GroupKey | None


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The cuts of the stacks of a step: for each stack, the sizes of its blocks and their rows [start, stop)."""

    stacks: Stacks
    sizes: RowBlocks
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    def is_cut(self, v: Atom) -> TypeIs[Var]:
        return not is_literal(v) and v in self.stacks.stack_of and len(self.sizes[self.stacks.stack_of[v]]) > 1

    def ranges_of(self, v: Var) -> tuple[tuple[int, int], ...]:
        return self.ranges[self.stacks.stack_of[v]]

    def owner(self, origin: Origin) -> Owner:
        return Owner(origin, None if origin.group is None else (origin.group, 0))

    def owner_of_block(self, origin: Origin, stack: int, block: int) -> Owner:
        """The owner of equations for one block. Equations that prepare weights belong to the weights' scan."""
        group, (first_row, _) = origin.group, self.ranges[stack][block]
        if group is not None and group in self.stacks.weight_groups:
            return Owner(origin, (self.stacks.first_groups[stack], first_row))
        if group is not None and group in self.stacks.scan_groups:
            return Owner(origin, (group, first_row))
        return self.owner(origin)


def block_layout(stacks: Stacks, sizes: Sequence[Sequence[int]]) -> BlockLayout:
    for stack, (of_stack, length) in enumerate(zip(sizes, stacks.lengths, strict=True)):
        assert sum(of_stack) == length and min(of_stack) > 0, (stack, of_stack, length)
    ranges = tuple(tuple(itertools.pairwise(itertools.accumulate(of_stack, initial=0))) for of_stack in sizes)
    return BlockLayout(stacks, tuple(map(tuple, sizes)), ranges)


class BlockedProgram:
    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.eqns: list[JaxprEqn] = []
        self.owners: list[Owner] = []
        self.constvars: list[Var] = []
        self.consts: list[Any] = []

        # By old variable: blocks of stacked variables, and new names of other variables or of joined blocks.
        self._blocks: dict[Var, tuple[Atom, ...]] = {}
        self._joined: dict[Var, Atom] = {}
        self._near: dict[tuple[Var, int, int], Var] = {}
        # By new variable: the row of a block of one row, without dimension 0.
        self._row: dict[Var, Atom] = {}

        self._maker = EquationMaker()
        self._squeeze = unary_equation(lambda x: lax.squeeze(x, (0,)))
        self._expand = unary_equation(_as_one_row)

    def add_constants(self, flat: Block) -> None:
        self.constvars += flat.constvars
        self.consts += flat.consts

    # ---- equations ------------------------------------------------------------------------------------------------

    def add(self, eqn: JaxprEqn, owner: Owner) -> list[Var]:
        self.eqns.append(eqn)
        self.owners.append(owner)
        return list(eqn.outvars)

    def add_like(
        self, eqn: JaxprEqn, operands: Sequence[Atom], owner: Owner, params: dict[str, Any] | None = None
    ) -> list[Var]:
        """Append the primitive of `eqn` on operands of other shapes."""
        return self.add(self._maker.rebuild(eqn, operands, params), owner)

    def add_copy(self, eqn: JaxprEqn, operands: Sequence[Atom], owner: Owner) -> list[Var]:
        outvars = [fresh_var(aval_of(v)) for v in eqn.outvars]
        return self.add(eqn.replace(invars=list(operands), outvars=outvars), owner)

    def compute(self, key: Hashable, fun: Callable[..., Any], *operands: Atom, owner: Owner) -> Atom:
        """Append the equations of `fun`; returns its result. Equal `key`s mean equal functions."""
        eqns, (result,) = self._maker.compute(key, fun, *operands)
        for eqn in eqns:
            self.add(eqn, owner)
        return result

    # ---- variables ------------------------------------------------------------------------------------------------

    def set_blocks(self, v: Var, blocks: Sequence[Atom]) -> None:
        self._blocks[v] = tuple(blocks)

    def rename(self, v: Var, new: Atom) -> None:
        self._joined[v] = new

    def joined(self, v: Atom, owner: Owner) -> Atom:
        """All rows of `v` as one variable."""
        if is_literal(v):
            return v
        if v in self._blocks and v not in self._joined:
            blocks = self._blocks[v]
            self._joined[v] = self.compute("joined", lambda *xs: lax.concatenate(xs, 0), *blocks, owner=owner)
        return self._joined.get(v, v)

    def blocks(self, v: Var, owner: Owner) -> tuple[Atom, ...]:
        """The blocks of a stacked variable; slices, if it is still one variable."""
        if v in self._blocks:
            return self._blocks[v]

        stack, joined = self.layout.stacks.stack_of[v], self.joined(v, owner)
        blocks = []
        for block, (start, stop) in enumerate(self.layout.ranges[stack]):
            rows = functools.partial(lax.slice_in_dim, start_index=start, limit_index=stop)
            here = self.layout.owner_of_block(owner.origin, stack, block)
            blocks.append(self.compute((start, stop), rows, joined, owner=here))
        self._blocks[v] = tuple(blocks)
        return self._blocks[v]

    def near(self, v: Atom, stack: int, block: int, owner: Owner) -> Atom:
        """All rows of `v`; of a constant, a copy that is computed for this block.

        A constant that all layers share would stay in memory from the first layer to the last.
        """
        if is_literal(v) or v not in self.layout.stacks.constants or owner.group is None:
            return self.joined(v, owner)

        if (v, stack, block) not in self._near:
            eqn = self.layout.stacks.constants[v]
            operands = [self.near(operand, stack, block, owner) for operand in eqn.invars]
            copies = self.add_copy(eqn, operands, owner)
            self._near.update(((result, stack, block), copy) for result, copy in zip(eqn.outvars, copies, strict=True))
        return self._near[v, stack, block]

    def only_row(self, block: Atom, owner: Owner) -> Atom:
        assert not is_literal(block)
        if block not in self._row:
            eqn, self._row[block] = self._squeeze(block)
            self.add(eqn, owner)
        return self._row[block]

    def as_block(self, row: Atom, owner: Owner) -> Atom:
        if is_literal(row):
            return self.compute("expand", _as_one_row, row, owner=owner)
        eqn, block = self._expand(row)
        self.add(eqn, owner)
        self._row[block] = row
        return block


def _as_one_row(x: Any) -> Any:
    return lax.reshape(x, (1, *x.shape))
