"""Rules of random numbers: dimensions of arrays of keys are factors, drawn dimensions are positional or blocked.

For threefry, bits[i] = threefry(key, i) with i = 0, 1, ... in row-major order, so a shard at a known position draws its
own part. With other generators, each shard draws the whole array and takes its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from minialpa.ir.equations import aval_of, shape_of
from minialpa.rules.common import FactorTable, n_elements
from minialpa.rules.elementwise import elementwise
from minialpa.rules.factors import Factors, Shapes
from minialpa.rules.known_rules import Starts, replicated_factors, rule
from minialpa.support.private_jax import under_settings_of


def _are_keys_independent(eqn: JaxprEqn) -> bool:
    """Under `vmap`, RBG draws from the first key."""
    keys: Any = eqn.invars[0].aval
    return str(keys.dtype) == "key<fry>"


@rule("random_clone", "random_seed")
def _key_for_key(eqn: JaxprEqn) -> Factors:
    return elementwise(eqn, flops_per_element=0.0)


@rule("random_fold_in")
def _random_fold_in(eqn: JaxprEqn) -> Factors:
    return elementwise(eqn) if _are_keys_independent(eqn) else replicated_factors(eqn)


def _factors_led_by_keys(eqn: JaxprEqn, *, positional: bool = False) -> Factors:
    """All arrays begin with the dimensions of the keys."""
    table = FactorTable()
    shapes = [shape_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
    keys = min(shapes, key=len)
    lead = table.dims(keys)
    arrays = [lead + table.dims(shape[len(keys) :], blocked=True, positional=positional) for shape in shapes]
    return table.build(eqn, arrays[: len(eqn.invars)], arrays[len(eqn.invars) :])


@rule("random_unwrap", "random_wrap")
def _wrap(eqn: JaxprEqn) -> Factors:
    return _factors_led_by_keys(eqn)


def _local_bits(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    return dict(eqn.params, shape=results[0][len(operands[0]) :])


def _bits_on_shards(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], starts: Starts) -> list[Any]:
    """The shard's part of jax's threefry bits for the whole array."""
    (keys,) = operands
    lead, shape = tuple(range(keys.ndim)), (*keys.shape, *params["shape"])

    # counts[i] is the row-major number of element i among all elements of its key in the whole array.
    counts = jnp.zeros(shape, np.uint32)
    for d in range(len(lead), len(shape)):
        positions = lax.broadcasted_iota(np.uint32, shape, d) + jnp.asarray(starts.results[0][d], np.uint32)
        counts = counts * np.uint32(shape_of(eqn.outvars[0])[d]) + positions

    data = jax.random.key_data(keys)
    first, second = (lax.broadcast_in_dim(data[..., i], shape, lead) for i in range(2))
    high, low = threefry2x32_p.bind(first, second, jnp.zeros_like(counts), counts)
    if params["bit_width"] == 64:
        return [high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)]
    return [(high ^ low).astype(aval_of(eqn.outvars[0]).dtype)]


@rule("random_bits", localize=_local_bits, on_shards=_bits_on_shards)
def _bits(eqn: JaxprEqn) -> Factors:
    if not _are_keys_independent(eqn):
        return replicated_factors(eqn)
    # Without partitionable threefry, counts do not start at 0 for each key; longer arrays need counts of 64 bits.
    n_drawn = n_elements(eqn.outvars[0]) // max(1, n_elements(eqn.invars[0]))
    config: Any = jax.config  # which does not declare its flags
    with under_settings_of(eqn):
        is_counted = config.jax_threefry_partitionable and n_drawn < 2**32
    return _factors_led_by_keys(eqn, positional=is_counted)


@rule("random_gamma", "random_split")
def _draw(eqn: JaxprEqn) -> Factors:
    return _factors_led_by_keys(eqn) if _are_keys_independent(eqn) else replicated_factors(eqn)


@rule("rng_bit_generator", "rng_uniform")
def _draw_whole(eqn: JaxprEqn) -> Factors:
    return replicated_factors(eqn)
