"""Pytrees that hold more than arrays: functions, and modules of equinox and flax.nnx, as arguments and results.

`hide_static` puts a node without leaves in the place of each function, so that all leaves are arrays, and two pytrees
with equal functions have equal structures; `show_static` is the inverse. `split_graph` turns modules of flax.nnx, which
a step changes in place, into values that go through the step, and `GraphArguments` makes modules of these inside it.
Neither library is imported here: values of it can only be there if the user has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from minialpa.arrays import RemoteArray
from minialpa.errors import TraceError
from minialpa.support.identity import ById

#: Stands for a leaf.
_PLACE = object()
_ARRAYS = jax.Array | jax.ShapeDtypeStruct | jax.core.ShapedArray | np.ndarray | np.generic | RemoteArray


# ---- static leaves --------------------------------------------------------------------------------------------------


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class StaticLeaf:
    """A value that is part of a pytree's structure. Equal only to one of the same type, since `1 == True`.

    Attributes:
        value: the value, which has a hash.
        kind: its type.
    """

    value: Any
    kind: type


def hide_static(tree: Any) -> Any:
    """The pytree with a `StaticLeaf` in the place of each function, and of all in equinox modules that is no array."""
    leaves, structure = jax.tree.flatten(tree)
    hidden = hide_leaves(leaves, leaves_in_modules(tree))
    return tree if hidden is leaves else jax.tree.unflatten(structure, hidden)


def hide_leaves(leaves: list[Any], in_modules: list[bool] | None) -> list[Any]:
    """`hide_static` for leaves, of which some are `in_modules`; the same list if there is nothing to hide."""
    if in_modules is None and not any(map(callable, leaves)):
        return leaves
    inside = in_modules or [False] * len(leaves)
    return [_hidden(leaf, is_inside) for leaf, is_inside in zip(leaves, inside, strict=True)]


def leaves_in_modules(tree: Any) -> list[bool] | None:
    """For each leaf, whether it is inside an equinox module; None if there is no such module."""
    module = getattr(sys.modules.get("equinox"), "Module", None)
    if module is None:
        return None
    inside: list[bool] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, module)):
        inside.extend([True] * len(jax.tree.leaves(node)) if isinstance(node, module) else [False])
    return inside if any(inside) else None


def _hidden(leaf: Any, in_module: bool) -> Any:
    if not (callable(leaf) or (in_module and not isinstance(leaf, _ARRAYS))):
        return leaf
    try:
        hash(leaf)
    except TypeError as error:
        raise TraceError(
            f"A leaf of the arguments or results is a {type(leaf).__name__}, which has no hash: {leaf!r}. What is no "
            "array is part of the program, and is compared by its hash. Use a value with a hash, or an array."
        ) from error
    return StaticLeaf(leaf, type(leaf))


def show_static(tree: Any) -> Any:
    """The inverse of `hide_static`."""
    return jax.tree.map(lambda x: x.value if isinstance(x, StaticLeaf) else x, tree, is_leaf=_is_static)


def with_static(tree: PyTreeDef) -> tuple[list[Any], PyTreeDef, tuple[int, ...]]:
    """A pytree with the value of each `StaticLeaf` as a leaf: its leaves, its structure, and where the leaves of `tree`
    are among them, which are None."""
    shown_tree = show_static(jax.tree.unflatten(tree, [_PLACE] * tree.num_leaves))
    values, structure = jax.tree.flatten(shown_tree)
    places = tuple(i for i, value in enumerate(values) if value is _PLACE)
    return [None if value is _PLACE else value for value in values], structure, places


def _is_static(value: Any) -> bool:
    return isinstance(value, StaticLeaf)


# ---- modules that a step changes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GraphArguments:
    """The modules among the arguments of a call: flax.nnx keeps them as a graph, whose values the step may replace.

    Attributes:
        graph: the structure of all of them together, since they may share variables.
        names: the positions or names of these arguments.
    """

    graph: Any
    names: tuple[int | str, ...]

    def merge(self, values: Mapping[int | str, Any]) -> tuple[Any, ...]:
        """New modules with these values, in the order of `names`."""
        nnx = sys.modules["flax.nnx"]
        states = nnx.State({i: values[name] for i, name in enumerate(self.names)})
        modules: tuple[Any, ...] = nnx.merge(self.graph, states)
        return modules

    def values_of(self, modules: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the modules hold after a step. Raises TraceError if they have another structure than before."""
        graph, values = _split(modules)
        if graph != self.graph:
            raise TraceError(
                "The step changes an nnx module in more than the values of its variables: it sets an attribute, as "
                "`model.eval()` and `model.train()` do, or adds, removes or shares variables or submodules. Do that "
                "before the step; `eval` also works in it on a copy, `nnx.clone(model)`."
            )
        return values


def split_graph(named: Mapping[int | str, Any]) -> tuple[dict[int | str, Any], GraphArguments | None]:
    """Arguments, in which values stand for modules of flax.nnx, and the structure of these modules if there are any."""
    node = graph_node_class()
    if node is None:
        return dict(named), None
    names = tuple(name for name, value in named.items() if isinstance(value, node))
    if not names:
        return dict(named), None
    graph, values = _split(tuple(named[name] for name in names))
    return {**named, **dict(zip(names, values, strict=True))}, GraphArguments(graph, names)


def _split(modules: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    graph, states = sys.modules["flax.nnx"].split(modules)
    return graph, tuple(states.get(i, {}) for i in range(len(modules)))


def update_modules(modules: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Give the caller's modules the values that a step has computed for them."""
    nnx = sys.modules["flax.nnx"]
    nnx.update(modules, nnx.State(dict(enumerate(values))))


def check_no_graph(tree: Any, what: str) -> None:
    """Raise TraceError if a module of flax.nnx is inside `tree`, where a change of it would be lost."""
    node = graph_node_class()
    if node is None:
        return
    is_node: Callable[[Any], bool] = lambda x: isinstance(x, node)  # noqa: E731
    found = next(filter(is_node, jax.tree.leaves(tree, is_leaf=is_node)), None)
    if found is not None:
        raise TraceError(
            f"{what} holds an nnx {type(found).__name__}, and only modules that are whole arguments are updated in "
            "place. Pass it as an argument of its own and do not return it, or use `nnx.split` and `nnx.merge`."
        )


def variables_in(tree: Any) -> list[tuple[Any, list[Any]]]:
    """The variables of flax.nnx in a pytree that are in no module, as in an `nnx.State`, with their arrays."""
    kind = variable_class()
    if kind is None:
        return []
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [(x, jax.tree.leaves(x)) for x in found if isinstance(x, kind)]


def check_returned(variables: list[tuple[Any, list[Any]]], result: Any) -> None:
    """Raise TraceError if a step has changed one of these variables, which are copies of the caller's, for itself only.

    A new value that is in the result, as in `nnx.state(model)` of a model that was merged from them, is not lost.
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
                "would be lost. Pass the module that has it, or return the new value."
            )


def graph_node_class() -> type | None:
    """The class of all modules and optimizers of flax.nnx, if it has been imported."""
    found = getattr(sys.modules.get("flax.nnx"), "Pytree", None)
    return found if isinstance(found, type) else None


def variable_class() -> type | None:
    """The class of all variables of flax.nnx, if it has been imported."""
    found = getattr(sys.modules.get("flax.nnx"), "Variable", None)
    return found if isinstance(found, type) else None
