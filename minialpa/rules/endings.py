"""Endings: what the iterations of a loop leave as it is once a condition of its test is false.

A loop over a batch by hand, `while any(active): x = where(active, step(x), x)`, goes on until the last example has
ended. A shard may end by itself if the iterations that it skips would leave its carries as they are. `endings` proves
that by structure: it numbers the values of test and body, so that equal computations have equal numbers, and evaluates
the body under what the false condition implies:

    any(p) is false           -> p is false for each element
    not all(d) is false       -> d is true for each element
    where(p, new, old)        -> old, if p is false

Nothing is concluded from computations that are equal by mathematics alone, or by the values that arrive.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.tracing.jaxprs import Atom, FlatJaxpr, dtype_name, is_literal, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What holds in every iteration that begins with a condition being false.

    Attributes:
        kept: numbers of the carries that the iteration leaves as they are.
        read: numbers of the carries that the condition is computed from.
    """

    kept: frozenset[int]
    read: frozenset[int]


def conditions(test: FlatJaxpr) -> list[Atom]:
    """What has to hold for another iteration: the conditions that a test joins by `and`."""
    producers = _producers(test)
    found, todo = [], list(test.outvars)
    while todo:
        atom = todo.pop()
        eqn = None if is_literal(atom) else producers.get(atom)
        if eqn is not None and eqn.primitive.name == "and" and not shape_of(atom):
            todo += eqn.invars
        else:
            found.append(atom)
    return found


def endings(test: FlatJaxpr, body: FlatJaxpr, n_carries: int, equal: Sequence[int]) -> dict[Atom, Ending]:
    """The ending of each condition of a loop.

    n_carries: number of carries, the last inputs of `test` and of `body`.
    equal: for each input, constants of the test before inputs of the body, the number of the first one that is the
        same array.
    """
    values = _Values()
    n_own = len(test.invars) - n_carries
    for k, var in enumerate((*test.invars[:n_own], *body.invars)):
        values.name(var, ("input", equal[k]))
    values.run(test)

    found: dict[Atom, Ending] = {}
    for condition in dict.fromkeys(conditions(test)):
        if is_literal(condition):
            continue
        inside = values.copy()
        inside.assume(condition, False, _producers(test))
        inside.run(body)
        carries = body.invars[len(body.invars) - n_carries :]
        pairs = enumerate(zip(carries, body.outvars, strict=True))
        read = _inputs_of(condition, test)
        found[condition] = Ending(
            kept=frozenset(i for i, (old, new) in pairs if inside.are_equal(old, new)),
            read=frozenset(i for i, carry in enumerate(carries) if carry in read),
        )
    return found


def counters(body: FlatJaxpr, n_carries: int) -> frozenset[int]:
    """Numbers of the carries that every iteration raises by one: the larger one is that of the later end."""
    producers = _producers(body)
    carries = body.invars[len(body.invars) - n_carries :]
    found = set()
    for i, (carry, new) in enumerate(zip(carries, body.outvars, strict=True)):
        eqn = None if is_literal(new) else producers.get(new)
        if eqn is None or eqn.primitive.name != "add" or not any(atom is carry for atom in eqn.invars):
            continue
        # Narrow integers may begin again at their least value.
        is_wide = dtype_name(carry) in ("int32", "int64", "uint32", "uint64")
        if is_wide and any(is_literal(atom) and np.all(np.asarray(atom.val) == 1) for atom in eqn.invars):
            found.add(i)
    return frozenset(found)


def _producers(part: FlatJaxpr) -> dict[Atom, JaxprEqn]:
    return {var: eqn for eqn in part.eqns for var in eqn.outvars}


