"""The layouts that XLA's matrix products and convolutions read and write: an equation in, its kernel and copies out.

A product reads batch dimensions first, then free and contracted dimensions, each next to each other in memory. It reads
transposed matrices, also of a batch, in place, and arrays of more dimensions through a view. Others are copied before.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from minialpa.intra.memory.xla.operations import Recorder


def add_product(recorder: Recorder, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
    """One for each element of a batch. A result with more dimensions is a view of it."""
    contracted, batch = eqn.params["dimension_numbers"]
    n_free = [
        len(recorder.values[v].shape) - len(summed) - len(batched)
        for v, summed, batched in zip(reads, contracted, batch, strict=True)
    ]
    operands = product_operands(recorder, eqn, reads)

    if max(n_free) < 2:
        recorder.add("own", operands, writes, is_product=True)
    else:
        recorder.add("view", (_add_kernel(recorder, eqn, operands, writes[0], is_product=True),), writes)


def product_operands(recorder: Recorder, eqn: JaxprEqn, reads: Sequence[int], exchanged: bool = False) -> list[int]:
    """exchanged: whether the product computes the transpose of its result."""
    contracted, batch = eqn.params["dimension_numbers"]
    # Side 0, the left operand, has contracted dimensions last; in a transpose, side 1 has.
    return [
        _product_operand(recorder, eqn, read, batch[side], contracted[side], contracted_last=exchanged == side)
        for side, read in enumerate(reads)
    ]


def _product_operand(
    recorder: Recorder,
    eqn: JaxprEqn,
    read: int,
    batch: Sequence[int],
    contracted: Sequence[int],
    *,
    contracted_last: bool,
) -> int:
    """contracted_last: whether contracted dimensions follow the free ones."""
    v, dims = recorder.untransposed(read)
    batched, summed = tuple(dims[dim] for dim in batch), tuple(dims[dim] for dim in contracted)
    free = tuple(dim for dim in dims if dim not in batched + summed)
    order = batched + (free + summed if contracted_last else summed + free)

    # The kernel reads matrices in either order.
    orders = [order]
    if max(len(free), len(summed)) < 2:
        orders = [batched + free + summed, batched + summed + free]
    if not any(_are_in_order(option, recorder.values[v].shape) for option in orders):
        return recorder.copied(v, eqn, order)
    if max(len(free), len(summed)) > 1:
        return _merged_view(recorder, v, eqn, (len(batched), len(free), len(summed)))
    return v


def _merged_view(recorder: Recorder, v: int, maker: JaxprEqn, groups: tuple[int, ...]) -> int:
    """groups: the number of neighbouring dimensions in each dimension of the view."""
    if (v, groups) not in recorder.merged:
        out = recorder.like(v, maker)
        recorder.origin[out] = recorder.origin.get(v, v)
        recorder.add("view", (v,), (out,))
        recorder.merged[v, groups] = out
    return recorder.merged[v, groups]


def add_convolution(recorder: Recorder, eqn: JaxprEqn, reads: Sequence[int], writes: Sequence[int]) -> None:
    """Copy arrays in another order.

    Convolutions read and write images with the batch first and features last, and read kernels with output features
    first; in float32, all with features first.
    """
    numbers = eqn.params["dimension_numbers"]
    features_first = recorder.values[writes[0]].dtype == "float32"
    (batch, features, *space), (out_features, in_features, *window) = numbers.lhs_spec, numbers.rhs_spec
    orders = [(batch, *space, features), (out_features, *window, in_features)]
    if features_first:
        orders = [(batch, features, *space), (out_features, in_features, *window)]
    operands = [
        v if _are_in_order(order, recorder.values[v].shape) else recorder.copied(v, eqn, order)
        for v, order in zip(reads, orders, strict=True)
    ]

    batch, features, *space = numbers.out_spec
    order = (batch, features, *space) if features_first else (batch, *space, features)
    if _are_in_order(order, recorder.values[writes[0]].shape):
        recorder.add("own", operands, writes)
    else:
        recorder.add("loop", (_add_kernel(recorder, eqn, operands, writes[0]),), writes)


def _add_kernel(
    recorder: Recorder, eqn: JaxprEqn, operands: Sequence[int], result: int, *, is_product: bool = False
) -> int:
    """Add the kernel of `eqn`; returns its value, which is `result` in another layout."""
    made = recorder.like(result, eqn)
    recorder.origin[made] = result
    recorder.add("own", operands, (made,), is_product=is_product)
    return made


def _are_in_order(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Dimensions of one element do not count."""
    kept = [dim for dim in dims if shape[dim] > 1]
    return kept == sorted(kept)
