"""The interface of a compiler in the memory model: equations of one device in, kernels in their order out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.ir.equations import Atom, bytes_of, dtype_name, is_in_host, shape_of, source_line

Shape = Sequence[int]


class ShardValue(NamedTuple):
    """The shard of an array on one device. A tuple, because programs have very many.

    maker: its equation, or a word such as "argument" or "all-gather".
    host_bytes: in host memory, where `n_bytes` is 0.
    """

    n_bytes: float
    shape: tuple[int, ...]
    dtype: str
    maker: JaxprEqn | str
    host_bytes: float = 0.0

    @property
    def source(self) -> str:
        return self.maker if isinstance(self.maker, str) else source_line(self.maker)


@dataclass(slots=True, kw_only=True)
class ShardValues:
    """The values of a program, by number. The recorder of a compiler adds further facts.

    waits_at_barriers: see `Compiler`; of this program.
    origin: for a copy or view without a variable, the value that it belongs to.
    """

    waits_at_barriers: bool = False
    values: list[ShardValue] = field(default_factory=list)
    origin: dict[int, int] = field(default_factory=dict)

    @property
    def sizes(self) -> list[float]:
        return [value.n_bytes for value in self.values]

    @property
    def host_sizes(self) -> list[float]:
        return [value.host_bytes for value in self.values]

    def value(self, n_bytes: float, shape: Shape, dtype: str, maker: JaxprEqn | str, host_bytes: float = 0.0) -> int:
        self.values.append(ShardValue(n_bytes, tuple(shape), dtype, maker, host_bytes))
        return len(self.values) - 1

    def shard(self, atom: Atom, shape: Shape, maker: JaxprEqn | str) -> int:
        n_bytes = _shard_bytes(atom, shape)
        if is_in_host(atom.aval):
            return self.value(0.0, shape, dtype_name(atom), maker, n_bytes)
        return self.value(n_bytes, shape, dtype_name(atom), maker)

    def literal(self, atom: Atom) -> int:
        """0 bytes: literals are part of the code."""
        return self.value(0.0, shape_of(atom), dtype_name(atom), "constant")

    def like(self, v: int, maker: JaxprEqn | str) -> int:
        value = self.values[v]
        return self.value(value.n_bytes, value.shape, value.dtype, maker, value.host_bytes)


def _shard_bytes(atom: Atom, shape: Shape) -> float:
    whole = shape_of(atom)
    if shape == whole:
        return float(bytes_of(atom))
    n_elements = math.prod(whole)
    return bytes_of(atom) * (math.prod(shape) / n_elements) if n_elements else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One step of a compiled program. It reads and writes values in memory.

    alias: the value whose buffer has the result, for a view or a change `in_place`; else None.
    scratch: bytes of buffers only for its run.
    shares: the `reads` whose buffer the result may take over after their last read.
    carries: (result, read) of loops, where the result may do so.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    alias: int | None = None
    in_place: bool = False
    scratch: tuple[float, ...] = ()
    shares: tuple[int, ...] = ()
    carries: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """The rules of one compiler for the memory of its programs.

    Attributes:
        waits_at_barriers: whether an optimization barrier orders the kernels before it and after it. If not,
            rematerialisation saves no memory inside one program.
        drops_inner_barriers: whether barriers in loops, and in functions of a primitive, have no effect.
        address_bytes: bytes of one entry in the table of addresses that a program with several results returns.
        reserve: most bytes beyond the model, as a part of the modelled bytes.
        recorder: makes an empty program, which extends `ShardValues`.
        add_equation: (recorder, equation, operands, shapes of its results on this device, bytes of the buffers of its
            body if it is a loop or branch) -> values of its results.
        add_step: (recorder, value, step of a resharding, variable or literal of the value, shape of the mesh) -> value.
        kernels: (recorder, inputs, results) -> in order.
    """

    name: str
    waits_at_barriers: bool
    alignment_bytes: int
    address_bytes: int
    recorder: Callable[..., Any]
    add_equation: Callable[[Any, JaxprEqn, Sequence[int], Sequence[Shape], tuple[float, ...]], list[int]]
    add_step: Callable[[Any, int, ReshardStep, Atom, tuple[int, ...]], int]
    kernels: Callable[[Any, Sequence[int], Sequence[int]], list[Kernel]]
    drops_inner_barriers: bool = False
    reserve: float = 0.0
