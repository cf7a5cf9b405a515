"""Operations of the memory model: equations and steps of a resharding in, `Operation`s over numbered values out.

What the compiler does to single equations is said here: which are views, which are too dear to compute twice, that a
dot wants its operands with batch dimensions first and one run of contracted ones, so that others are copied, that it
reads what is transposed where it lies, and that collectives along an inner dimension copy as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.intra.memory.fusion import Kind, Operation
from minialpa.intra.strategies.reshard import Step
from minialpa.tracing.jaxprs import Atom, bytes_of, dtype_name, is_literal, shape_of, source_line


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: What the compiler takes out before all else.
_MARKS = _names("device_put minialpa_gradient minialpa_per_micro_batch name sharding_constraint stop_gradient")
_VIEWS = _names("bitcast_convert_type copy expand_dims optimization_barrier random_unwrap random_wrap reshape squeeze")
_FILLS = _names("axis_index empty iota partition_id")
_REDUCTIONS = _names("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_xor")
#: Elementwise, and too dear to compute twice.
_DEAR = _names(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 igamma lgamma
    log log1p log2 logistic pow rem rsqrt sin sinh sqrt tan tanh"""
)
_EXPENSIVE = _DEAR | _REDUCTIONS | {"gather"}
_JOINS_SUM = _names(
    "abs add convert_element_type exp integer_pow max min mul neg one_minus_square polynomial square sub"
)
_ELEMENTWISE = (
    _DEAR
    | _JOINS_SUM
    | _names(
        """add_any and ceil clamp clz complex conj eq eq_to floor ge gt imag is_finite le le_to lt lt_to mulhi ne
        nextafter not or population_count real reduce_precision round select_n shift_left shift_right_arithmetic
        shift_right_logical sign xor"""
    )
)
_LOOPS = (
    _ELEMENTWISE
    | _EXPENSIVE
    | _names("broadcast_in_dim concatenate dynamic_slice dynamic_update_slice pad rev slice split transpose")
)


@dataclass(frozen=True, slots=True)
class Value:
    """One array on one device. maker: the equation that makes it, or what else it is."""

    n_bytes: float
    shape: tuple[int, ...]
    dtype: str
    maker: JaxprEqn | str

    @property
    def source(self) -> str:
        """Where it was made, for people."""
        return self.maker if isinstance(self.maker, str) else source_line(self.maker)


