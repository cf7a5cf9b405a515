"""Which operations an equation becomes, and which a step of a resharding, as XLA rewrites them before it fuses.

`_RULES` has one function for each kind of rewriting:

    views and fills         no loop of their own                                            -> _add_views, _add_fill
    products, convolutions  read and write fixed layouts, see layouts.py                    -> _add_product, ...
    loops                   what fusion joins                                               -> _add_loop
    others                  kernels of their own, such as sorts, scans and calls            -> _add_kernel
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.intra.memory.xla.layouts import add_convolution, add_product, product_operands
from minialpa.intra.memory.xla.operations import Recorder
from minialpa.intra.memory.xla.primitives import (
    ELEMENTWISE,
    FILLS,
    LOOPS,
    MARKERS,
    REDUCTIONS,
    VIEWS,
    WORK_BYTES,
)
from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.ir.equations import Atom, is_literal, shape_of


class _Equation(NamedTuple):
    """An equation as one device runs it.

    Attributes:
        eqn: the equation, on whole arrays.
        reads: the values of its operands on this device.
        writes: the values of its results on this device.
        scratch: bytes of the buffers of its body while it runs, for loops and branches.
    """

    eqn: JaxprEqn
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    scratch: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


_Rule = Callable[[Recorder, _Equation], None]


def add_equation(
    recorder: Recorder,
    eqn: JaxprEqn,
    reads: Sequence[int],
    shapes: Sequence[Sequence[int]],
    scratch: tuple[float, ...] = (),
) -> list[int]:
    """Add the operations of `eqn`; the values of its results, which have `shapes` on this device."""
    name = eqn.primitive.name
    if name in MARKERS:
        return list(reads)
    if name == "transpose":
        source, order = recorder.permuted(reads[0], eqn.params["permutation"])
        if list(order) == sorted(order):
            return [source]

    writes = [recorder.shard(v, shape, eqn) for v, shape in zip(eqn.outvars, shapes, strict=True)]
    rule = _RULES.get(name, _add_scatter if name.startswith("scatter") else _add_kernel)
    rule(recorder, _Equation(eqn, tuple(reads), tuple(writes), scratch))
    return writes


# ---- views and fills ------------------------------------------------------------------------------------------------


def _add_views(recorder: Recorder, equation: _Equation) -> None:
    for source, result in zip(equation.reads, equation.writes, strict=False):
        recorder.add("view", (source,), (result,))


def _add_barrier(recorder: Recorder, equation: _Equation) -> None:
    """Each result is a view of its operand. If the program waits at barriers, it waits for the other operands, too."""
    if not recorder.waits_at_barriers:
        _add_views(recorder, equation)
        return
    for source, result in zip(equation.reads, equation.writes, strict=False):
        others = [v for v in equation.reads if v != source]
        recorder.add("view", (source, *others), (result,), waits=True)


def _add_fill(recorder: Recorder, equation: _Equation) -> None:
    recorder.add("fill", equation.reads, equation.writes)


def _add_broadcast(recorder: Recorder, equation: _Equation) -> None:
    """A broadcast of one element is a fill, and one of a literal zero is remembered as such."""
    if math.prod(recorder.values[equation.reads[0]].shape) == 1:
        _add_fill(recorder, equation)
        operand = equation.eqn.invars[0]
        if is_literal(operand) and not np.any(operand.val):
            recorder.zeros.update(equation.writes)
    else:
        recorder.add("loop", equation.reads, equation.writes, repeats=True)


# ---- kernels of their own -------------------------------------------------------------------------------------------


def _add_kernel(recorder: Recorder, equation: _Equation) -> None:
    recorder.add("own", equation.reads, equation.writes, scratch=equation.scratch)


def _add_product(recorder: Recorder, equation: _Equation) -> None:
    add_product(recorder, equation.eqn, equation.reads, equation.writes)
    recorder.products[equation.writes[0]] = equation.eqn, equation.reads


def _add_convolution(recorder: Recorder, equation: _Equation) -> None:
    add_convolution(recorder, equation.eqn, equation.reads, equation.writes)


def _add_scatter(recorder: Recorder, equation: _Equation) -> None:
    """A scatter changes its first operand in place."""
    sums = "scatter" if equation.name == "scatter-add" else None
    recorder.add("own", equation.reads, equation.writes, in_place=equation.reads[0], sums=sums)


# ---- loops ----------------------------------------------------------------------------------------------------------


def _add_loop(recorder: Recorder, equation: _Equation) -> None:
    """A loop over the elements of each result."""
    name = equation.name
    for result in equation.writes:
        recorder.add(
            "loop",
            equation.reads,
            (result,),
            elementwise=name in ELEMENTWISE,
            sums="add" if name in ("add", "add_any") else None,
            reduces=name in REDUCTIONS,
            work_bytes=WORK_BYTES.get(name, 0.0) * math.prod(recorder.values[result].shape),
            converts=name == "convert_element_type" and all(_is_real(recorder, v) for v in (equation.reads[0], result)),
        )


def _is_real(recorder: Recorder, v: int) -> bool:
    """Whether a value is of real numbers, whose conversions products can take in."""
    dtype = recorder.values[v].dtype
    return dtype != "bool" and not dtype.startswith("complex")


def _add_transpose(recorder: Recorder, equation: _Equation) -> None:
    """The transpose of a matrix product is the product with its operands exchanged; others are loops."""
    source, result = equation.reads[0], equation.writes[0]
    recorder.transposed[result] = recorder.permuted(source, equation.eqn.params["permutation"])

    if source in recorder.products and len(recorder.values[result].shape) == 2:
        product, operands = recorder.products[source]
        reads = product_operands(recorder, product, operands, exchanged=True)
        recorder.add("own", reads, equation.writes, is_product=True)
    else:
        _add_loop(recorder, equation)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(VIEWS, _add_views),
    **dict.fromkeys(FILLS, _add_fill),
    **dict.fromkeys(LOOPS, _add_loop),
    "broadcast_in_dim": _add_broadcast,
    "conv_general_dilated": _add_convolution,
    "dot_general": _add_product,
    "optimization_barrier": _add_barrier,
    "transpose": _add_transpose,
}


# ---- steps of a resharding ------------------------------------------------------------------------------------------


def add_step(recorder: Recorder, v: int, step: ReshardStep, atom: Atom, mesh_shape: tuple[int, ...]) -> int:
    """Add the operations of `step` on `v`, which is a shard of `atom`; the value after it."""
    shape = step.dst.shard_shape(shape_of(atom), mesh_shape)
    if step.kind == "mask" and v in recorder.zeros:
        return v
    if step.kind in ("cut", "mask", "cut-halves"):
        out = recorder.shard(atom, shape, step.kind)
        recorder.add("loop", (v,), (out,))
        return out
    return _add_collective(recorder, v, step, atom, shape)


def _add_collective(recorder: Recorder, v: int, step: ReshardStep, atom: Atom, shape: tuple[int, ...]) -> int:
    """Collectives exchange along the outermost dimension, and what goes along another is copied before or after."""
    kind = step.kind
    is_inner = kind != "all-reduce" and any(n > 1 for n in shape[: step.dim])
    if kind in ("reduce-scatter", "all-to-all") and is_inner:
        v = recorder.copied(v, kind)

    out = recorder.shard(atom, shape, kind)
    recorder.add("own", (v,), (out,))
    recorder.exchanged.add(out)
    if kind in ("all-gather", "all-reduce", "reduce-scatter"):
        recorder.combinable[out] = kind, step.reduction, recorder.values[out].dtype, step.axes
    if kind == "all-to-all" or (kind == "all-gather" and is_inner):
        out = recorder.copied(out, kind)
    return out
