"""An equation and a device in; the seconds of its compute out: arithmetic, bytes and idle processors.

Attentions without a cuDNN kernel (float32, biases or masks) run in blocks (`attention.blockwise`), with float32 scores
in memory. Compiled programs for H100s have these counts:

    seconds = products, each of which reads or writes the scores once
            + loops over the scores
            + copies of blocks of queries, keys and values, for each pair of blocks

A GPU computes a product [b m k] [b k n] in tiles, one per processor at a time. Processors without a tile in the last
round are idle. For the best kind of tile, the seconds grow by the factor

    waste = n_processors * ceil(n_tiles / n_processors) * (area of a tile) / (rate of the tile * b * m * n)

A product with few tiles and a long sum is also split along the sum.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn
from numpy.typing import NDArray

from minialpa.attention.blockwise import SIDE
from minialpa.attention.cudnn import takes
from minialpa.cluster import DeviceSpec, LogicalMesh
from minialpa.grouped import rows_of_tile, tiles_of_group
from minialpa.intra.strategies.candidates import Candidates
from minialpa.ir.equations import (
    aval_of,
    bytes_of,
    dtype_name,
    is_in_host,
    is_inexact,
    moves_memory,
    shape_of,
    sub_jaxprs,
)
from minialpa.rules.expensive import is_attention, is_contraction
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of, is_kernel
from minialpa.sharding import Spec
from minialpa.tracing.flattening import flat_body

_SUMS = ("minialpa_grouped_sum", "minialpa_routed_sum")
_GROUPED = ("minialpa_grouped_product", "minialpa_routed_product", *_SUMS)


class Work(NamedTuple):
    """Seconds of an equation: devices that split it divide `shared_s`; each takes `fixed_s`."""

    shared_s: float
    fixed_s: float


def work_of(eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh) -> Work:
    """The work of a single device; zero without a device description.

    Contractions read and write memory. Other operations only count writes, as XLA fuses their reads. A reshape that
    adds or drops a leading dimension of size 1 is free. A loop or branch takes the work of its equations, whose dtypes
    may differ.
    """
    device = mesh.device
    if device is None or _is_free_reshape(eqn):
        return Work(0.0, 0.0)
    if eqn.primitive.name in ("scan", "while", "cond"):
        return _work_inside(eqn, mesh)

    if is_attention(eqn) and device.kernels is not None and not has_kernel(eqn):
        return Work(blockwise_s(eqn, factors, device), device.launch_s)
    if eqn.primitive.name in _GROUPED:
        shapes = [shape_of(atom) for atom in (*eqn.invars[:2], *eqn.outvars)]
        return Work(_grouped_s(eqn, device, shapes, factors.flops), device.launch_s)
    if moves_memory(eqn):
        return Work(sum(map(bytes_of, eqn.outvars)) / device.host_bandwidth, 0.0)
    # XLA updates an array in place: only the update is written.
    written = sum(map(bytes_of, eqn.invars[1:2] if eqn.primitive.name == "dynamic_update_slice" else eqn.outvars))
    if is_contraction(eqn) or is_kernel(eqn):
        read = sum(map(bytes_of, eqn.invars))
        seconds_of = device.attention_s if is_attention(eqn) else device.product_s
        return Work(seconds_of(factors.flops, read + written, _rate_of(eqn)), device.launch_s)
    dtype = dtype_name(eqn.invars[0]) if eqn.invars else "float32"
    return Work(device.kernel_s(factors.flops, written, dtype), 0.0)


def _work_inside(eqn: JaxprEqn, mesh: LogicalMesh) -> Work:
    """Of all iterations of a scan, one iteration of a `while`, or the longest branch."""
    bodies = [_work_of_body(_equations_of(body), mesh) for body in sub_jaxprs(eqn)]
    if eqn.primitive.name == "cond":
        return max(bodies, key=sum)
    n_times: int = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    once = _total_work(bodies)
    return Work(n_times * once.shared_s, n_times * once.fixed_s)


def _work_of_body(eqns: Sequence[JaxprEqn], mesh: LogicalMesh) -> Work:
    """Copies between the memories of device and host run beside the work, in both directions at once."""
    lanes: dict[bool | None, list[Work]] = {None: [], False: [], True: []}
    for one in eqns:
        lane = is_in_host(aval_of(one.outvars[0])) if moves_memory(one) else None
        lanes[lane].append(work_of(one, factors_of(one), mesh))
    return max(map(_total_work, lanes.values()), key=sum)


def _total_work(parts: Iterable[Work]) -> Work:
    shared_s = fixed_s = 0.0
    for part in parts:
        shared_s, fixed_s = shared_s + part.shared_s, fixed_s + part.fixed_s
    return Work(shared_s, fixed_s)


@functools.lru_cache(maxsize=256)
def _equations_of(body: Jaxpr) -> tuple[JaxprEqn, ...]:
    return flat_body(body, [None] * len(body.constvars)).eqns


def _is_free_reshape(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in ("reshape", "squeeze"):
        return False
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    return before == (1, *after) or after == (1, *before)


def _rate_of(eqn: JaxprEqn) -> str:
    """The dtype of a product, or "tensorfloat32" for float32 by default.

    The first floating point operand counts: kernels may read integers, such as group sizes, first.
    """
    floats = (atom for atom in eqn.invars if is_inexact(atom))
    dtype = dtype_name(next(floats, eqn.invars[0])) if eqn.invars else "float32"
    precision = eqn.params.get("precision")
    asked = {precision} if not isinstance(precision, tuple) else set(precision)
    return "tensorfloat32" if dtype == "float32" and asked <= {None, jax.lax.Precision.DEFAULT} else dtype


# ---- attentions in blocks -------------------------------------------------------------------------------------------

#: Bytes of float32.
_SCORE_BYTES = 4
#: Seconds of products of 512 x 512 blocks over the formula for large products, by XLA's tables of H100s.
_OF_BLOCKS = 1.8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Counts of one direction of an attention, for each pair of blocks.

    products: products that read or write scores.
    sums: how many products sum or make the d features of keys, and the e features of values.
    loops: reads and writes of all scores by loops.
    rows: reads and writes of a block of queries, keys, values or results.
    """

    products: int
    sums: tuple[int, int]
    loops: int
    rows: int


