"""Random numbers: dimensions that arrays of keys bring along are factors, dimensions that are drawn are blocked.

A drawn bit depends on its position in the array, so a shard draws the whole array and takes its part.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import JaxprEqn

from minialpa.intra.factors import Factors, replicated_factors, rule
from minialpa.intra.rules_common import FactorTable
from minialpa.intra.rules_elementwise import elementwise
from minialpa.jaxprs import shape_of


def _are_keys_independent(eqn: JaxprEqn) -> bool:
    """Whether each of an array of keys draws what it would draw alone: RBG draws under `vmap` from the first key."""
    keys: Any = eqn.invars[0].aval
    return str(keys.dtype) == "key<fry>"


@rule("random_clone", "random_seed")
def _key_for_key(eqn: JaxprEqn) -> Factors:
    return elementwise(eqn, flops_per_element=0.0)


@rule("random_fold_in")
def _random_fold_in(eqn: JaxprEqn) -> Factors:
    return elementwise(eqn) if _are_keys_independent(eqn) else replicated_factors(eqn)


def _led_by_keys(eqn: JaxprEqn) -> Factors:
    """The leading dimensions that all arrays have are those of the keys; what follows is blocked."""
    table = FactorTable()
    shapes = [shape_of(v) for v in (*eqn.invars, *eqn.outvars)]
    keys = min(shapes, key=len)
    lead = table.dims(keys)
    arrays = [lead + table.dims(shape[len(keys) :], blocked=True) for shape in shapes]
    return table.build(eqn, arrays[: len(eqn.invars)], arrays[len(eqn.invars) :])


@rule("random_unwrap", "random_wrap")
def _wrap(eqn: JaxprEqn) -> Factors:
    """Keys, and the same as integers, a row for each."""
    return _led_by_keys(eqn)


@rule("random_bits", "random_gamma", "random_split")
def _draw(eqn: JaxprEqn) -> Factors:
    return _led_by_keys(eqn) if _are_keys_independent(eqn) else replicated_factors(eqn)


@rule("rng_bit_generator", "rng_uniform")
def _draw_whole(eqn: JaxprEqn) -> Factors:
    return replicated_factors(eqn)
