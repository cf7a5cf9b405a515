"""Arguments of a call: which are static, what tells calls apart, and how leaves become arguments again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from minialpa.arrays import RemoteArray
from minialpa.errors import TraceError


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


def _leaf_type(leaf: Any) -> Any:
    aval = getattr(leaf, "aval", None)
    return _leaf_key(leaf) if aval is None else aval


def _leaf_key(leaf: Any) -> Hashable:
    """Shape and dtype, and whether a float is weakly typed: that changes what it makes of an array of fewer bits."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | RemoteArray):
        dtype = _canonical(leaf.dtype)
        return (leaf.shape, dtype, getattr(leaf, "weak_type", False) and dtype.kind in "fc")
    # A step count that starts as a Python int comes back as an array of the default integer type.
    if type(leaf) is int:
        return ((), _canonical(np.dtype(int)), False)
    if type(leaf) is float:
        return ((), _canonical(np.dtype(float)), True)
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
    arrays = jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | RemoteArray
    return isinstance(value, arrays | int | float | complex)


def hashable(name: str, value: Any) -> Hashable:
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