#: score, value; maximum, and shifted scores with their sum; cut blocks, and the running results of the row.
_FORWARD = _Passes(products=2, sums=(1, 1), loops=3, rows=9)
#: score, p_bar, and three gradients; p and score_bar of score and p_bar; cut blocks, and sums of gradients.
_BACKWARD = _Passes(products=5, sums=(3, 2), loops=4, rows=19)


def has_kernel(eqn: JaxprEqn) -> bool:
    query, key, value = (aval_of(atom) for atom in eqn.invars[:3])
    return takes(query, key, value, eqn.params["kind"])


def blockwise_s(eqn: JaxprEqn, factors: Factors, device: DeviceSpec) -> float:
    passes = _FORWARD if eqn.primitive.name == "minialpa_attention" else _BACKWARD
    d, (n_keys, e) = shape_of(eqn.invars[1])[-1], (shape_of(eqn.invars[2])[i] for i in (1, 3))
    of_keys, of_values = passes.sums
    scores_bytes = _SCORE_BYTES * factors.flops / (2 * (of_keys * d + of_values * e))

    products_s = device.product_s(factors.flops, passes.products * scores_bytes, "tensorfloat32")
    # A block of queries has the rows of a block of scores, with features in place of keys.
    rows_bytes = passes.rows * scores_bytes * (d + e) / 2 / min(n_keys, SIDE) if n_keys > SIDE else 0.0
    moved_bytes = passes.loops * scores_bytes + rows_bytes
    return _OF_BLOCKS * products_s + moved_bytes / device.memory_bandwidth


def without_kernel_s(
    eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, candidates: Candidates
) -> NDArray[np.float64] | float:
    """For each candidate, the seconds on a single device that blocks take longer than cuDNN's kernel.

    The kernel has no causal mask for a part of the queries. In a ring without a window on the left, blocks of keys are
    visible to all queries of a device, to none, or are on the diagonal.
    """
    device = mesh.device
    if device is None or device.kernels is None or not is_attention(eqn) or not has_kernel(eqn):
        return 0.0
    if not eqn.params["kind"].has_window:
        return 0.0
    longer_s = blockwise_s(eqn, factors, device) - work_of(eqn, factors, mesh).shared_s
    # Results are [b t g r e], or [b t g r d] for the cotangent of queries. In candidates of a ring, only the keys
    # [b s g d] differ.
    in_parts = np.array([bool(made.dims[1]) for made in candidates.made[0]])
    seconds = _of_candidates(longer_s * in_parts, candidates)
    if eqn.params["kind"].left is None:
        for keys, numbers in zip(candidates.operands[1], candidates.strategies, strict=True):
            if keys.dims[1]:
                seconds[list(numbers)] = 0.0
    return seconds


# ---- grouped products -----------------------------------------------------------------------------------------------


def _grouped_s(eqn: JaxprEqn, device: DeviceSpec, shapes: Sequence[Sequence[int]], flops: float) -> float:
    """Of the loop over tiles of rows (`minialpa.grouped`): products, and copies.

    shapes: of `lhs`, `rhs` and the result on a device.

    A product cuts out the matrix of each group, and writes its tiles into a result of zeros, of which tiles of a single
    block read the old rows. A sum adds to a float32 matrix of zeros.
    """
    lhs, rhs, out = shapes
    sizes = [bytes_of(atom) / math.prod(shape_of(atom)) for atom in (*eqn.invars[:2], *eqn.outvars)]
    lhs_bytes, rhs_bytes, out_bytes = (math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=True))
    is_sum = eqn.primitive.name in _SUMS
    n_groups, *matrix = (out if is_sum else rhs)[1:]
    of_tiles = lhs[1] * lhs[2], lhs[1] * eqn.params["n_rows"], eqn.params["n_groups"]
    n_tiles = lhs[0] * n_groups * tiles_of_group(*of_tiles)
    # Slots without a row are in no tile.
    part = n_tiles * rows_of_tile(*of_tiles) / (lhs[0] * lhs[1] * lhs[2])
    if is_sum:
        sum_bytes = math.prod(matrix) * _SCORE_BYTES
        tile_bytes = part * (lhs_bytes + rhs_bytes)
        read_bytes = tile_bytes + 2 * n_tiles * sum_bytes
        copied_bytes = 2 * tile_bytes + 2 * lhs[0] * n_groups * sum_bytes + out_bytes
    else:
        # Each tile reads a matrix.
        read_bytes = part * (lhs_bytes + out_bytes) + n_tiles * math.prod(matrix) * sizes[1]
        n_copies = 3 if lhs[1] == 1 else 2
        copied_bytes = 2 * part * lhs_bytes + 2 * rhs_bytes + (1 + n_copies * part) * out_bytes

    products_s = device.product_s(flops, read_bytes, _rate_of(eqn)) + n_tiles * device.launch_s
    return products_s + copied_bytes / device.memory_bandwidth


