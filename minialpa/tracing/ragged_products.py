"""`dense_product` writes `ragged_dot_general` as a dense product over all groups, as XLA compiles it by default.

XLA for CPUs has no grouped product, and XLA for GPUs only under an experimental flag. Both mask the rows of each group,
and multiply all rows with the weights of all groups: n times the arithmetic for n groups.

    starts[g] <= row < ends[g]                                               the rows of group g
    [m k], [g k n] -> [m n]      sum over g, k of masked [m g k] [g k n]      the ragged rows are kept
    [m k], [m n] -> [g k n]      masked [g m k], masked [g m n]               the ragged rows are summed over
    ragged batches               a plain product

Groups, rows and features may all be split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import shape_of, source_line, sub_jaxprs
from minialpa.support.private_jax import name_stack

#: The `checkpoint_name` of the group sizes.
_MARK = "minialpa_groups"
#: The scope of a barrier. Without it, one GPU kernel masks an array for the forward pass and for the gradient of the
#: weights, and both results stay in memory.
_APART = "minialpa_apart"


@dataclass(frozen=True, slots=True)
class RaggedProduct:
    """A line of the user's code with a ragged product."""

    line: str
    n_groups: int


def dense_product(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    ragged_dot_dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    group_offset: Any = None,
    out_sharding: Any = None,
) -> tuple[Any]:
    """The result of `ragged_dot_general` with these parameters."""
    del out_sharding  # the plan decides
    if group_offset is not None:
        raise NotImplementedError("jax compiles no `ragged_dot_general` with a `group_offset`.")
    numbers = ragged_dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    (lhs_sums, rhs_sums), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    sums, batch = (list(lhs_sums), list(rhs_sums)), (list(lhs_batch), list(rhs_batch))

    if ragged in lhs_sums:
        k = list(lhs_sums).index(ragged)
        with jax.named_scope(_APART):
            lhs, rhs, group_sizes = lax.optimization_barrier((lhs, rhs, group_sizes))
        groups = _rows_of_groups(group_sizes)
        lhs = _masked_copies(lhs, groups, (*lhs_batch, *lhs_sums[:k]), ragged, at=0)
        rhs = _masked_copies(rhs, groups, (*rhs_batch, *rhs_sums[:k]), rhs_sums[k], at=0)
        sums = [d + 1 for d in lhs_sums], [d + 1 for d in rhs_sums]
        batch = [0, *(d + 1 for d in lhs_batch)], [0, *(d + 1 for d in rhs_batch)]
    elif ragged not in lhs_batch:
        (group,) = numbers.rhs_group_dimensions
        kept = [d for d in range(lhs.ndim) if d not in lhs_sums and d not in lhs_batch]
        # Next to the summed dimensions, where the product reads the group dimension.
        at = min(lhs_sums, default=lhs.ndim)
        groups = _rows_of_groups(group_sizes)
        lhs = _masked_copies(lhs, groups, (*lhs_batch, *kept[: kept.index(ragged)]), ragged, at=at)
        sums = [at, *(d + (d >= at) for d in lhs_sums)], [group, *rhs_sums]
        batch = [d + (d >= at) for d in lhs_batch], list(rhs_batch)

    return (
        lax.dot_general(lhs, rhs, (sums, batch), precision=precision, preferred_element_type=preferred_element_type),
    )


def _rows_of_groups(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first row of each group, and the end of its rows."""
    sizes = checkpoint_name(sizes, _MARK)
    ends = lax.cumsum(sizes, axis=sizes.ndim - 1)
    return ends - sizes, ends


def _masked_copies(
    x: jax.Array, groups: tuple[jax.Array, jax.Array], outer: Sequence[int], ragged: int, *, at: int
) -> jax.Array:
    """`x` for each group, along a new dimension `at`, with zeros in the rows of other groups.

    groups: from `_rows_of_groups`.
    outer: the dimensions of `x` that the leading dimensions of `groups` stand for, in order.
    """
    starts, ends = groups
    full = (*x.shape[:at], ends.shape[-1], *x.shape[at:])
    dims = [d + (d >= at) for d in range(x.ndim)]
    of_sizes = [*(dims[d] for d in outer), at][-ends.ndim :]
    of_mask = sorted([*of_sizes, dims[ragged]])

    def in_mask(array: jax.Array, of_array: Sequence[int]) -> jax.Array:
        order = sorted(range(len(of_array)), key=of_array.__getitem__)
        places = [of_mask.index(of_array[i]) for i in order]
        return lax.broadcast_in_dim(lax.transpose(array, order), [full[d] for d in of_mask], places)

    rows = in_mask(lax.iota(ends.dtype, x.shape[ragged]), [dims[ragged]])
    mask = (in_mask(starts, of_sizes) <= rows) & (rows < in_mask(ends, of_sizes))
    copies = lax.broadcast_in_dim(x, full, dims)
    return lax.select(lax.broadcast_in_dim(mask, full, of_mask), copies, lax.full_like(copies, 0))


def only_keeps_apart(barrier: JaxprEqn) -> bool:
    """Whether readers of a barrier need not wait for all its operands, because it only keeps kernels apart."""
    return _APART in name_stack(barrier)


def ragged_products(eqns: Sequence[JaxprEqn]) -> Iterator[RaggedProduct]:
    """The ragged products among these equations and inside them, by their mark; some occur twice."""
    for eqn in eqns:
        if eqn.primitive.name == "name" and eqn.params["name"] == _MARK:
            yield RaggedProduct(source_line(eqn), shape_of(eqn.invars[0])[-1])
        for body in sub_jaxprs(eqn):
            yield from ragged_products(body.eqns)
