"""Pytrees that hold more than arrays: functions, and modules of equinox and flax.nnx, as arguments and results.

`hide_static` replaces each function by a node without leaves: all leaves are arrays, and equal functions give equal
structures. `split_graph` replaces modules of flax.nnx, which a step changes in place, by values, and `GraphArguments`
makes modules of these inside the step. This module imports neither library: their values exist only if the user
imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.ref import AbstractRef, Ref
from jax.tree_util import PyTreeDef

from minialpa.arrays import RemoteArray
from minialpa.errors import TraceError
from minialpa.support.identity import ById

_PLACE = object()
_ARRAYS = (
    jax.Array | jax.ShapeDtypeStruct | jax.core.ShapedArray | np.ndarray | np.generic | RemoteArray | AbstractRef | Ref
)


# ---- static leaves --------------------------------------------------------------------------------------------------


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class StaticLeaf:
    """A value that is part of a pytree's structure. `kind`, its type, keeps 1 and True apart."""

    value: Any
    kind: type


def hide_static(tree: Any, *, only_arrays: bool = False) -> Any:
    """The pytree with a `StaticLeaf` for each function, and for each leaf of an equinox module that is no array.

    only_arrays: also for all other leaves that are no arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    hidden = hide_leaves(leaves, [True] * len(leaves) if only_arrays else leaves_in_modules(tree))
    return tree if hidden is leaves else jax.tree.unflatten(structure, hidden)


def hide_leaves(leaves: list[Any], in_modules: list[bool] | None) -> list[Any]:
    """`hide_static` for leaves; `in_modules` comes from `leaves_in_modules`. The same list if all leaves stay."""
    if in_modules is None and not any(map(callable, leaves)):
        return leaves
    inside = in_modules or [False] * len(leaves)
    return [_hidden_leaf(leaf, is_inside) for leaf, is_inside in zip(leaves, inside, strict=True)]


def leaves_in_modules(tree: Any) -> list[bool] | None:
    """Whether each leaf is inside an equinox module; None without such modules."""
    module = getattr(sys.modules.get("equinox"), "Module", None)
    if module is None:
        return None
    inside: list[bool] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, module)):
        inside.extend([True] * len(jax.tree.leaves(node)) if isinstance(node, module) else [False])
    return inside if any(inside) else None


def _hidden_leaf(leaf: Any, in_module: bool) -> Any:
    """A `StaticLeaf` for a function or a non-array of a module; else the leaf. Raises TraceError without a hash."""
    if not (callable(leaf) or (in_module and not isinstance(leaf, _ARRAYS))):
        return leaf
    try:
        hash(leaf)
    except TypeError as error:
        raise TraceError(
            f"The arguments or results hold a {type(leaf).__name__}, which is neither an array nor hashable: "
            f"{leaf!r:.200}. Put an array or a hashable value in its place, since minialpa compares values that are "
            "not arrays by hash."
        ) from error
    return StaticLeaf(leaf, type(leaf))


def show_static(tree: Any) -> Any:
    """The inverse of `hide_static`."""
    return jax.tree.map(lambda x: x.value if isinstance(x, StaticLeaf) else x, tree, is_leaf=_is_static)


def with_static(tree: PyTreeDef) -> tuple[list[Any], PyTreeDef, tuple[int, ...]]:
    """A pytree with the value of each `StaticLeaf` as a leaf: leaves, structure, and positions of the leaves of `tree`.

    The leaves of `tree` are None.
    """
    if not _has_static(tree):  # a class may refuse placeholders
        return [None] * tree.num_leaves, tree, tuple(range(tree.num_leaves))
    shown_tree = show_static(jax.tree.unflatten(tree, [_PLACE] * tree.num_leaves))
    values, structure = jax.tree.flatten(shown_tree)
    places = tuple(i for i, value in enumerate(values) if value is _PLACE)
    return [None if value is _PLACE else value for value in values], structure, places


def _has_static(tree: PyTreeDef) -> bool:
    node = tree.node_data()
    return (node is not None and node[0] is StaticLeaf) or any(map(_has_static, tree.children()))


def _is_static(value: Any) -> bool:
    return isinstance(value, StaticLeaf)


# ---- modules that a step changes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GraphArguments:
    """The flax.nnx modules among the arguments of a call, whose values the step may replace.

    Attributes:
        graph: the structure of all modules together, since they may share variables.
        names: the positions or names of these arguments.
    """

    graph: Any
    names: tuple[int | str, ...]

    def merge(self, values: Mapping[int | str, Any]) -> tuple[Any, ...]:
        """New modules with these values."""
        nnx = sys.modules["flax.nnx"]
        states = nnx.State({i: values[name] for i, name in enumerate(self.names)})
        modules: tuple[Any, ...] = nnx.merge(self.graph, states)
        return modules

    def values_of(self, modules: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of the modules after a step. Raises TraceError if their structure has changed."""
        graph, values = _split_modules(modules)
        if graph != self.graph:
            raise TraceError(
                "The step changes an nnx module in more than the values of its variables: it sets an attribute, as "
                "`model.eval()` and `model.train()` do, or adds, removes or shares variables or submodules. Do that "
                "before the step; inside the step, call `eval` on a copy, `nnx.clone(model)`."
            )
        return values


