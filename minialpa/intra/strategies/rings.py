"""An attention whose devices pass keys and values around a ring (`attention/ring.py`) in; its collectives out.

Of n devices, each sends keys and values n - 1 times. In the gradient, it sends them n times in pieces, with cotangents,
and once more the cotangents of a piece. Arrays of one dtype are sent together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jax.extend.core import JaxprEqn

from minialpa.attention.ring import pieces_of
from minialpa.cost import Collective
from minialpa.ir.equations import Atom, bytes_of, dtype_name, shape_of
from minialpa.rules.factors import Factors
from minialpa.sharding import Spec


def ring_axes(factors: Factors, operands: Sequence[Spec]) -> tuple[int, ...]:
    """The mesh axes of the ring; empty without one. operands: specs, the second of keys [b s g d]."""
    return operands[1].dims[1] if factors.rings else ()


def passes_of(
    eqn: JaxprEqn, factors: Factors, operands: Sequence[Spec], mesh_shape: tuple[int, ...]
) -> Iterator[tuple[Collective, Atom, int]]:
    """Each collective, its array, and how many times it runs."""
    axes = ring_axes(factors, operands)
    if not axes:
        return
    n = math.prod(mesh_shape[axis] for axis in axes)
    is_gradient = eqn.primitive.name == "minialpa_attention_gradient"
    n_shards = operands[1].n_shards(mesh_shape)
    keys, bars = eqn.invars[1:3], eqn.outvars[1:3]
    sent: list[tuple[Sequence[Atom], int, int]] = [(keys, 1, n - 1)]
    if is_gradient:
        queries = operands[0].shard_shape(shape_of(eqn.invars[0]), mesh_shape)
        n_pieces = pieces_of(queries[1], shape_of(keys[0])[1] // n).n_blocks
        sent = [([*keys, *bars], n_pieces, n * n_pieces), (bars, n_pieces, 1)]
    for atoms, n_parts, times in sent:
        for dtype in dict.fromkeys(map(dtype_name, atoms)):
            together = [atom for atom in atoms if dtype_name(atom) == dtype]
            n_bytes = sum(map(bytes_of, together)) / n_shards / n_parts
            yield Collective("collective-permute", n_bytes, axes), together[0], times
