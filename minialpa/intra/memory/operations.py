"""Operations over numbered values: what the program of one device consists of, before a compiler makes kernels of it.

`Recorder` collects both. lowering.py says which operations an equation or a step of a resharding becomes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jax.extend.core import JaxprEqn

from minialpa.tracing.jaxprs import Atom, bytes_of, dtype_name, shape_of, source_line

#: loop: elementwise operations, changes of layout, slices. view: the same bytes in another shape. fill: made from
#: nothing, as an iota. sum: a reduction by a library kernel. own: always a kernel of its own.
Kind = Literal["loop", "view", "fill", "sum", "own"]
#: A value, and the order of its dimensions in memory.
Ordered = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Value:
    """One array on one device.

    Attributes:
        n_bytes: of the shard that the device holds.
        shape: of the shard.
        dtype: its name.
        maker: the equation that makes it; else a word for where it comes from, such as "argument" or "all-gather".
    """

    n_bytes: float
    shape: tuple[int, ...]
    dtype: str
    maker: JaxprEqn | str

    @property
    def source(self) -> str:
        """The line of the user's code that made the value, or the word for where it comes from."""
        return self.maker if isinstance(self.maker, str) else source_line(self.maker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a program, before fusion.

    Attributes:
        kind: how it takes part in fusion.
        reads: values, in the order of its operands.
        writes: values, in the order of its results.
        expensive: whether the compiler never computes it twice.
        repeats: whether each element of an operand is read many times, as in a broadcast.
        elementwise: whether each element of the result needs one element of each operand.
        late: whether it runs after all other readers of its operands.
        joins_sum: whether it may be computed inside a sum that reads it.
        scratch_bytes: what it needs only while it runs.
        in_place: the operand whose buffer the result takes over; None if it has a buffer of its own.
        waits: whether its result is there only when all that it reads is.
        sums: "add" if it adds its two operands, "scatter" if it adds the others into the first; None otherwise.
    """

    kind: Kind
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    expensive: bool = False
    repeats: bool = False
    elementwise: bool = False
    late: bool = False
    joins_sum: bool = False
    scratch_bytes: float = 0.0
    in_place: int | None = None
    waits: bool = False
    sums: Literal["add", "scatter"] | None = None

    @property
    def is_apart(self) -> bool:
        """Whether it is always a kernel of its own."""
        return self.kind == "own" or self.waits


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Collects values and operations. An operation is added after those that make what it reads.

    Attributes:
        joint_barriers: whether all results of an optimization barrier wait for all of its operands.
        values: every value so far; an operation names a value by its number here.
        operations: every operation so far.
        broadcasts: for a value and a shape, the value broadcast to it.
        copies: for a value and an order of its dimensions in memory, the copy in this order.
        merged: for a value and the sizes of its groups of dimensions, the view with one dimension per group.
        repeated: values that repeat the elements of others.
        zeros: values that are zero throughout.
        products: for the result of a matrix product, its equation and its operands.
        transposed: for a transpose, the value that it is a transpose of, and its dimension for each of the transpose.
        reduced: for the result of an all-reduce, what two of them have in common if they can be combined.
        origin: for a copy or view that no variable names, the value that it belongs to.
    """

    joint_barriers: bool = False
    values: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    broadcasts: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    copies: dict[Ordered, int] = field(default_factory=dict)
    merged: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)
    zeros: set[int] = field(default_factory=set)
    products: dict[int, tuple[JaxprEqn, tuple[int, ...]]] = field(default_factory=dict)
    transposed: dict[int, Ordered] = field(default_factory=dict)
    reduced: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    origin: dict[int, int] = field(default_factory=dict)

    @property
    def sizes(self) -> list[float]:
        """Bytes of each value."""
        return [value.n_bytes for value in self.values]

    def value(self, n_bytes: float, shape: Sequence[int], dtype: str, maker: JaxprEqn | str) -> int:
        """The number of a new value."""
        self.values.append(Value(n_bytes, tuple(shape), dtype, maker))
        return len(self.values) - 1

    def shard(self, atom: Atom, shape: Sequence[int], maker: JaxprEqn | str) -> int:
        """A new value: the shard of `atom` that has `shape`."""
        return self.value(local_bytes(atom, shape), shape, dtype_name(atom), maker)

    def literal(self, atom: Atom) -> int:
        """A new value without bytes, as literals are part of the code."""
        return self.value(0.0, shape_of(atom), dtype_name(atom), "constant")

    def like(self, v: int, maker: JaxprEqn | str) -> int:
        """A new value of the type and shape of `v`."""
        value = self.values[v]
        return self.value(value.n_bytes, value.shape, value.dtype, maker)

    def add(self, kind: Kind, reads: Sequence[int], writes: Sequence[int], **facts: Any) -> None:
        """Add an operation. `facts`: fields of `Operation`."""
        if facts.get("repeats") or (kind == "view" and reads[0] in self.repeated):
            self.repeated.update(writes)
        self.operations.append(Operation(kind=kind, reads=tuple(reads), writes=tuple(writes), **facts))

    def copied(self, v: int, maker: JaxprEqn | str, order: tuple[int, ...] = ()) -> int:
        """`v` with its dimensions in another `order` in memory; all readers that want this order share one copy."""
        if not order or (v, order) not in self.copies:
            out = self.like(v, maker)
            self.origin[out] = self.origin.get(v, v)
            self.add("loop", (v,), (out,))
            self.copies[v, order] = out
        return self.copies[v, order]

    def untransposed(self, v: int) -> Ordered:
        """The value that `v` is a transpose of, or `v`; and for each dimension of `v`, its dimension there."""
        return self.transposed.get(v, (v, tuple(range(len(self.values[v].shape)))))

    def permuted(self, v: int, permutation: Sequence[int]) -> Ordered:
        """The same for `v` with its dimensions permuted."""
        source, order = self.untransposed(v)
        return source, tuple(order[dim] for dim in permutation)


def makers_of(operations: Sequence[Operation]) -> dict[int, int]:
    """For each value that one of `operations` writes, the number of that operation."""
    return {value: number for number, op in enumerate(operations) for value in op.writes}


def local_bytes(atom: Atom, shape: Sequence[int]) -> float:
    """Bytes of the shard of `atom` that has `shape`."""
    n_elements = math.prod(shape_of(atom))
    return bytes_of(atom) * (math.prod(shape) / n_elements) if n_elements else 0.0