def not_shared_s(
    eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, candidates: Candidates
) -> NDArray[np.float64] | float:
    """For each candidate of a grouped product, the seconds beyond an equal share, times the shares.

    Devices that share features have the same tiles; devices that share rows copy the same matrices.
    """
    if mesh.device is None or eqn.primitive.name not in _GROUPED:
        return 0.0
    specs = list(zip(candidates.operands[0], candidates.operands[1], strict=True))
    if candidates.has_choice:
        made = [candidates.made[0][number] for number in candidates.first]
    else:
        made = list(candidates.made[0])
    n_shares = candidates.n_shares[candidates.first]
    shapes = [shape_of(atom) for atom in (*eqn.invars[:2], *eqn.outvars)]

    whole_s = _grouped_s(eqn, mesh.device, shapes, factors.flops)
    seconds = np.zeros(len(candidates.n_shares))
    for i, ((lhs, rhs), out) in enumerate(zip(specs, made, strict=True)):
        local = [spec.shard_shape(shape, mesh.shape) for spec, shape in zip((lhs, rhs, out), shapes, strict=True)]
        local_s = _grouped_s(eqn, mesh.device, local, factors.flops / n_shares[i])
        seconds[candidates.first[i]] = n_shares[i] * local_s - whole_s
    return seconds


# ---- idle processors ------------------------------------------------------------------------------------------------

#: (rows, columns, rate) of the tiles of GPU kernels; chosen. Smaller tiles read more bytes per operation.
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6))
#: Parts of a sum, least summands of a part, and cost of joining the parts, as a part of the product.
_PARTS, _LEAST_PART, _JOINING = (1, 2, 4, 8, 16), 256, 0.05


def idle_s(eqn: JaxprEqn, mesh: LogicalMesh, candidates: Candidates) -> NDArray[np.float64] | float:
    """For each candidate of a matrix product, on a single device."""
    device = mesh.device
    if device is None or not device.n_processors or eqn.primitive.name != "dot_general":
        return 0.0
    (sums, _), (batch, _) = eqn.params["dimension_numbers"]
    n_batch, n_rows = len(batch), len(shape_of(eqn.invars[0])) - len(sums) - len(batch)
    if n_rows == 0 or n_batch + n_rows == len(shape_of(eqn.outvars[0])):
        return 0.0  # a product with a vector, which XLA computes as a sum, without tiles

    def waste_of(made: Spec) -> float:
        shape = made.shard_shape(shape_of(eqn.outvars[0]), mesh.shape)
        b, m, n = shape[:n_batch], shape[n_batch : n_batch + n_rows], shape[n_batch + n_rows :]
        k = n_summands / math.prod(mesh.shape[axis] for axis in made.partial)
        return waste(math.prod(b), math.prod(m), math.prod(n), int(k), device.n_processors)

    n_summands = math.prod(shape_of(eqn.invars[0])[dim] for dim in sums)
    computing_s = device.computing_s(factors_of(eqn).flops, _rate_of(eqn))
    wastes = np.array([waste_of(made) for made in candidates.made[0]])
    return _of_candidates(computing_s * (wastes - 1), candidates)


def _of_candidates(seconds: NDArray[np.float64], candidates: Candidates) -> NDArray[np.float64]:
    """seconds: for each of `candidates.made`."""
    if candidates.has_choice:
        return seconds
    of_candidates = np.zeros(len(candidates.n_shares))
    of_candidates[candidates.first] = seconds
    return of_candidates


@functools.lru_cache(maxsize=65536)
def waste(b: int, m: int, n: int, k: int, n_processors: int) -> float:
    """Time of `b` products [m k] [k n] over the time without idle processors."""
    best = math.inf
    for (rows, columns, rate), parts in itertools.product(_TILES, _PARTS):
        if parts > 1 and k < parts * _LEAST_PART:
            continue
        n_tiles = b * math.ceil(m / rows) * math.ceil(n / columns) * parts
        n_rounds = math.ceil(n_tiles / n_processors)
        area = n_processors * n_rounds * rows * columns / (parts * rate)
        best = min(best, area * (1 + _JOINING * (parts > 1)))
    return max(1.0, best / (b * m * n))