@dataclass(slots=True)
class Recorder:
    """Collects values and operations; `operations[i].reads` are made before.

    joint_barriers: whether what is behind an optimization barrier waits for all that is in front of it.
    """

    joint_barriers: bool = False
    values: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    broadcasts: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    copies: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    flat: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)
    zeros: set[int] = field(default_factory=set)
    products: dict[int, tuple[JaxprEqn, tuple[int, ...]]] = field(default_factory=dict)
    transposed: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    reduced: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    origin: dict[int, int] = field(default_factory=dict)

    def value(self, n_bytes: float, shape: Sequence[int], dtype: str, maker: JaxprEqn | str) -> int:
        self.values.append(Value(n_bytes, tuple(shape), dtype, maker))
        return len(self.values) - 1

    def literal(self, atom: Atom) -> int:
        return self.value(0.0, shape_of(atom), dtype_name(atom), "constant")

    def like(self, v: int, maker: JaxprEqn | str) -> int:
        value = self.values[v]
        return self.value(value.n_bytes, value.shape, value.dtype, maker)

    def add(self, kind: Kind, reads: Sequence[int], writes: Sequence[int], **facts: Any) -> None:
        if facts.get("repeats") or (kind == "view" and reads[0] in self.repeated):
            self.repeated.update(writes)
        self.operations.append(Operation(kind, tuple(reads), tuple(writes), **facts))

    def copied(self, v: int, maker: JaxprEqn | str, order: tuple[int, ...] = ()) -> int:
        """`v` with its dimensions in another `order` in memory; one copy serves all who want this order."""
        if not order or (v, order) not in self.copies:
            out = self.like(v, maker)
            self.origin[out] = self.origin.get(v, v)
            self.add("loop", (v,), (out,))
            self.copies[v, order] = out
        return self.copies[v, order]

    def source(self, v: int) -> tuple[int, tuple[int, ...]]:
        """The value that `v` is a transpose of, or `v`, and its dimension for each dimension of `v`."""
        return self.transposed.get(v, (v, tuple(range(len(self.values[v].shape)))))

    def _permuted(self, v: int, permutation: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        source, order = self.source(v)
        return source, tuple(order[d] for d in permutation)

    # ---- equations ------------------------------------------------------------------------------------------------

    def equation(
        self, eqn: JaxprEqn, reads: Sequence[int], shapes: Sequence[Sequence[int]], scratch_bytes: float = 0.0
    ) -> list[int]:
        """Values of the results of `eqn`, which have `shapes` here."""
        name = eqn.primitive.name
        if name in _MARKS:
            return list(reads)
        if name == "transpose":
            source, order = self._permuted(reads[0], eqn.params["permutation"])
            if list(order) == sorted(order):
                return [source]
        writes = [
            self.value(local_bytes(v, shape), shape, dtype_name(v), eqn)
            for v, shape in zip(eqn.outvars, shapes, strict=True)
        ]
        if name in _VIEWS:
            joint = self.joint_barriers and name == "optimization_barrier"
            for v, w in zip(reads, writes, strict=False):
                self.add("view", (v, *(r for r in reads if joint and r != v)), (w,), waits=joint)
        elif name in _FILLS or (name == "broadcast_in_dim" and math.prod(self.values[reads[0]].shape) == 1):
            self.add("fill", reads, writes)
            if name == "broadcast_in_dim" and is_literal(eqn.invars[0]) and not np.any(eqn.invars[0].val):
                self.zeros.update(writes)
        elif name == "reduce_sum":
            self.add("sum", reads, writes)
        elif name == "dot_general":
            self._dot(eqn, reads, writes)
            self.products[writes[0]] = eqn, tuple(reads)
        elif name == "transpose" and reads[0] in self.products and len(shapes[0]) == 2:
            # A product with its operands exchanged; made late, so that it is the last reader of both.
            product, operands = self.products[reads[0]]
            self.transposed[writes[0]] = self._permuted(reads[0], (1, 0))
            self.add("own", self._dot_operands(product, operands, exchanged=True), writes, late=True)
        elif name == "conv_general_dilated":
            self._convolution(eqn, reads, writes)
        elif name.startswith("scatter"):
            self.add("own", reads, writes, in_place=reads[0], sums="scatter" if name == "scatter-add" else None)
        elif name in _LOOPS:
            # Division by a constant is multiplication by its inverse.
            by_constant = name == "div" and (
                is_literal(eqn.invars[1]) or reads[1] in self.repeated or self.values[reads[1]].shape != shapes[0]
            )
            if name in _ELEMENTWISE:
                reads = [self._broadcast(v, a, writes[0]) for v, a in zip(reads, eqn.invars, strict=True)]
            if name == "transpose":
                self.transposed[writes[0]] = self._permuted(reads[0], eqn.params["permutation"])
            for w in writes:
                self.add(
                    "loop", reads, (w,), expensive=name in _EXPENSIVE and not by_constant,
                    repeats=name == "broadcast_in_dim", elementwise=name in _ELEMENTWISE,
                    sums="add" if name in ("add", "add_any") else None,
                    joins_sum=name in _JOINS_SUM or name == "broadcast_in_dim" or by_constant,
                )  # fmt: skip
        else:
            self.add("own", reads, writes, scratch_bytes=scratch_bytes)
        return writes

    def _broadcast(self, v: int, atom: Atom, like: int) -> int:
        """`v` in the shape of `like`; to the compiler an operation of its own, which readers share."""
        shape = self.values[like].shape
        if is_literal(atom) or self.values[v].shape == shape or math.prod(shape) == 1:
            return v
        if (v, shape) not in self.broadcasts:
            itemsize = self.values[v].n_bytes / max(1, math.prod(self.values[v].shape))
            out = self.value(itemsize * math.prod(shape), shape, self.values[v].dtype, self.values[like].maker)
            self.add("loop", (v,), (out,), repeats=True, joins_sum=True)
            self.broadcasts[v, shape] = out
            self.origin[out] = like
        return self.broadcasts[v, shape]

    def _dot_operands(self, eqn: JaxprEqn, reads: Sequence[int], exchanged: bool = False) -> list[int]:
        """Operands with batch dimensions first and contracted ones next to each other, copied where they are not."""
        contracted, batch = eqn.params["dimension_numbers"]
        out = []
        for side, read in enumerate(reads):
            v, dims = self.source(read)
            b, c = tuple(dims[d] for d in batch[side]), tuple(dims[d] for d in contracted[side])
            rest = tuple(d for d in dims if d not in b + c)
            is_matrix = not b and len(rest) < 2 and len(c) < 2  # transposed by the kernel itself
            order = b + (rest + c if exchanged == side else c + rest)
            if not is_matrix and not _in_order(order, self.values[v].shape):
                out.append(self.copied(v, eqn, order))
            else:
                out.append(self._flat(v, eqn, (len(b), len(rest), len(c))) if max(len(rest), len(c)) > 1 else v)
        return out

    def _flat(self, v: int, maker: JaxprEqn, groups: tuple[int, ...]) -> int:
        """`v` with as many dimensions as there are groups of them, in place."""
        if (v, groups) not in self.flat:
            out = self.like(v, maker)
            self.origin[out] = self.origin.get(v, v)
            self.add("view", (v,), (out,))
            self.flat[v, groups] = out
        return self.flat[v, groups]

    def _dot(self, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
        """A product of matrices, or of as many as there are in the batch; more dimensions are a view of its result."""
        contracted, batch = eqn.params["dimension_numbers"]
        free = [len(self.values[v].shape) - len(c) - len(b) for v, c, b in zip(reads, contracted, batch, strict=True)]
        operands = self._dot_operands(eqn, reads)
        if max(free) < 2:
            self.add("own", operands, writes)
        else:
            made = self.like(writes[0], eqn)
            self.origin[made] = writes[0]
            self.add("own", operands, (made,))
            self.add("view", (made,), writes)

    def _convolution(self, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
        """Images with batch first and features last, kernels with output features last; others are copied."""
        numbers = eqn.params["dimension_numbers"]
        orders = [
            (spec[0], *spec[2:], spec[1]) if side != 1 else (*spec[2:], spec[1], spec[0])
            for side, spec in enumerate((numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
        ]
        operands = [
            v if _in_order(order, self.values[v].shape) else self.copied(v, eqn, order)
            for v, order in zip(reads, orders[:2], strict=True)
        ]
        if _in_order(orders[2], self.values[writes[0]].shape):
            self.add("own", operands, writes)
        else:
            made = self.like(writes[0], eqn)
            self.origin[made] = writes[0]
            self.add("own", operands, (made,))
            self.add("loop", (made,), writes)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def step(self, v: int, step: Step, atom: Atom, mesh_shape: tuple[int, ...]) -> int:
        """The value after a step of a resharding."""
        shape = step.dst.shard_shape(shape_of(atom), mesh_shape)
        kind = step.kind
        inner = kind not in ("all-reduce", "cut", "mask") and any(n > 1 for n in shape[: step.dim])
        if kind == "mask" and v in self.zeros:
            return v
        if kind in ("cut", "mask"):
            out = self.value(local_bytes(atom, shape), shape, dtype_name(atom), kind)
            self.add("loop", (v,), (out,), joins_sum=False)
            return out
        if kind in ("reduce-scatter", "all-to-all") and inner:
            v = self.copied(v, kind)
        out = self.value(local_bytes(atom, shape), shape, dtype_name(atom), kind)
        self.add("own", (v,), (out,))
        if kind == "all-reduce":
            self.reduced[out] = (step.reduction, dtype_name(atom), step.axes)
        if kind == "all-to-all" or (kind == "all-gather" and inner):
            out = self.copied(out, kind)
        return out


def local_bytes(atom: Atom, shape: Sequence[int]) -> float:
    whole = math.prod(shape_of(atom))
    return bytes_of(atom) * (math.prod(shape) / whole) if whole else 0.0


def _in_order(dims: Sequence[int], shape: Sequence[int]) -> bool:
    kept = [d for d in dims if shape[d] > 1]
    return kept == sorted(kept)
