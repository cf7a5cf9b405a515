"""Arguments of a call: names, numbers, which are static, what tells calls apart, and leaves as arguments again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from minialpa.arrays import RemoteArray
from minialpa.errors import TraceError

#: What stands for an array where only its shape and dtype matter.
Shape = jax.ShapeDtypeStruct | jax.core.ShapedArray
Argnums = int | Sequence[int] | Literal["auto"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call's arguments: dynamic leaves, and everything else, by which programs are kept apart."""

    leaves: list[Any]
    tree: Any
    static: tuple[tuple[int | str, Hashable], ...]
    n_args: int

    def key(self) -> Hashable:
        return (self.tree, self.static, self.n_args, tuple(_leaf_key(x) for x in self.leaves))

    def types(self) -> tuple[Any, ...]:
        """Equal for two calls only if `key` is, and compared in no time where they share their types' objects."""
        return (self.tree, self.static, self.n_args, [_leaf_type(x) for x in self.leaves])


class Parameters:
    """The parameters of a step: arguments in, calls out, and the names and numbers of what is in a call.

    donate, batch: numbers of the arguments that results may take over, or "auto", and of those that hold examples.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        static_argnums: Argnums,
        donate_argnums: Argnums,
        batch_argnums: int | Sequence[int],
    ) -> None:
        self._signature = _signature_of(fun)
        self._names = list(self._signature.parameters) if self._signature else []
        self._static = self._argnums("static_argnums", static_argnums)
        self.donate = self._argnums("donate_argnums", donate_argnums)
        self.batch = tuple(self._argnums("batch_argnums", batch_argnums))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with these arguments. Raises TraceError if a static one has no hash."""
        if kwargs:
            args, kwargs = self._as_positional(args, kwargs)
        static: list[tuple[int | str, Hashable]] = []
        dynamic: dict[int | str, Any] = {}
        given: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
        for name, value in given:
            if self._is_static(name, value):
                static.append((name, _hashable(self._label(name), value)))
            else:
                dynamic[name] = value
        leaves, tree = jax.tree.flatten(tuple(dynamic.values()))
        return Call(leaves, (tree, tuple(dynamic)), tuple(static), len(args))

    def paths(self, call: Call) -> tuple[list[str], list[int]]:
        """Name of each leaf, such as `state.params['w']`, and the number of its argument."""
        tree, names = call.tree
        paths, numbers = [], []
        for name, value in zip(names, jax.tree.unflatten(tree, call.leaves), strict=True):
            label = self._label(name)
            for path, _ in jax.tree_util.tree_leaves_with_path(value):
                paths.append(label + jax.tree_util.keystr(path))
                numbers.append(self.number(name))
        return paths, numbers

    def number(self, name: int | str) -> int:
        """Number of an argument; keyword-only ones count by their place in the signature."""
        if isinstance(name, int):
            return name
        return self._names.index(name) if name in self._names else -1

    def _as_positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keyword arguments in their places, so that argument numbers mean the same however a call is written."""
        if self._signature is None:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        return bound.args, bound.kwargs

    def _is_static(self, name: int | str, value: Any) -> bool:
        if self._static != "auto":
            return self.number(name) in self._static
        return jax.tree_util.all_leaves([value]) and not is_numeric(value)

    def _label(self, name: int | str) -> str:
        if isinstance(name, str):
            return name
        return self._names[name] if name < len(self._names) else f"args[{name}]"

    def _argnums(self, option: str, value: Argnums) -> tuple[int, ...] | Literal["auto"]:
        """Argument numbers as a tuple; negative ones count from the last parameter, as in jax."""
        if isinstance(value, str) and value == "auto" and option != "batch_argnums":
            return "auto"
        numbers: list[int] = []
        for number in (value,) if isinstance(value, int) else value:
            if not isinstance(number, int):
                raise TraceError(f"`{option}` takes argument numbers; got {value!r}.")
            numbers.append(number)
        return tuple(number + len(self._names) if number < 0 else number for number in numbers)


def _signature_of(fun: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):  # a builtin
        return None


def _leaf_type(leaf: Any) -> Any:
    aval = getattr(leaf, "aval", None)
    return _leaf_key(leaf) if aval is None else aval


def _leaf_key(leaf: Any) -> Hashable:
    """Shape and dtype, and whether it is weakly typed: that changes what it makes of an array of fewer bits."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | Shape | RemoteArray):
        return (leaf.shape, _canonical(leaf.dtype), bool(getattr(leaf, "weak_type", False)))
    # A step count that starts as a Python int comes back as a weakly typed array of the default integer type.
    if type(leaf) in (int, float, complex):
        return ((), _canonical(np.dtype(type(leaf))), True)
    return (type(leaf),)


def _canonical(dtype: Any) -> Any:
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended) or dtype.kind in "OSUMm":
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def rebuild(call: Call, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tree, names = call.tree
    values = dict(zip(names, jax.tree.unflatten(tree, leaves), strict=True))
    values.update(call.static)
    args = tuple(values[i] for i in range(call.n_args))
    return args, {name: value for name, value in values.items() if isinstance(name, str)}


def is_numeric(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return False
    arrays = jax.Array | Shape | np.ndarray | np.generic | RemoteArray
    return isinstance(value, arrays | int | float | complex)


def _hashable(name: str, value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError as error:
        raise TraceError(
            f"Argument `{name}` is static and must be hashable; got a {type(value).__name__}. Pass a tuple, a string "
            "or another value with a hash, or arrays in a pytree."
        ) from error
    assert isinstance(value, Hashable)
    return value


def is_train_state(value: Any) -> bool:
    """Whether a value is a flax TrainState, or made like one: parameters and the optimizer's state in one object."""
    return all(hasattr(value, name) for name in ("params", "opt_state", "apply_gradients"))
