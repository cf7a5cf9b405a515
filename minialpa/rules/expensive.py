"""Equations in, their cost classes out: contractions, expensive operations, and views."""

from __future__ import annotations

import functools

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import sub_jaxprs

#: Operations whose work grows faster than their operands and results.
_CONTRACTIONS = frozenset(
    (
        "conv_general_dilated",
        "dot_general",
        "minialpa_attention",
        "minialpa_attention_gradient",
        "minialpa_grouped_product",
        "minialpa_grouped_sum",
        "minialpa_routed_product",
        "minialpa_routed_sum",
    )
)
_VIEWS = frozenset(("reshape", "squeeze", "transpose"))
_DECOMPOSITIONS = frozenset(("cholesky", "eigh", "lu", "qr", "svd"))
_EXPENSIVE = _CONTRACTIONS | _DECOMPOSITIONS | {"sort"}


def is_contraction(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _CONTRACTIONS


def is_decomposition(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _DECOMPOSITIONS


def is_attention(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name.startswith("minialpa_attention")


@functools.lru_cache(2**15)
def has_contraction(eqn: JaxprEqn) -> bool:
    """Also inside."""
    return is_contraction(eqn) or any(has_contraction(inner) for body in sub_jaxprs(eqn) for inner in body.eqns)


def is_expensive(eqn: JaxprEqn) -> bool:
    """Whether one run for each reader of the results is too expensive."""
    return eqn.primitive.name in _EXPENSIVE or bool(sub_jaxprs(eqn))


def is_view(eqn: JaxprEqn) -> bool:
    """Whether a product can read the operand, in another order, instead of the result."""
    return eqn.primitive.name in _VIEWS


def reads_in_place(eqn: JaxprEqn) -> bool:
    """Whether kernels read one operand without a copy once the others are in memory."""
    return has_contraction(eqn) or eqn.primitive.name == "gather"
