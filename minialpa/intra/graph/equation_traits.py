"""What the builder of a cost graph asks about one equation, whatever the mesh and the options."""

from __future__ import annotations

import math

from jax.extend.core import JaxprEqn

from minialpa.intra.strategies.strategies import is_shared_copy
from minialpa.ir.equations import is_constraint, is_gradient_marker, shape_of
from minialpa.rules.factors import Factors
from minialpa.rules.heavy import is_contraction
from minialpa.rules.known_rules import is_kernel


def is_identity(eqn: JaxprEqn) -> bool:
    """Whether an equation only exists so that its result can have another sharding than its operand."""
    return is_gradient_marker(eqn) or is_shared_copy(eqn)


def is_barrier(eqn: JaxprEqn) -> bool:
    """Whether an equation passes several arrays on, each with the sharding that it has."""
    return eqn.primitive.name == "optimization_barrier"


def makes_array(eqn: JaxprEqn) -> bool:
    """Whether a result has more than one element, and so could be sharded."""
    return any(math.prod(shape_of(var)) > 1 for var in eqn.outvars)


def has_own_strategies(eqn: JaxprEqn, factors: Factors) -> bool:
    """Whether an equation has strategies of its own even if all that it reads comes from one node."""
    return is_contraction(eqn) or is_kernel(eqn) or _widens(factors) or is_identity(eqn) or is_constraint(eqn)


def _widens(factors: Factors) -> bool:
    """Whether the results have dimensions that no operand has, as a broadcast; these may be split freely."""
    read = {factor for dims in factors.operands for dim in dims for factor in dim}
    made = (factor for dims in factors.results for dim in dims for factor in dim)
    return any(f not in read and factors.sizes[f] > 1 and f not in factors.blocked for f in made)


def is_elementwise(factors: Factors) -> bool:
    """Whether the one result has the dimensions of every operand that is not a scalar."""
    result = factors.results[0] if len(factors.results) == 1 else None
    return result is not None and all(not dims or dims == result for dims in factors.operands)
