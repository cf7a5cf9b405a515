"""What the calls of a training loop have in common, to see at a glance whether a call is like the last one.

A `CallPattern` is made of a `Call`. It takes the arguments of the next call as its caller writes them, and gives their
leaves, or None if more than the values of arrays differs: static arguments, structure, functions among the leaves, the
structure of modules, types of leaves, settings of jax.
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
    """The arguments of a call that is like an earlier one.

    Attributes:
        leaves: as in `Call.leaves`.
        result_of: makes the result of the call from the leaves that its program returns.
    """

    leaves: list[Any]
    result_of: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPattern:
    """What calls have in common.

    Attributes:
        n_args: number of positional arguments.
        keywords: names of the other arguments.
        static: the place, among all arguments, and the value of each static argument.
        dynamic: the places of the other arguments.
        tree: pytree of these.
        hidden: the position, among the leaves of `tree`, and the value of each leaf that is part of the program.
        arrays: the position, among the leaves of `tree`, of each leaf of a `Call`; None if they are the same leaves.
        types: `leaf_types` of the leaves of a `Call`.
        settings: of jax, see `current_settings`.
        modules: the modules of flax.nnx among the arguments; None without any.
        result_of: makes the result of a call from the leaves that its program returns; without the values of modules.
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
        """The leaves of a call in which only values may be new; None if it is another call, or is to be refused."""
        given = self._dynamic(args, kwargs) if current_settings() == self.settings else None
        if given is None:
            return None
        leaves, tree, nodes = (*jax.tree.flatten(given), ()) if self.modules is None else _flatten(given)
        if tree != self.tree or (self.modules is not None and not self.modules.are_same(nodes)):
            return None
        found = self._arrays(leaves)
        if found is None:
            return None
        modules, result_of = self.modules, self.result_of
        return Match(found, result_of if modules is None else lambda made: result_of(modules.update(nodes, made)))

    def _dynamic(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """The arguments that are not static, in the order of this pattern; None if names or static values differ."""
        if len(args) != self.n_args or len(kwargs) != len(self.keywords) or not kwargs.keys() >= set(self.keywords):
            return None
        given = (*args, *(kwargs[name] for name in self.keywords)) if kwargs else args
        if not self.static:
            return given
        if not all(_is_same(given[i], value) for i, value in self.static):
            return None
        return tuple(given[i] for i in self.dynamic)

    def _arrays(self, leaves: list[Any]) -> list[Any] | None:
        """The leaves of a `Call`; None if their types differ, an array is deleted, or another leaf has a new value."""
        if self.hidden and not all(_is_same(leaves[i], value) for i, value in self.hidden):
            return None
        if self.arrays is not None:
            leaves = [leaves[i] for i in self.arrays]
        return leaves if leaf_types(leaves) == self.types and are_alive(leaves) else None


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """Modules of flax.nnx, which are pytrees, as nodes of the pytree of all arguments.

    flax finds out what a module consists of in many steps of Python. But if all modules and variables are the same
    objects, and `CallPattern.tree` has compared their attributes, then they share what they shared before.

    Attributes:
        shared: the positions of the modules and variables, which other modules may share.
        ids: the identities of these. A pattern keeps no module alive.
        variables: the position of the variable that holds each value of a module, in the order of results.
    """

    shared: tuple[int, ...]
    ids: list[int]
    variables: tuple[int, ...]

    def are_same(self, nodes: Sequence[Any]) -> bool:
        """Whether modules and variables are the same objects, in an equal pytree."""
        return [id(nodes[i]) for i in self.shared] == self.ids

    def update(self, nodes: Sequence[Any], made: Sequence[Any]) -> Sequence[Any]:
        """Give variables their new values; returns the other leaves that a program has returned."""
        for i, value in zip(self.variables, made, strict=False):
            nodes[i].set_raw_value(value)
        return made[len(self.variables) :]


def pattern_of(call: Call, out_tree: PyTreeDef) -> CallPattern | None:
    """The pattern of a call, whose result has the pytree `out_tree`; None if other calls cannot be compared with it."""
    tree, names = call.tree
    keywords = tuple(name for name in (*names, *dict(call.static)) if isinstance(name, str))
    place = {name: i for i, name in enumerate((*range(call.n_args), *keywords))}

    modules: ModulePattern | None = None
    if call.graph is None:
        values, shown_tree, arrays = with_static(tree)
    else:
        values, shown_tree, nodes = _flatten(call.given)
        found = _positions(call.leaves, values)
        modules = _module_pattern(call, nodes)
        if found is None or modules is None:
            return None
        arrays, out_tree = found, out_tree.children()[1]

    here = {ById(values[i]) for i in arrays} if modules else set()
    hidden = [i for i in sorted(set(range(len(values))).difference(arrays)) if ById(values[i]) not in here]
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
    """The pattern of the modules of a call; None if they hold something other than variables of arrays."""
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
    """The position of each leaf among the values, the first one if it is there twice; None if that is not clear."""
    first = {ById(value): i for i, value in reversed(list(enumerate(values)))}
    found = [first.get(ById(leaf), -1) for leaf in leaves]
    return tuple(found) if -1 not in found and len(set(found)) == len(found) else None


def _flatten(given: Any) -> tuple[list[Any], PyTreeDef, list[Any]]:
    """Leaves, structure and all nodes, from the outside to the inside."""
    nodes: list[Any] = []

    def note(node: Any) -> bool:
        nodes.append(node)
        return False

    leaves, tree = jax.tree.flatten(given, is_leaf=note)
    return leaves, tree, nodes


def _is_same(value: Any, known: Hashable) -> bool:
    """Whether a value is equal to a static one, and of its type."""
    return value is known or (type(value) is type(known) and bool(value == known))