def _inputs_of(atom: Atom, part: FlatJaxpr) -> set[Atom]:
    """The inputs of a program that a value is computed from."""
    needed = {atom}
    for eqn in reversed(part.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(var for var in eqn.invars if not is_literal(var))
    return needed


#: Primitives whose result is constant if their operand is, and has the same value.
_PASSING = (
    "broadcast_in_dim", "convert_element_type", "copy", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "reshape", "slice", "squeeze", "stop_gradient", "transpose",
)  # fmt: skip


@dataclass(slots=True)
class _Values:
    """The values of a program by number: equal numbers are equal values.

    Attributes:
        numbers: the number of each computation.
        of: the number of each variable.
        constants: values of which all elements are known to be this number.
    """

    numbers: dict[Hashable, int] = field(default_factory=dict)
    of: dict[Atom, int] = field(default_factory=dict)
    constants: dict[int, int] = field(default_factory=dict)

    def copy(self) -> _Values:
        return replace(self, numbers=dict(self.numbers), of=dict(self.of), constants=dict(self.constants))

    def number(self, computation: Hashable) -> int:
        """The number of a computation."""
        return self.numbers.setdefault(computation, len(self.numbers))

    def name(self, var: Atom, computation: Hashable) -> None:
        self.of[var] = self.number(computation)

    def read(self, atom: Atom) -> int:
        """The number of an operand."""
        if not is_literal(atom):
            return self.of[atom]
        value = np.asarray(atom.val)
        number = self.number(("literal", dtype_name(atom), shape_of(atom), value.tobytes()))
        if value.dtype.kind in "biu" and value.size and np.all(value == value.flat[0]):
            self.constants[number] = int(value.flat[0])
        return number

    def constant(self, atom: Atom) -> int | None:
        """The number that all elements of an array are, if that is known."""
        return self.constants.get(self.read(atom))

    def are_equal(self, first: Atom, second: Atom) -> bool:
        """Whether two arrays of one shape and type are known to be equal."""
        constant = self.constant(first)
        return self.read(first) == self.read(second) or (constant is not None and constant == self.constant(second))

    def assume(self, atom: Atom, value: bool, producers: Mapping[Atom, JaxprEqn]) -> None:
        """Note that all elements of a boolean array are `value`, and what follows for what it is computed from."""
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

    def run(self, part: FlatJaxpr) -> None:
        """Number the values of a program, whose inputs have numbers."""
        for var, value in zip(part.constvars, part.consts, strict=True):
            self.name(var, ("constant", id(value)))
        for eqn in part.eqns:
            self._run(eqn)

    def _run(self, eqn: JaxprEqn) -> None:
        constant = self._constant_result(eqn)
        same = self._same_as(eqn)
        if same is not None:
            self.of[eqn.outvars[0]] = self.read(same)
        else:
            computation = self._computation(eqn)
            for r, var in enumerate(eqn.outvars):
                self.name(var, (computation, r))
        if constant is not None:
            self.constants[self.of[eqn.outvars[0]]] = constant

    def _computation(self, eqn: JaxprEqn) -> Hashable:
        operands = tuple(self.read(atom) for atom in eqn.invars)
        shapes = tuple((shape_of(var), dtype_name(var)) for var in eqn.outvars)
        computation = (eqn.primitive.name, tuple(eqn.params.items()), operands, shapes)
        try:
            hash(computation)
        except TypeError:  # a parameter that cannot be hashed
            return id(eqn)
        return id(eqn) if eqn.effects else computation

    def _constant_result(self, eqn: JaxprEqn) -> int | None:
        """The number that all elements of the only result are, if that follows from constant operands."""
        name, constants = eqn.primitive.name, [self.constant(atom) for atom in eqn.invars]
        is_boolean = len(eqn.outvars) == 1 and dtype_name(eqn.outvars[0]) == "bool"
        if name in _PASSING and len(constants) == 1 and 0 not in shape_of(eqn.invars[0]):
            return constants[0] if constants[0] in (0, 1) else None  # which every type has
        if name == "not" and is_boolean and constants[0] is not None:
            return 1 - constants[0]
        if name in ("and", "or") and is_boolean:
            decisive = int(name == "or")
            return decisive if decisive in constants else None
        return None

    def _same_as(self, eqn: JaxprEqn) -> Atom | None:
        """The operand that the only result is equal to, if one is known."""
        name, constants = eqn.primitive.name, [self.constant(atom) for atom in eqn.invars]
        if name == "select_n" and constants[0] in (0, 1):
            return eqn.invars[1 + constants[0]]
        if name in ("copy", "stop_gradient"):
            return eqn.invars[0]

        # What adds nothing: false to `or`, true to `and`, zero to a sum of integers.
        is_boolean = dtype_name(eqn.outvars[0]) == "bool" if eqn.outvars else False
        is_integer = "int" in dtype_name(eqn.outvars[0]) if eqn.outvars else False
        neutral = {"or": 0, "and": 1}.get(name) if is_boolean else {"add": 0}.get(name) if is_integer else None
        if neutral is None or neutral not in constants:
            return None
        other = eqn.invars[1 - constants.index(neutral)]
        return other if shape_of(other) == shape_of(eqn.outvars[0]) else None