def split_graph(named: Mapping[int | str, Any]) -> tuple[dict[int | str, Any], GraphArguments | None]:
    """The arguments, with values for modules of flax.nnx, and the structure of these modules, None without any."""
    node = graph_node_class()
    if node is None:
        return dict(named), None
    names = tuple(name for name, value in named.items() if isinstance(value, node))
    if not names:
        return dict(named), None
    graph, values = _split_modules(tuple(named[name] for name in names))
    return {**named, **dict(zip(names, values, strict=True))}, GraphArguments(graph, names)


def _split_modules(modules: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The common structure of modules, and the values of each."""
    graph, states = sys.modules["flax.nnx"].split(modules)
    return graph, tuple(states.get(i, {}) for i in range(len(modules)))


def update_modules(modules: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Give the caller's modules the values that a step has computed."""
    nnx = sys.modules["flax.nnx"]
    nnx.update(modules, nnx.State(dict(enumerate(values))))


def check_no_graph(tree: Any, what: str) -> None:
    """Raise TraceError if `tree` contains a module of flax.nnx, because changes of it would be lost."""
    node = graph_node_class()
    if node is None:
        return
    is_node: Callable[[Any], bool] = lambda x: isinstance(x, node)  # noqa: E731
    found = next(filter(is_node, jax.tree.leaves(tree, is_leaf=is_node)), None)
    if found is not None:
        raise TraceError(
            f"{what} holds an nnx {type(found).__name__}, but only modules that are whole arguments are updated in "
            "place. Pass it as a separate argument and do not return it, or use `nnx.split` and `nnx.merge`."
        )


def variables_in(tree: Any) -> list[tuple[Any, list[Any]]]:
    """The flax.nnx variables of a pytree, as of an `nnx.State`, with their arrays. Callers leave modules out."""
    kind = variable_class()
    if kind is None:
        return []
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [(x, jax.tree.leaves(x)) for x in found if isinstance(x, kind)]


def check_returned(variables: list[tuple[Any, list[Any]]], result: Any) -> None:
    """Raise TraceError if a step changes one of these variables, which are copies, and does not return the new value.

    `nnx.state(model)` of a model merged from the variables returns it, too.
    """
    changed = [
        (variable, now)
        for variable, before in variables
        if len(now := jax.tree.leaves(variable)) != len(before)
        or any(new is not old for new, old in zip(now, before, strict=True))
    ]
    if not changed:
        return
    returned = set(map(ById, jax.tree.leaves(result)))
    for variable, now in changed:
        if not returned.issuperset(map(ById, now)):
            raise TraceError(
                f"The step changes an nnx {type(variable).__name__} in place that is in no module, and the change "
                "would be lost. Pass the module that contains it, or return the new value."
            )


def graph_node_class() -> type | None:
    """The class of all modules and optimizers of flax.nnx, if imported."""
    found = getattr(sys.modules.get("flax.nnx"), "Pytree", None)
    return found if isinstance(found, type) else None


def variable_class() -> type | None:
    found = getattr(sys.modules.get("flax.nnx"), "Variable", None)
    return found if isinstance(found, type) else None
