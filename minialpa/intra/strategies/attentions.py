"""Seconds of attentions that no kernel of cuDNN computes: those of float32, and those with biases or masks.

They run block by block (`attention.blockwise`): scores of float32 are written and read between products and loops.

    seconds = products of the scores, each of which reads or writes them once
            + passes of loops over the scores
            + copies of the blocks of queries, keys and values, for each pair of blocks

How often what passes is counted in compiled programs for H100s.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from minialpa.attention.blockwise import SIDE
from minialpa.attention.cudnn import takes
from minialpa.cluster import DeviceSpec
from minialpa.ir.equations import aval_of, shape_of
from minialpa.rules.factors import Factors

#: Bytes of a score.
_SCORE_BYTES = 4
#: What products of blocks of 512 x 512 take by XLA's tables of H100s, as a multiple of the formula for large products.
_OF_BLOCKS = 1.8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """What one direction of an attention does for each pair of blocks.

    Attributes:
        products: those that read or write scores.
        sums: features that are summed or made by these products, for each d and e of keys and values.
        loops: reads and writes of all scores by loops.
        rows: reads and writes of a block of queries, keys, values or results.
    """

    products: int
    sums: tuple[int, int]
    loops: int
    rows: int


#: score, value; maximum, and shifted scores with their sum; cut blocks, and what the row has met so far.
_FORWARD = _Passes(products=2, sums=(1, 1), loops=3, rows=9)
#: score, p_bar, and three gradients; p and score_bar of score and p_bar; cut blocks, and sums of gradients.
_BACKWARD = _Passes(products=5, sums=(3, 2), loops=4, rows=19)


def has_kernel(eqn: JaxprEqn) -> bool:
    """Whether cuDNN has a kernel for an attention, or the gradient of one."""
    query, key, value = (aval_of(atom) for atom in eqn.invars[:3])
    return takes(query, key, value, eqn.params["kind"])


def blockwise_s(eqn: JaxprEqn, factors: Factors, device: DeviceSpec) -> float:
    """Seconds of an attention, or of the gradient of one, computed block by block."""
    passes = _FORWARD if eqn.primitive.name == "minialpa_attention" else _BACKWARD
    d, (n_keys, e) = shape_of(eqn.invars[1])[-1], (shape_of(eqn.invars[2])[i] for i in (1, 3))
    of_keys, of_values = passes.sums
    scores_bytes = _SCORE_BYTES * factors.flops / (2 * (of_keys * d + of_values * e))

    products_s = device.product_s(factors.flops, passes.products * scores_bytes, "tensorfloat32")
    # A block of scores has as many rows, of features instead of keys.
    rows_bytes = passes.rows * scores_bytes * (d + e) / 2 / min(n_keys, SIDE) if n_keys > SIDE else 0.0
    moved_bytes = passes.loops * scores_bytes + rows_bytes
    return _OF_BLOCKS * products_s + moved_bytes / device.memory_bandwidth
