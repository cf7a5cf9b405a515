"""Operations over numbered values: the program of one device before fusion. `Recorder` collects both."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jax.extend.core import JaxprEqn

from minialpa.intra.memory.compiler import ShardValues

#: loop: elementwise operations, changes of layout, slices, reductions. view: the same bytes in another shape. fill:
#: without operands, as an iota. own: always a separate kernel.
Kind = Literal["loop", "view", "fill", "own"]
#: A value, and the order of its dimensions in memory.
Ordered = tuple[int, tuple[int, ...]]


class Operation(NamedTuple):
    """One operation before fusion. A tuple, because programs have very many.

    Attributes:
        repeats: whether each element of an operand is read many times, as in a broadcast.
        elementwise: whether each element of the result needs one element of each operand.
        scratch: bytes of buffers only for its run.
        in_place: the operand whose buffer the result takes over, if any.
        carries: (result, operand) of loops: the last and the first value of a carry.
        waits: for all operands.
        sums: "add" if it adds its two operands, "scatter" if it adds the others into the first.
        reduces: whether an element of the result needs many elements of an operand.
        work_bytes: its work, as the bytes that a GPU moves in that time; 0 if it is cheap.
        converts: between real numbers.
    """

    kind: Kind
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    repeats: bool = False
    elementwise: bool = False
    scratch: tuple[float, ...] = ()
    in_place: int | None = None
    carries: tuple[tuple[int, int], ...] = ()
    waits: bool = False
    sums: Literal["add", "scatter"] | None = None
    reduces: bool = False
    work_bytes: float = 0.0
    converts: bool = False
    is_product: bool = False

    @property
    def is_apart(self) -> bool:
        return self.kind == "own" or self.waits


@dataclass(slots=True, kw_only=True)
class Recorder(ShardValues):
    """Collects values and operations. An operation is added after the makers of its operands.

    Attributes:
        copies: (value, order of its dimensions in memory) -> copy in this order.
        merged: (value, sizes of its groups of dimensions) -> view with one dimension per group.
        products: result of a matrix product -> its equation and its operands.
        transposed: transpose -> its operand, and the operand's dimension for each dimension.
        combinable: result of a collective -> its kind; equal kinds can be combined.
    """

    operations: list[Operation] = field(default_factory=list)
    copies: dict[Ordered, int] = field(default_factory=dict)
    merged: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    zeros: set[int] = field(default_factory=set)
    products: dict[int, tuple[JaxprEqn, tuple[int, ...]]] = field(default_factory=dict)
    transposed: dict[int, Ordered] = field(default_factory=dict)
    combinable: dict[int, Hashable] = field(default_factory=dict)
    exchanged: set[int] = field(default_factory=set)
    fetched: set[int] = field(default_factory=set)
    stored: dict[int, int] = field(default_factory=dict)

    def add(self, kind: Kind, reads: Sequence[int], writes: Sequence[int], **facts: Any) -> None:
        """facts: fields of `Operation`."""
        self.operations.append(Operation(kind, tuple(reads), tuple(writes), **facts))

    def copied(self, v: int, maker: JaxprEqn | str, order: tuple[int, ...] = ()) -> int:
        """In another `order` of dimensions in memory; all readers of this order share one copy."""
        if not order or (v, order) not in self.copies:
            out = self.like(v, maker)
            self.origin[out] = self.origin.get(v, v)
            self.add("loop", (v,), (out,))
            self.copies[v, order] = out
        return self.copies[v, order]

    def untransposed(self, v: int) -> Ordered:
        """The operand of the transpose `v`, or `v`; and for each dimension of `v`, its dimension there."""
        return self.transposed.get(v, (v, tuple(range(len(self.values[v].shape)))))

    def permuted(self, v: int, permutation: Sequence[int]) -> Ordered:
        """As `untransposed`, for a permutation of `v`."""
        source, order = self.untransposed(v)
        return source, tuple(order[dim] for dim in permutation)


def makers_of(operations: Sequence[Operation]) -> dict[int, int]:
    """By value, the number of its operation."""
    return {value: number for number, op in enumerate(operations) for value in op.writes}
