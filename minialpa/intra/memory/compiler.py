"""What the memory model asks of a compiler: a `CompilerModel` for each compiler.

    values     what the program of one device computes, by number                     -> Values
    kernels    what the compiler makes of the program, in the order in which it runs  -> Kernel
    model      how it gets from equations to kernels, and how it places buffers       -> CompilerModel

Liveness, donation and packing read values and kernels and ask the model. So another compiler is another model, and
nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import JaxprEqn

from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.ir.equations import Atom, bytes_of, dtype_name, shape_of, source_line

Shape = Sequence[int]


class Value(NamedTuple):
    """One array on one device. A tuple, as programs have very many of them.

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


@dataclass(slots=True, kw_only=True)
class Values:
    """The values of a program, by number. The recorder of a compiler adds what the compiler needs to know of them.

    Attributes:
        waits_at_barriers: see `CompilerModel`; of this program.
        values: every value so far.
        origin: for a copy or view that no variable names, the value that it belongs to.
    """

    waits_at_barriers: bool = False
    values: list[Value] = field(default_factory=list)
    origin: dict[int, int] = field(default_factory=dict)

    @property
    def sizes(self) -> list[float]:
        """Bytes of each value."""
        return [value.n_bytes for value in self.values]

    def value(self, n_bytes: float, shape: Shape, dtype: str, maker: JaxprEqn | str) -> int:
        """The number of a new value."""
        self.values.append(Value(n_bytes, tuple(shape), dtype, maker))
        return len(self.values) - 1

    def shard(self, atom: Atom, shape: Shape, maker: JaxprEqn | str) -> int:
        """A new value: the shard of `atom` that has `shape`."""
        return self.value(_shard_bytes(atom, shape), shape, dtype_name(atom), maker)

    def literal(self, atom: Atom) -> int:
        """A new value without bytes, as literals are part of the code."""
        return self.value(0.0, shape_of(atom), dtype_name(atom), "constant")

    def like(self, v: int, maker: JaxprEqn | str) -> int:
        """A new value of the type and shape of `v`."""
        value = self.values[v]
        return self.value(value.n_bytes, value.shape, value.dtype, maker)


def _shard_bytes(atom: Atom, shape: Shape) -> float:
    whole = shape_of(atom)
    if shape == whole:
        return float(bytes_of(atom))
    n_elements = math.prod(whole)
    return bytes_of(atom) * (math.prod(shape) / n_elements) if n_elements else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Something that a program runs at one time.

    Attributes:
        reads: values in memory.
        writes: values in memory.
        alias: the value whose buffer the result is in: that of a view, or the operand changed `in_place`; else None.
        in_place: whether it changes the buffer of `alias`.
        scratch: bytes of the buffers that it needs only while it runs.
        shares: those of `reads` whose buffer the result may take over if nothing reads them later.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    alias: int | None = None
    in_place: bool = False
    scratch: tuple[float, ...] = ()
    shares: tuple[int, ...] = ()


R = TypeVar("R", bound=Values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerModel(Generic[R]):
    """What one compiler does, as far as the memory of its programs depends on it. `R` is what it records programs in.

    Attributes:
        name: tells it from other models.
        waits_at_barriers: whether the program behind an optimization barrier runs after all that is in front of it.
            Otherwise rematerialisation saves no memory inside one program.
        drops_inner_barriers: whether it does not wait at those in loops, and in functions behind a primitive.
        alignment_bytes: buffers start at multiples of this.
        address_bytes: of one entry in the table of addresses that a program with several results returns.
        reserve: what programs may need beyond the model, as a part of what the model says.
        recorder: makes its recorders; a new one is an empty program.
        add_equation: (recorder, equation, values of its operands, shapes of its results on this device, bytes of the
            buffers of its body if it is a loop or branch) adds the equation and gives the values of its results.
        add_step: (recorder, value, step of a resharding, variable or literal that the value is of, shape of the mesh)
            adds the step and gives the value after it.
        kernels: (recorder, inputs, results) gives what runs, in that order. Inputs and results are values.
    """

    name: str
    waits_at_barriers: bool
    alignment_bytes: int
    address_bytes: int
    recorder: Callable[..., R]
    add_equation: Callable[[R, JaxprEqn, Sequence[int], Sequence[Shape], tuple[float, ...]], list[int]]
    add_step: Callable[[R, int, ReshardStep, Atom, tuple[int, ...]], int]
    kernels: Callable[[R, Sequence[int], Sequence[int]], list[Kernel]]
    drops_inner_barriers: bool = False
    reserve: float = 0.0


#: A model of any compiler, for those that only ask it.
Compiler = CompilerModel[Any]
