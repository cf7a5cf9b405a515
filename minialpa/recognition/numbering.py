"""In: how variables are computed. Out: a number for each, so that arrays with equal numbers have equal elements.

`tracing/values.py` numbers the values of a program, too. There, an equation that gives floats a wider dtype, or a
barrier, makes a new value; here the number is that of its operand, because the equations of one attention read its
scores on both sides of such equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, aval_of, has_all, is_literal

#: Equations that arrays are compared by, from the one that makes an array backwards.
_DEPTH = 12
#: Dtypes of floats that attentions have, narrower ones first.
FLOATS = ("bfloat16", "float16", "float32", "float64")


class Numbers:
    """Numbers of arrays. Arrays that are computed alike have the same number, also on both sides of a barrier."""

    def __init__(self, producers: Mapping[Var, JaxprEqn]) -> None:
        self._producers = producers
        self._of_var: dict[Var, int] = {}
        self._of_key: dict[Any, int] = {}

    def __call__(self, atom: Atom, depth: int = _DEPTH) -> int:
        if is_literal(atom):
            return self._intern(("literal", str(aval_of(atom)), repr(atom.val)))
        if atom not in self._of_var:
            key = self._key(atom, depth)
            self._of_var[atom] = key if isinstance(key, int) else self._intern(key)
        return self._of_var[atom]

    def _intern(self, key: Any) -> int:
        return self._of_key.setdefault(key, len(self._of_key))

    def _key(self, var: Var, depth: int) -> Any:
        """What a variable is known by: the number of what is before a barrier, its equation, or itself."""
        eqn = self._producers.get(var)
        if eqn is None or eqn.effects:
            return ("variable", var)
        i = eqn.outvars.index(var)
        if eqn.primitive.name == "optimization_barrier" or keeps_elements(eqn):
            return self(eqn.invars[i], depth)
        if depth == 0:
            return ("variable", var)

        key = (eqn.primitive, i, tuple(eqn.params.items()), tuple(self(atom, depth - 1) for atom in eqn.invars))
        try:
            hash(key)
        except TypeError:  # a parameter that cannot be hashed
            return ("variable", var)
        return key


def keeps_elements(eqn: JaxprEqn) -> bool:
    """Whether an equation only gives floats a wider dtype, or changes nothing at all."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        old, new = (aval_of(atom).dtype for atom in (eqn.invars[0], eqn.outvars[0]))
        return old.name in FLOATS and new.name in FLOATS and has_all(new, old)
    if name == "reduce_precision":
        info = jnp.finfo(aval_of(eqn.outvars[0]).dtype)
        return bool(eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant)
    return name in ("copy", "name", "stop_gradient")
