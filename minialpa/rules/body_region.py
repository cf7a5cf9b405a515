"""A region: equations that run together inside another one, such as the body of a loop.

A rule of control flow makes a `Region` of the programs inside its equation. `body_groups` finds out which dimensions of
a region's arrays are split together, `body_outcomes` what splitting them does, and `body_shards` runs it on shards.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn

from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, is_literal
from minialpa.rules.endings import Ending, endings
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of
from minialpa.support.identity import ById

#: One dimension of an array of a region.
Node = tuple[Any, int]


@dataclass(frozen=True, kw_only=True)
class Region:
    """Equations with the inputs and results that the surrounding equation sees.

    Attributes:
        parts: the programs of the region, over shared variables: a body, a condition, branches.
        inputs: a variable for each operand.
        results: for each result, the atoms that it may come from, one for each branch.
        carried: (result, input) pairs: the result of one iteration is the input of the next.
        tests: atoms that decide whether another iteration runs. They are the same in every shard, or true or false for
            each element of the first dimensions of all carries; or else each shard may end by itself (see `endings`).
        equal: for each input, the number of the first one that is the same array; only of loops with tests.
    """

    parts: tuple[Block, ...]
    inputs: tuple[Atom, ...]
    results: tuple[tuple[Atom, ...], ...]
    carried: tuple[tuple[int, int], ...] = ()
    tests: tuple[Atom, ...] = ()
    equal: tuple[int, ...] = ()

    @functools.cached_property
    def endings(self) -> dict[Atom, Ending]:
        """The ending of each condition of the test."""
        test, body = self.parts
        return endings(test, body, len(self.carried), self.equal)

    @functools.cached_property
    def eqns(self) -> tuple[JaxprEqn, ...]:
        """The equations of all parts, in order."""
        return tuple(eqn for part in self.parts for eqn in part.eqns)

    @functools.cached_property
    def factors(self) -> dict[JaxprEqn, Factors]:
        """The factors of each equation."""
        return {eqn: factors_of(eqn) for eqn in self.eqns}

    @functools.cached_property
    def result_atoms(self) -> tuple[Atom, ...]:
        """All atoms that a result may come from."""
        return tuple(atom for atoms in self.results for atom in atoms)


def node_of(atom: Atom, dim: int) -> Node:
    """A dimension of an array; equal literals are different arrays."""
    return (ById(atom) if is_literal(atom) else atom, dim)
