"""Groups: which dimensions of the arrays of a region are split together.

A region goes in, and a partition of the dimensions of its arrays comes out. By the rules of the equations, in
`h' = tanh(h @ w + x)` the examples of `h`, `x` and `h'` are one group, and the features of `h`, both dimensions of `w`
and the features of `h'` are another one. A group is blocked if an equation on shards would compute anything else than
the shards of what it computes on whole arrays.

A group is positional if shards must know where they begin. Arrays that a body makes of nothing that is split, such as
random bits, are made in full, and each shard takes its part; or it makes that part alone, by the rule's `on_shards`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom, is_control_flow, is_literal, shape_of
from minialpa.rules.body_region import Node, Region, node_of
from minialpa.rules.factors import Dims, Factors
from minialpa.support.disjoint_sets import DisjointSets


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Groups:
    """A partition of the dimensions of a region into groups. A group is named by one of its dimensions.

    Attributes:
        sets: the groups as disjoint sets.
        sizes: for each group, the largest number of blocks that it can be cut into.
        blocked: groups that cannot be split.
        positional: groups of which a shard must know where it begins.
        members: for each group, by the number of an equation, the factors of the equation that belong to the group.
    """

    sets: DisjointSets[Node]
    sizes: Mapping[Node, int]
    blocked: frozenset[Node]
    positional: frozenset[Node]
    members: Mapping[Node, Mapping[int, set[int]]]

    def find(self, node: Node) -> Node:
        """The group of a dimension."""
        return self.sets.find(node)

    def of(self, atom: Atom) -> list[Node]:
        """The group of each dimension of an array that is longer than 1."""
        return [self.find(node_of(atom, d)) for d, size in enumerate(shape_of(atom)) if size > 1]


def find_groups(region: Region) -> Groups:
    """The groups of a region."""
    links = _Links()
    for eqn in region.eqns:
        if eqn.outvars:  # equations without results, such as callbacks, accept any shard
            _link_equation(links, eqn, region.factors[eqn])
    _link_boundary(links, region)

    # All arrays are linked by now, so the groups of each array are final.
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


# ---- dimensions of one equation -------------------------------------------------------------------------------------


def leading_nodes(eqn: JaxprEqn, factors: Factors) -> dict[int, list[Node]]:
    """The dimensions that are cut when a factor is split, for each factor that is the outermost one of a dimension."""
    nodes: dict[int, list[Node]] = defaultdict(list)
    for atom, dims in _arrays(eqn, factors):
        for d, dim in enumerate(dims):
            outermost = factors.leading(dim)
            if outermost is not None:
                nodes[outermost].append(node_of(atom, d))
    return nodes


def is_made_whole(eqn: JaxprEqn, factors: Factors, factor: int) -> bool:
    """Whether an equation makes the dimensions of a blocked factor of operands that lack it, such as random bits."""
    if factor not in factors.blocked or factor in factors.reductions or eqn.effects:
        return False
    return not any(factor in dim for dims in factors.operands for dim in dims)


def _knows_position(eqn: JaxprEqn, factors: Factors, factor: int) -> bool:
    """Whether a blocked factor of an equation in a body can be split all the same, if the position is known."""
    if is_made_whole(eqn, factors, factor):
        return True
    return factor in factors.positional and is_control_flow(eqn)


def _arrays(eqn: JaxprEqn, factors: Factors) -> list[tuple[Atom, Dims]]:
    """Operands and results of an equation with the factors of their dimensions."""
    return list(zip((*eqn.invars, *eqn.outvars), (*factors.operands, *factors.results), strict=True))


def _inner(dim: Sequence[int], factors: Factors) -> list[int]:
    """All factors of a dimension but the outermost one. Splitting one of them would leave strided blocks."""
    return [f for f in dim if factors.sizes[f] > 1][1:]


# ---- linking --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Links:
    """Groups in the making; the fields are as in `Groups`.

    `blocked` and `positional` may also hold names that groups had before they were joined to others; see `current`.
    """

    sets: DisjointSets[Node] = field(default_factory=DisjointSets)
    sizes: dict[Node, int] = field(default_factory=dict)
    blocked: set[Node] = field(default_factory=set)
    positional: set[Node] = field(default_factory=set)

    def join(self, first: Node, second: Node) -> None:
        """Put two dimensions into one group, which has the name of the first one's."""
        joined = self.sets.join(first, second)
        if joined is not None:
            group = self.sets.find(first)
            self.sizes[group] = math.gcd(self.sizes.pop(group, 0), self.sizes.pop(joined, 0))
            for marked in (self.blocked, self.positional):
                if joined in marked:
                    marked.add(group)

    def limit(self, node: Node, size: int) -> None:
        """Let the number of blocks of a group divide `size`."""
        group = self.sets.find(node)
        self.sizes[group] = math.gcd(self.sizes.get(group, 0), size)

    def block(self, node: Node) -> None:
        """Forbid to split the group of a dimension."""
        self.blocked.add(self.sets.find(node))

    def mark_positional(self, node: Node) -> None:
        """Note that shards of the group of a dimension must know where they begin."""
        self.positional.add(self.sets.find(node))

    def current(self, marked: Iterable[Node]) -> frozenset[Node]:
        """Those of some names that still name a group."""
        return frozenset(node for node in marked if self.sets.find(node) == node)


