"""The operations of an equation, or of a step of a resharding: values of operands in, values of results out.

Products and convolutions read and write fixed layouts (layouts.py). Equations without a rule, such as sorts, scans and
calls, are separate kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.intra.memory.xla.layouts import add_convolution, add_product, product_operands
from minialpa.intra.memory.xla.operations import Recorder
from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.ir.equations import Atom, is_in_host, is_literal, moves_memory, scan_counts, shape_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Mark or move a value. XLA drops them first.
_MARKERS = _names("device_put minialpa_gradient minialpa_per_micro_batch name sharding_constraint stop_gradient")
#: The same bytes in another shape or type.
_VIEWS = _names("bitcast_convert_type copy expand_dims random_unwrap random_wrap reshape squeeze")
#: Made without reading an array.
_FILLS = _names("axis_index empty iota partition_id")

_REDUCTIONS = _names("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")
_EXPENSIVE_ELEMENTWISE = _names(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 igamma lgamma
    log log1p log2 logistic pow rem rsqrt sin sinh sqrt tan tanh"""
)
#: Each element of the result needs one element of each operand.
_ELEMENTWISE = _EXPENSIVE_ELEMENTWISE | _names(
    """abs add add_any and ceil clamp clz complex conj convert_element_type eq eq_to floor ge gt imag integer_pow
    is_finite le le_to lt lt_to max min mul mulhi ne neg nextafter not one_minus_square or polynomial population_count
    real reduce_precision round select_n shift_left shift_right_arithmetic shift_right_logical sign square sub xor"""
)
#: Compiled to loops over the elements of their results, which may be fused.
_LOOPS = (
    _ELEMENTWISE
    | _REDUCTIONS
    | _names("concatenate dynamic_slice dynamic_update_slice gather minialpa_rotate pad rev slice split")
)
#: Work for an element, as the bytes that a GPU moves in that time; other work is negligible.
_WORK_BYTES = dict.fromkeys(_EXPENSIVE_ELEMENTWISE, 8.0) | dict.fromkeys(
    ("div", "exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "rem", "rsqrt", "sqrt"), 2.0
)


#: (recorder, equation, values of its operands, values of its results) adds the operations.
_Rule = Callable[[Recorder, JaxprEqn, Sequence[int], Sequence[int]], None]


def add_equation(
    recorder: Recorder,
    eqn: JaxprEqn,
    reads: Sequence[int],
    shapes: Sequence[Sequence[int]],
    scratch: tuple[float, ...] = (),
) -> list[int]:
    """Values of results, which have `shapes` on this device."""
    name = eqn.primitive.name
    if moves_memory(eqn) and reads[0] in recorder.stored:
        return [recorder.stored[reads[0]]]  # XLA drops the way back
    if name in _MARKERS and not moves_memory(eqn):
        return list(reads)
    if name == "transpose":
        source, order = recorder.permuted(reads[0], eqn.params["permutation"])
        if list(order) == sorted(order):
            return [source]

    writes = [recorder.shard(v, shape, eqn) for v, shape in zip(eqn.outvars, shapes, strict=True)]
    if name in _RULES:
        _RULES[name](recorder, eqn, reads, writes)
    elif name.startswith("scatter"):
        sums = "scatter" if name == "scatter-add" else None
        recorder.add("own", reads, writes, in_place=reads[0], sums=sums)
    else:
        recorder.add("own", reads, writes, scratch=scratch, carries=_carries(eqn, reads, writes))
    return writes


def _carries(eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """See `Operation.carries`."""
    params = eqn.params
    if eqn.primitive.name == "scan":
        first, n = scan_counts(eqn)
    elif eqn.primitive.name == "while":
        first, n = params["cond_nconsts"] + params["body_nconsts"], len(writes)
    else:
        return ()
    return tuple(zip(writes[:n], reads[first : first + n], strict=True))


# ---- views and fills ------------------------------------------------------------------------------------------------


def _add_views(recorder: Recorder, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
    for source, result in zip(reads, writes, strict=False):
        recorder.add("view", (source,), (result,))


def _add_barrier(recorder: Recorder, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
    """Views, which wait for the other operands if the program waits at barriers."""
    if not recorder.waits_at_barriers:
        _add_views(recorder, eqn, reads, writes)
        return
    for source, result in zip(reads, writes, strict=False):
        others = [v for v in reads if v != source]
        recorder.add("view", (source, *others), (result,), waits=True)


def _add_fill(recorder: Recorder, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
    recorder.add("fill", reads, writes)


def _add_broadcast(recorder: Recorder, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
    """One element makes a fill, a literal zero zeros."""
    if math.prod(recorder.values[reads[0]].shape) == 1:
        _add_fill(recorder, eqn, reads, writes)
        operand = eqn.invars[0]
        if is_literal(operand) and not np.any(operand.val):
            recorder.zeros.update(writes)
    else:
        recorder.add("loop", reads, writes, repeats=True)


def _add_move(recorder: Recorder, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
    recorder.add("own", reads, writes)
    if is_in_host(eqn.outvars[0].aval):
        recorder.stored[writes[0]] = reads[0]
    else:
        recorder.fetched.update(writes)


def _add_product(recorder: Recorder, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
    add_product(recorder, eqn, reads, writes)
    recorder.products[writes[0]] = eqn, tuple(reads)


# ---- loops ----------------------------------------------------------------------------------------------------------


def _add_loop(recorder: Recorder, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
    name = eqn.primitive.name
    for result in writes:
        recorder.add(
            "loop",
            reads,
            (result,),
            elementwise=name in _ELEMENTWISE,
            sums="add" if name in ("add", "add_any") else None,
            reduces=name in _REDUCTIONS,
            work_bytes=_WORK_BYTES.get(name, 0.0) * math.prod(recorder.values[result].shape),
            converts=name == "convert_element_type" and all(_is_real(recorder, v) for v in (reads[0], result)),
        )


def _is_real(recorder: Recorder, v: int) -> bool:
    dtype = recorder.values[v].dtype
    return dtype != "bool" and not dtype.startswith("complex")


def _add_transpose(recorder: Recorder, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
    """The transpose of a matrix product is the product with its operands exchanged."""
    source, result = reads[0], writes[0]
    recorder.transposed[result] = recorder.permuted(source, eqn.params["permutation"])

    if source in recorder.products and len(recorder.values[result].shape) == 2:
        product, operands = recorder.products[source]
        exchanged = product_operands(recorder, product, operands, exchanged=True)
        recorder.add("own", exchanged, writes, is_product=True)
    else:
        _add_loop(recorder, eqn, reads, writes)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_VIEWS, _add_views),
    **dict.fromkeys(_FILLS, _add_fill),
    **dict.fromkeys(_LOOPS, _add_loop),
    "broadcast_in_dim": _add_broadcast,
    "conv_general_dilated": add_convolution,
    "device_put": _add_move,
    "dot_general": _add_product,
    "optimization_barrier": _add_barrier,
    "transpose": _add_transpose,
}


# ---- steps of a resharding ------------------------------------------------------------------------------------------


def add_step(recorder: Recorder, v: int, step: ReshardStep, atom: Atom, mesh_shape: tuple[int, ...]) -> int:
    """The value after `step` on `v`, a shard of `atom`."""
    shape = step.dst.shard_shape(shape_of(atom), mesh_shape)
    if step.kind == "mask" and v in recorder.zeros:
        return v
    if step.kind in ("cut", "mask", "cut-halves"):
        out = recorder.shard(atom, shape, step.kind)
        recorder.add("loop", (v,), (out,))
        return out
    return _add_collective(recorder, v, step, atom, shape)


def _add_collective(recorder: Recorder, v: int, step: ReshardStep, atom: Atom, shape: tuple[int, ...]) -> int:
    """Collectives exchange along the outermost dimension; for another, the array is copied before or after."""
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
