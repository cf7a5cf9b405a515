"""A quick test whether a call is like the last one: arguments go in; their leaves, or None, come out.

In a training loop, only the values of arrays change. A `CallPattern` compares everything else: static arguments,
structure, functions, modules, types of leaves, settings of jax.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from minialpa.calls import Call, are_alive, leaf_types, shown
from minialpa.pytrees import graph_node_class, variable_class, with_static
from minialpa.support.identity import ById
from minialpa.support.private_jax import current_settings


@dataclass(frozen=True, slots=True)
class Match:
    """The leaves of a call, as in `Call.leaves`. result_of: as in `CallPattern`."""

    leaves: list[Any]
    result_of: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPattern:
    """The properties that calls of one program share.

    Attributes:
        static: (position, value) of each static argument, among positional arguments and then `keywords`.
        dynamic: the positions of the other arguments.
        tree: the pytree of the other arguments.
        hidden: (position, value) of each leaf of `tree` that is part of the program, such as a function.
        arrays: the positions in `tree` of the leaves of a `Call`; None for all leaves in order.
        settings: see `current_settings`.
        result_of: from the leaves that the program returns, without values of modules, to the result.
    """

    n_args: int
    keywords: tuple[str, ...]
    static: tuple[tuple[int, Hashable], ...]
    dynamic: tuple[int, ...]
    tree: PyTreeDef
    hidden: tuple[tuple[int, Hashable], ...]
    arrays: tuple[int, ...] | None
    types: list[Any]
    settings: Hashable
    modules: ModulePattern | None
    result_of: Callable[[Sequence[Any]], Any]

    def match(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Match | None:
        """None for another call, or one that must fail."""
        given = self._dynamic_arguments(args, kwargs) if current_settings() == self.settings else None
        if given is None:
            return None
        nodes: Sequence[Any] = ()
        if self.modules is None:
            leaves, tree = jax.tree.flatten(given)
        else:
            leaves, tree, nodes = _flatten_with_nodes(given)
        if tree != self.tree or (self.modules is not None and not self.modules.are_same(nodes)):
            return None
        found = self._array_leaves(leaves)
        if found is None:
            return None
        modules, result_of = self.modules, self.result_of
        return Match(found, result_of if modules is None else lambda made: result_of(modules.update(nodes, made)))

    def _dynamic_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        if len(args) != self.n_args or len(kwargs) != len(self.keywords) or not kwargs.keys() >= set(self.keywords):
            return None
        given = (*args, *(kwargs[name] for name in self.keywords)) if kwargs else args
        if not self.static:
            return given
        if not all(_equals_known(given[i], value) for i, value in self.static):
            return None
        return tuple(given[i] for i in self.dynamic)

    def _array_leaves(self, leaves: list[Any]) -> list[Any] | None:
        """None if types differ, an array is deleted, or another leaf has a new value."""
        if self.hidden and not all(_equals_known(leaves[i], value) for i, value in self.hidden):
            return None
        if self.arrays is not None:
            leaves = [leaves[i] for i in self.arrays]
        return leaves if leaf_types(leaves) == self.types and are_alive(leaves) else None


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """Modules of flax.nnx, which are pytrees, as nodes of the pytree of all arguments.

    flax needs many steps of Python to split a module. But the same modules and variables, with equal attributes
    (`CallPattern.tree`), have the same structure as before.

    Attributes:
        shared: positions of modules and variables among the nodes.
        ids: `id` of each, which keeps no module alive.
        variables: position of the variable that holds each value of a module, in the order of results.
    """

    shared: tuple[int, ...]
    ids: list[int]
    variables: tuple[int, ...]

    def are_same(self, nodes: Sequence[Any]) -> bool:
        return [id(nodes[i]) for i in self.shared] == self.ids

    def update(self, nodes: Sequence[Any], made: Sequence[Any]) -> Sequence[Any]:
        for i, value in zip(self.variables, made, strict=False):
            nodes[i].set_raw_value(value)
        return made[len(self.variables) :]


def pattern_of(call: Call, out_tree: PyTreeDef) -> CallPattern | None:
    """None if other calls cannot be compared with this one."""
    tree, names = call.tree
    keywords = tuple(name for name in (*names, *dict(call.static)) if isinstance(name, str))
    place = {name: i for i, name in enumerate((*range(call.n_args), *keywords))}

    modules: ModulePattern | None = None
    if call.graph is None:
        values, shown_tree, arrays = with_static(tree)
    else:
        values, shown_tree, nodes = _flatten_with_nodes(call.given)
        found = _positions(call.leaves, values)
        modules = _module_pattern(call, nodes)
        if found is None or modules is None:
            return None
        arrays, out_tree = found, out_tree.children()[1]

    # An array that modules hold in two places is a leaf once.
    found_leaves = {ById(values[i]) for i in arrays} if modules else set()
    hidden = [i for i in sorted(set(range(len(values))).difference(arrays)) if ById(values[i]) not in found_leaves]
    return CallPattern(
        n_args=call.n_args,
        keywords=keywords,
        static=tuple((place[name], value) for name, value in call.static),
        dynamic=tuple(place[name] for name in names),
        tree=shown_tree,
        hidden=tuple((i, values[i]) for i in hidden),
        arrays=None if arrays == tuple(range(len(values))) else arrays,
        types=leaf_types(call.leaves),
        settings=call.settings,
        modules=modules,
        result_of=shown(out_tree),
    )


def _module_pattern(call: Call, nodes: Sequence[Any]) -> ModulePattern | None:
    """None if modules hold something other than variables of arrays."""
    module: Any = graph_node_class()
    variable: Any = variable_class()
    if call.graph is None or not hasattr(variable, "set_raw_value"):
        return None
    # Containers, such as the dict of a batch, may be new in every call.
    shared = tuple(i for i, node in enumerate(nodes) if isinstance(node, (module, variable)))
    first = {ById(x.get_raw_value()): i for i, x in reversed(list(enumerate(nodes))) if isinstance(x, variable)}
    tree, names = call.tree
    owners = [name for name, child in zip(names, tree.children(), strict=True) for _ in range(child.num_leaves)]
    held = [ById(leaf) for leaf, name in zip(call.leaves, owners, strict=True) if name in call.graph.names]
    if not first.keys() >= set(held):
        return None
    return ModulePattern(shared, [id(nodes[i]) for i in shared], tuple(first[i] for i in held))


def _positions(leaves: Sequence[Any], values: Sequence[Any]) -> tuple[int, ...] | None:
    """Positions of the leaves among `values`; None if a leaf is absent or two share a position."""
    first = {ById(value): i for i, value in reversed(list(enumerate(values)))}
    found = [first.get(ById(leaf), -1) for leaf in leaves]
    return tuple(found) if -1 not in found and len(set(found)) == len(found) else None


def _flatten_with_nodes(given: Any) -> tuple[list[Any], PyTreeDef, list[Any]]:
    nodes: list[Any] = []

    def note(node: Any) -> bool:
        nodes.append(node)
        return False

    leaves, tree = jax.tree.flatten(given, is_leaf=note)
    return leaves, tree, nodes


def _equals_known(value: Any, known: Hashable) -> bool:
    return value is known or (type(value) is type(known) and bool(value == known))