def _link_equation(links: _Links, eqn: JaxprEqn, factors: Factors) -> None:
    """Join the dimensions that one factor of an equation cuts."""
    inner = {f for _, dims in _arrays(eqn, factors) for dim in dims for f in _inner(dim, factors)}
    for f, nodes in leading_nodes(eqn, factors).items():
        for node in nodes:
            links.join(nodes[0], node)
        links.limit(nodes[0], factors.sizes[f])

        if f in inner or (f in factors.blocked and not _knows_position(eqn, factors, f)):
            links.block(nodes[0])
        elif f in factors.blocked:
            links.mark_positional(nodes[0])


def _link_boundary(links: _Links, region: Region) -> None:
    """Join what the branches of a result have in common, and a carry with its next value."""
    for atoms in region.results:
        _link_arrays(links, atoms)
    for result, source in region.carried:
        _link_arrays(links, (*region.results[result], region.inputs[source]))
        for test in region.tests:  # under vmap, a loop has a test for each example
            _link_arrays(links, (region.inputs[source], test))


def _link_arrays(links: _Links, atoms: Sequence[Atom]) -> None:
    """Join equal dimensions of several arrays."""
    for atom in atoms[1:]:
        for d in range(len(shape_of(atom))):
            links.join(node_of(atoms[0], d), node_of(atom, d))


def _limit_array(links: _Links, atom: Atom) -> None:
    """The blocks of an array's groups divide its dimensions, and no two of its dimensions are split together."""
    for d, size in enumerate(shape_of(atom)):
        links.limit(node_of(atom, d), size)

    # Two dimensions in one group would leave the blocks on the array's diagonal.
    groups = [links.sets.find(node_of(atom, d)) for d, size in enumerate(shape_of(atom)) if size > 1]
    links.blocked.update(group for group in groups if groups.count(group) > 1)


def _held_in_full(region: Region) -> list[Atom]:
    """Arrays that are part of the region itself: each device holds them in full, and a shard takes its part of them."""
    captured = [var for part in region.parts for var in part.constvars]
    read = (*(atom for eqn in region.eqns for atom in eqn.invars), *region.result_atoms)
    return [*captured, *(atom for atom in read if is_literal(atom))]


def _members(region: Region, sets: DisjointSets[Node]) -> dict[Node, dict[int, set[int]]]:
    """For each group and the number of each equation, the factors of the equation that belong to the group."""
    members: dict[Node, dict[int, set[int]]] = {}
    for i, eqn in enumerate(region.eqns):
        for f, nodes in leading_nodes(eqn, region.factors[eqn]).items():
            members.setdefault(sets.find(nodes[0]), {}).setdefault(i, set()).add(f)
    return members
