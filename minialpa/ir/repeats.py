"""`Repeats`: how many equations of a whole step each equation of a short step stands for.

The search prices a short step, with three or four of many equal units such as layers, as the whole step. The equations
of one unit, the *model* unit, also stand for the units that are left out:

    units of the whole step     0   1   2   3   4   5   6   7
    units of the short step     0   1   2                   7
    counts                      1   1   5                   1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var


class UnitPass(NamedTuple):
    """The equations of a model unit in one forward pass, backward pass or update."""

    run: int
    segment: int
    direction: str


class Repeated(NamedTuple):
    """How many equations an equation stands for, itself included, and its pass."""

    n: int
    unit_pass: UnitPass


@dataclass(frozen=True, slots=True, eq=False)
class Repeats:
    """The counts of a short step; empty for a whole step.

    Attributes:
        equations: the equations of model units.
        variables: how many variables each result, argument and accumulator of these equations stands for.
        alike: for each equation of a model unit, the same equation of the unit before it.
    """

    equations: Mapping[JaxprEqn, Repeated] = field(default_factory=dict)
    variables: Mapping[Var, int] = field(default_factory=dict)
    alike: Mapping[JaxprEqn, JaxprEqn] = field(default_factory=dict)

    def with_readers(self, made: Mapping[Var, JaxprEqn]) -> Repeats:
        """With an additional equation `made[v]` for each result v, in the pass of v, and with its results."""
        passes = {v: one for eqn, one in self.equations.items() for v in eqn.outvars if v in made}
        equations = {made[v]: one for v, one in passes.items()}
        variables = {out: one.n for eqn, one in equations.items() for out in eqn.outvars}
        return replace(self, equations={**self.equations, **equations}, variables={**self.variables, **variables})

    def n_equations(self, eqn: JaxprEqn) -> int:
        found = self.equations.get(eqn)
        return 1 if found is None else found.n

    def n_variables(self, v: Var) -> int:
        return self.variables.get(v, 1)


#: The counts of a whole step.
NO_REPEATS = Repeats()
