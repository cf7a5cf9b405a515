"""Value numbering: equal computations of a program get equal numbers.

Two values are equal if they are the same operation on equal values, or constants with the same value everywhere.
Algebraic laws and the values of arguments are not used.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, dtype_name, is_literal, shape_of
from minialpa.support.identity import ById


def producers_of(part: Block) -> dict[Atom, JaxprEqn]:
    return {var: eqn for eqn in part.eqns for var in eqn.outvars}


#: Primitives that keep the value of a constant operand.
_PASSING = (
    "broadcast_in_dim", "convert_element_type", "copy", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "reshape", "slice", "squeeze", "stop_gradient", "transpose",
)  # fmt: skip


#: Primitives of one result, whose elements depend on the same elements of the operands, or on scalars.
ELEMENTWISE = (
    "abs", "add", "and", "convert_element_type", "copy", "div", "eq", "ge", "gt", "is_finite", "le", "lt", "max", "min",
    "mul", "ne", "neg", "not", "or", "select_n", "sign", "stop_gradient", "sub", "xor",
)  # fmt: skip


@dataclass(slots=True)
class ValueNumbering:
    """The numbers of a program's values.

    Attributes:
        numbers, of: by computation and by variable.
        constants: by number, for arrays that are one integer everywhere.
        scalars: by number of an array that is a scalar everywhere, the number of the scalar.
    """

    numbers: dict[Hashable, int] = field(default_factory=dict)
    of: dict[Atom, int] = field(default_factory=dict)
    constants: dict[int, int] = field(default_factory=dict)
    scalars: dict[int, int] = field(default_factory=dict)

    def copy(self) -> ValueNumbering:
        return replace(
            self,
            numbers=dict(self.numbers),
            of=dict(self.of),
            constants=dict(self.constants),
            scalars=dict(self.scalars),
        )

    def number(self, computation: Hashable) -> int:
        return self.numbers.setdefault(computation, len(self.numbers))

    def name(self, var: Atom, computation: Hashable) -> None:
        self.of[var] = self.number(computation)

    def read(self, atom: Atom) -> int:
        if not is_literal(atom):
            return self.of[atom]
        value = np.asarray(atom.val)
        number = self.number(("literal", dtype_name(atom), shape_of(atom), value.tobytes()))
        if value.dtype.kind in "biu" and value.size and np.all(value == value.flat[0]):
            self.constants[number] = int(value.flat[0])
        return number

    def constant(self, atom: Atom) -> int | None:
        """The integer that an array is everywhere; None if unknown."""
        return self.constants.get(self.read(atom))

    def are_equal(self, first: Atom, second: Atom) -> bool:
        """Whether two arrays of one shape and dtype are known to be equal."""
        constant = self.constant(first)
        return self.read(first) == self.read(second) or (constant is not None and constant == self.constant(second))

    def assume(self, atom: Atom, value: bool, producers: Mapping[Atom, JaxprEqn]) -> None:
        """Record that a boolean array is `value` everywhere, with the consequences for its operands."""
        if is_literal(atom):
            return
        self.constants[self.of[atom]] = int(value)
        eqn = producers.get(atom)
        if eqn is None:
            return
        match (eqn.primitive.name, value):
            case ("not", _):
                self.assume(eqn.invars[0], not value, producers)
            case ("or" | "reduce_or", False) | ("and" | "reduce_and", True):
                for operand in eqn.invars:
                    self.assume(operand, value, producers)

    def run(self, part: Block) -> None:
        """Number the values of a program whose inputs have numbers."""
        for var, value in zip(part.constvars, part.consts, strict=True):
            self.name(var, ("constant", ById(value)))
        for eqn in part.eqns:
            self._number_equation(eqn)

    def _number_equation(self, eqn: JaxprEqn) -> None:
        constant = self._constant_result(eqn)
        same = self._same_as(eqn)
        if same is not None:
            self.of[eqn.outvars[0]] = self.read(same)
        elif (scalar := self._scalar_of(eqn)) is not None:
            # Whether `vmap` broadcasts before or after the computation, the number is the same.
            (result,) = eqn.outvars
            self.name(result, ("filled", scalar, shape_of(result)))
            self.scalars[self.of[result]] = scalar
        else:
            computation = self._computation(eqn)
            for r, var in enumerate(eqn.outvars):
                self.name(var, (computation, r))
        if constant is not None:
            self.constants[self.of[eqn.outvars[0]]] = constant

    def _computation(self, eqn: JaxprEqn) -> Hashable:
        """Equal for equal computations; the equation itself if it has side effects or unhashable parameters."""
        operands = tuple(self.read(atom) for atom in eqn.invars)
        shapes = tuple((shape_of(var), dtype_name(var)) for var in eqn.outvars)
        computation = (eqn.primitive.name, tuple(eqn.params.items()), operands, shapes)
        try:
            hash(computation)
        except TypeError:  # a parameter that cannot be hashed
            return eqn
        return eqn if eqn.effects else computation

    def _scalar_of(self, eqn: JaxprEqn) -> int | None:
        """The number of the scalar that the result is everywhere, if known."""
        if not eqn.outvars or not shape_of(eqn.outvars[0]):
            return None
        scalars = [self._scalar(atom) for atom in eqn.invars]
        if None in scalars or eqn.effects:
            return None
        if eqn.primitive.name == "broadcast_in_dim":
            return scalars[0]
        if eqn.primitive.name not in ELEMENTWISE:
            return None
        result = ((), dtype_name(eqn.outvars[0]))
        computation = (eqn.primitive.name, tuple(eqn.params.items()), tuple(scalars), (result,))
        try:
            return self.number((computation, 0))
        except TypeError:  # a parameter that cannot be hashed
            return None

    def _scalar(self, atom: Atom) -> int | None:
        number = self.read(atom)
        return number if not shape_of(atom) else self.scalars.get(number)

    def _constant_result(self, eqn: JaxprEqn) -> int | None:
        """The integer that a result is everywhere; None if unknown."""
        name, constants = eqn.primitive.name, [self.constant(atom) for atom in eqn.invars]
        is_boolean = len(eqn.outvars) == 1 and dtype_name(eqn.outvars[0]) == "bool"
        if name in _PASSING and len(constants) == 1 and 0 not in shape_of(eqn.invars[0]):
            return constants[0] if constants[0] in (0, 1) else None  # every dtype has 0 and 1
        if name == "not" and is_boolean and constants[0] is not None:
            return 1 - constants[0]
        if name in ("and", "or") and is_boolean:
            decisive = int(name == "or")
            return decisive if decisive in constants else None
        return None

    def _same_as(self, eqn: JaxprEqn) -> Atom | None:
        """The operand that equals the result, if known."""
        name, constants = eqn.primitive.name, [self.constant(atom) for atom in eqn.invars]
        if name == "select_n" and constants[0] in (0, 1):
            return eqn.invars[1 + constants[0]]
        if name in ("copy", "stop_gradient"):
            return eqn.invars[0]

        dtype = dtype_name(eqn.outvars[0]) if eqn.outvars else ""
        neutral = {"or": 0, "and": 1}.get(name) if dtype == "bool" else {"add": 0}.get(name) if "int" in dtype else None
        if neutral is None or neutral not in constants:
            return None
        other = eqn.invars[1 - constants.index(neutral)]
        return other if shape_of(other) == shape_of(eqn.outvars[0]) else None
