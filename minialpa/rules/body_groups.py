"""The equations inside a loop or branch (`Region`) in, the dimensions that are split together (`Groups`) out.

In `h' = tanh(h @ w + x)`, the examples of `h`, `x` and `h'` are one group; the features of `h` and `h'` and both
dimensions of `w` are another. A group is blocked if equations on shards would not compute shards of the whole results.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import JaxprEqn

from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, is_control_flow, is_literal, shape_of
from minialpa.rules.factors import Dims, Factors
from minialpa.rules.known_rules import factors_of
from minialpa.rules.loop_exits import LoopExit, loop_exits
from minialpa.support.disjoint_sets import DisjointSets
from minialpa.support.identity import ById

#: One dimension of an array of a region.
Node = tuple[Any, int]


@dataclass(frozen=True, kw_only=True)
class Region:
    """The equations inside another one, with its operands and results.

    Attributes:
        parts: programs over shared variables: a body, a condition, branches.
        results: by result, one atom from each branch.
        carried: pairs (result, input): the result of one iteration is the input of the next.
        tests: atoms that decide whether another iteration runs. They are equal in all shards, or have one element for
            each example of all carries, or let each shard exit by itself (`loop_exits`).
        equal: for each input of loops with tests, the number of the first input that is the same array.
    """

    parts: tuple[Block, ...]
    inputs: tuple[Atom, ...]
    results: tuple[tuple[Atom, ...], ...]
    carried: tuple[tuple[int, int], ...] = ()
    tests: tuple[Atom, ...] = ()
    equal: tuple[int, ...] = ()

    @functools.cached_property
    def loop_exits(self) -> dict[Atom, LoopExit]:
        test, body = self.parts
        return loop_exits(test, body, len(self.carried), self.equal)

    @functools.cached_property
    def eqns(self) -> tuple[JaxprEqn, ...]:
        return tuple(eqn for part in self.parts for eqn in part.eqns)

    @functools.cached_property
    def factors(self) -> dict[JaxprEqn, Factors]:
        return {eqn: factors_of(eqn) for eqn in self.eqns}

    @functools.cached_property
    def result_atoms(self) -> tuple[Atom, ...]:
        return tuple(atom for atoms in self.results for atom in atoms)


def node_of(atom: Atom, dim: int) -> Node:
    """Each occurrence of a literal is a separate array."""
    return (ById(atom) if is_literal(atom) else atom, dim)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Groups:
    """A partition of the dimensions of a region into groups, each named by one of its dimensions.

    sizes: most blocks.
    positional: groups whose shards must know their positions.
    members: by group and number of an equation, the factors of the equation in the group.
    """

    sets: DisjointSets[Node]
    sizes: Mapping[Node, int]
    blocked: frozenset[Node]
    positional: frozenset[Node]
    members: Mapping[Node, Mapping[int, set[int]]]

    def find(self, node: Node) -> Node:
        return self.sets.find(node)

    def of(self, atom: Atom) -> list[Node]:
        return [self.find(node_of(atom, d)) for d, size in enumerate(shape_of(atom)) if size > 1]


def find_groups(region: Region) -> Groups:
    links = _Links()
    for eqn in region.eqns:
        if eqn.outvars:  # equations without results, such as callbacks, accept any shard
            _link_equation(links, eqn, region.factors[eqn])
    _link_boundary(links, region)

    # From here on, the groups are final.
    intermediate = (var for eqn in region.eqns for var in eqn.outvars)
    for atom in (*region.inputs, *intermediate, *region.result_atoms):
        _limit_array(links, atom)
    for atom in _held_in_full(region):
        for d in range(len(shape_of(atom))):
            links.mark_positional(node_of(atom, d))

    return Groups(
        sets=links.sets,
        sizes=links.sizes,
        blocked=links.current(links.blocked),
        positional=links.current(links.positional),
        members=_members(region, links.sets),
    )


# ---- one equation ---------------------------------------------------------------------------------------------------


def leading_nodes(eqn: JaxprEqn, factors: Factors) -> dict[int, list[Node]]:
    """For each factor, the dimensions that splitting it cuts."""
    nodes: dict[int, list[Node]] = defaultdict(list)
    for atom, dims in _arrays(eqn, factors):
        for d, dim in enumerate(dims):
            outermost = factors.leading(dim)
            if outermost is not None:
                nodes[outermost].append(node_of(atom, d))
    return nodes


def is_made_whole(eqn: JaxprEqn, factors: Factors, factor: int) -> bool:
    """Whether only results have a blocked factor, as in random bits.

    Such results are computed in full and cut, unless the rule's `on_shards` computes the part of the shard alone.
    """
    if factor not in factors.blocked or factor in factors.reductions or eqn.effects:
        return False
    return not any(factor in dim for dims in factors.operands for dim in dims)


def _arrays(eqn: JaxprEqn, factors: Factors) -> list[tuple[Atom, Dims]]:
    return list(zip((*eqn.invars, *eqn.outvars), (*factors.operands, *factors.results), strict=True))


# ---- linking --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Links:
    """Unfinished. `blocked` and `positional` may hold former names of groups."""

    sets: DisjointSets[Node] = field(default_factory=DisjointSets)
    sizes: dict[Node, int] = field(default_factory=dict)
    blocked: set[Node] = field(default_factory=set)
    positional: set[Node] = field(default_factory=set)

    def join(self, first: Node, second: Node) -> None:
        """The first gives the name."""
        joined = self.sets.join(first, second)
        if joined is not None:
            group = self.sets.find(first)
            self.sizes[group] = math.gcd(self.sizes.pop(group, 0), self.sizes.pop(joined, 0))
            for marked in (self.blocked, self.positional):
                if joined in marked:
                    marked.add(group)

    def limit(self, node: Node, size: int) -> None:
        group = self.sets.find(node)
        self.sizes[group] = math.gcd(self.sizes.get(group, 0), size)

    def block(self, node: Node) -> None:
        self.blocked.add(self.sets.find(node))

    def mark_positional(self, node: Node) -> None:
        self.positional.add(self.sets.find(node))

    def current(self, marked: Iterable[Node]) -> frozenset[Node]:
        return frozenset(node for node in marked if self.sets.find(node) == node)


def _link_equation(links: _Links, eqn: JaxprEqn, factors: Factors) -> None:
    # An inner factor would leave strided blocks.
    longer = ([f for f in dim if factors.sizes[f] > 1] for _, dims in _arrays(eqn, factors) for dim in dims)
    inner = {f for dim in longer for f in dim[1:]}
    for f, nodes in leading_nodes(eqn, factors).items():
        for node in nodes:
            links.join(nodes[0], node)
        links.limit(nodes[0], factors.sizes[f])

        is_by_position = f in factors.positional and is_control_flow(eqn)
        if f in inner or (f in factors.blocked and not (is_by_position or is_made_whole(eqn, factors, f))):
            links.block(nodes[0])
        elif f in factors.blocked:
            links.mark_positional(nodes[0])


def _link_boundary(links: _Links, region: Region) -> None:
    """Each carry has its next value; results have branches."""
    for atoms in region.results:
        _link_arrays(links, atoms)
    for result, source in region.carried:
        _link_arrays(links, (*region.results[result], region.inputs[source]))
        for test in region.tests:  # under vmap, a loop has a test for each example
            _link_arrays(links, (region.inputs[source], test))


def _link_arrays(links: _Links, atoms: Sequence[Atom]) -> None:
    for atom in atoms[1:]:
        for d in range(len(shape_of(atom))):
            links.join(node_of(atoms[0], d), node_of(atom, d))


def _limit_array(links: _Links, atom: Atom) -> None:
    """Blocks divide the array's dimensions; two dimensions in one group block it."""
    for d, size in enumerate(shape_of(atom)):
        links.limit(node_of(atom, d), size)

    # Its blocks would lie on the diagonal.
    groups = [links.sets.find(node_of(atom, d)) for d, size in enumerate(shape_of(atom)) if size > 1]
    links.blocked.update(group for group in groups if groups.count(group) > 1)


def _held_in_full(region: Region) -> list[Atom]:
    """Captured arrays and literals."""
    captured = [var for part in region.parts for var in part.constvars]
    read = (*(atom for eqn in region.eqns for atom in eqn.invars), *region.result_atoms)
    return [*captured, *(atom for atom in read if is_literal(atom))]


def _members(region: Region, sets: DisjointSets[Node]) -> dict[Node, dict[int, set[int]]]:
    members: dict[Node, dict[int, set[int]]] = {}
    for i, eqn in enumerate(region.eqns):
        for f, nodes in leading_nodes(eqn, region.factors[eqn]).items():
            members.setdefault(sets.find(nodes[0]), {}).setdefault(i, set()).add(f)
    return members
