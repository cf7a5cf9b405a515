"""A state or a target goes in; orbax's arguments to save or read its leaves come out.

`restore_arguments` compares a target with the files' metadata before arrays are read; `restored` checks the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from minialpa.arrays import RemoteArray
from minialpa.checkpoints.remote_handler import RemoteRestoreArgs, runtime_of, target_of
from minialpa.errors import CheckpointError
from minialpa.plan import PlacementSpec
from minialpa.pytrees import hide_static
from minialpa.runtime.arrays import BlockedArray, BlockedTarget, DistributedTarget
from minialpa.runtime.executable import Executable
from minialpa.tracing.refs import is_ref_leaf

#: Leaves in one message.
_MOST_NAMES = 8
_Number = bool | int | float | complex


def savable(state: Any) -> Any:
    """As orbax saves it. Raises CheckpointError with the path of a leaf that cannot be saved."""
    names: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        text = jax.tree_util.keystr(path) or "the state"
        _check_savable(leaf, text)
        name = ".".join(_name(path))
        if name in names:
            raise CheckpointError(
                f"The leaves `{names[name]}` and `{text}` would both be stored as `{name}`. Rename one of them."
            )
        names[name] = text
    if not names:
        raise CheckpointError("The state has no arrays and no numbers. Pass the state that the step returns.")
    return jax.tree.map(_leaf_to_save, state)


def weak_numbers(state: Any) -> list[str]:
    """The names of weakly typed numbers. orbax loses weak types, but a plan fits only arguments with the same weak
    types.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [
        ".".join(_name(path))
        for path, leaf in leaves
        if np.shape(leaf) == () and (isinstance(leaf, _Number) or getattr(leaf, "weak_type", False))
    ]


def target_tree(like: Any) -> Any:
    if like is None:
        raise CheckpointError(
            "The target is None, as `get_last_executable()` returns before the first call. Use `get_executable(...)`."
        )
    tree = like.get_input_targets()[0] if isinstance(like, Executable) else hide_static(like)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, PlacementSpec):
            raise CheckpointError(
                f"The target of `{jax.tree_util.keystr(path)}` is a `PlacementSpec`, which names meshes by number. "
                "Pass the executable itself, or a part of its `get_input_targets()`, which has shardings."
            )
        if is_ref_leaf(leaf) or (not hasattr(leaf, "shape") and not isinstance(leaf, _Number)):
            text = jax.tree_util.keystr(path)
            raise CheckpointError(
                f"The target of `{text}` is a {type(leaf).__name__}. Pass an array, a number or a "
                "`jax.ShapeDtypeStruct`."
            )
    return tree


def restore_arguments(
    target: Any, stored: Any, name: str, weak: Collection[str], *, partial_restore: bool = False
) -> Any:
    """stored: orbax's metadata of the leaves. name: of the checkpoint. weak: see `weak_numbers`. partial_restore:
    whether the checkpoint may have further leaves. Raises CheckpointError with a list of leaves that differ in path,
    shape or dtype.
    """
    stored_leaves = {path: leaf for path, leaf in ocp.tree.to_flat_dict(stored).items() if hasattr(leaf, "shape")}
    leaves, tree = jax.tree_util.tree_flatten_with_path(target)
    if not leaves:
        raise CheckpointError(
            f"The target has no arrays, so there is nothing to read from {name}. Pass a state, or the executable of a "
            "step: `step.get_executable(...)`."
        )
    wrong = list(_differences(leaves, stored_leaves, partial_restore=partial_restore))
    if wrong:
        listed = "\n  ".join(wrong[:_MOST_NAMES])
        rest = f"\n  and {len(wrong) - _MOST_NAMES} more" if len(wrong) > _MOST_NAMES else ""
        raise CheckpointError(
            f"The checkpoint of {name} is of another model:\n  {listed}{rest}\nPass a target with the structure, "
            f"shapes and dtypes that were saved.{_part_hint(leaves, stored_leaves)}"
        )

    def argument(path: Any, leaf: Any) -> Any:
        return _restore_argument(leaf, stored_leaves[_name(path)], is_weak=".".join(_name(path)) in weak)

    return jax.tree.unflatten(tree, [argument(path, leaf) for path, leaf in leaves])


def in_stored_tree(tree: Any, stored: Any) -> Any:
    """The saved tree, with the leaves of `tree` and elsewhere orbax's placeholders. orbax compares containers."""
    leaves = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: leaves.get(_name(path), ocp.PLACEHOLDER), stored, is_leaf=lambda node: hasattr(node, "shape")
    )


def out_of_stored_tree(state: Any, target: Any) -> Any:
    """The inverse of `in_stored_tree`, in the structure of `target`."""
    leaves = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_name(path)], target)


def restored(state: Any, target: Any, name: str, weak: Collection[str]) -> Any:
    """The leaves that orbax read, with the types of targets. Raises CheckpointError for another shape or dtype."""

    def checked(path: Any, requested: Any, found: Any) -> Any:
        text = jax.tree_util.keystr(path)
        if isinstance(requested, _Number) or (np.shape(found) == () and isinstance(found, np.ndarray)):
            found = _number_like_target(found, requested, text, name)
            return _weakly_typed(found) if ".".join(_name(path)) in weak else found
        if tuple(found.shape) != tuple(requested.shape) or found.dtype != requested.dtype:
            raise CheckpointError(
                f"`{text}` in {name} is {_type_text(found.shape, found.dtype)}; expected "
                f"{_type_text(requested.shape, requested.dtype)}. Pass a target of the stored type."
            )
        return _weakly_typed(found) if ".".join(_name(path)) in weak else found

    return jax.tree_util.tree_map_with_path(checked, target, state)


def _name(path: Any) -> tuple[str, ...]:
    keys = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path)
    return tuple(map(str, keys))


def _check_savable(leaf: Any, text: str) -> None:
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        raise CheckpointError(f"`{text}` is a {type(leaf).__name__}, which has no value. Save an array in its place.")
    if isinstance(leaf, jax.Array | RemoteArray):
        if leaf.is_deleted():
            raise CheckpointError(
                f"`{text}` has been deleted: it was donated to a step. Save that step's result, or save it before "
                "the step."
            )
        if not isinstance(leaf, RemoteArray) and not leaf.is_fully_addressable:
            raise CheckpointError(
                f"`{text}` is on devices of several processes. Bring it to this process first, for example with "
                "`jax.experimental.multihost_utils.process_allgather`."
            )
    elif not isinstance(leaf, np.ndarray | np.generic | _Number):
        raise CheckpointError(
            f"`{text}` is a {type(leaf).__name__}. Replace it by an array or a number, or leave it out."
        )

    value = np.asarray(leaf) if isinstance(leaf, _Number) else leaf  # ints beyond every dtype become objects
    if 0 in value.shape:
        raise CheckpointError(
            f"`{text}` has the shape {value.shape}, and orbax saves no arrays without elements. Leave it out."
        )
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
    if not is_key and (value.dtype.kind in "OSTUMm" or value.dtype.names is not None):
        raise CheckpointError(
            f"`{text}` has the dtype {value.dtype}, which checkpoints do not hold. Convert it to a dtype of numbers."
        )


def _leaf_to_save(leaf: Any) -> Any:
    if isinstance(leaf, RemoteArray) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf.fetch_once()  # a jax array of keys, which orbax saves with their implementation
    # orbax has no type for these numbers.
    return np.asarray(leaf) if isinstance(leaf, complex | np.bool_) and not isinstance(leaf, np.ndarray) else leaf


def _differences(leaves: Any, there: Mapping[tuple[str, ...], Any], *, partial_restore: bool) -> Iterator[str]:
    """A line for each leaf that differs or is absent."""
    requested = {_name(path): (jax.tree_util.keystr(path), leaf) for path, leaf in leaves}
    for path, (text, leaf) in requested.items():
        shape, dtype = _stored_type(leaf)
        if path not in there:
            yield f"`{text}`: not in the checkpoint; expected {_type_text(shape, dtype)}"
        elif not _type_fits(there[path], leaf):
            found = there[path]
            yield (
                f"`{text}`: the checkpoint has {_type_text(found.shape, found.dtype)}; expected "
                f"{_type_text(shape, dtype)}"
            )
    for path in () if partial_restore else there.keys() - requested.keys():
        found = there[path]
        yield f"`{'.'.join(path)}`: the checkpoint has {_type_text(found.shape, found.dtype)}; not in the target"


def _part_hint(leaves: Any, there: Mapping[tuple[str, ...], Any]) -> str:
    if not any(_differences(leaves, there, partial_restore=True)):
        return " `partial_restore=True` reads the leaves of the target alone."
    names = [_name(path) for path, _ in leaves]
    n = len(names[0])
    starts = [path[:-n] for path in there if n and len(path) > n and path[-n:] == names[0]]
    parts = sorted((part for part in starts if all((*part, *name) in there for name in names)), key=len)
    if not parts:
        listed = ", ".join(f"`{'.'.join(path)}`" for path in list(there)[:_MOST_NAMES])
        return f" The checkpoint has {listed}{', ...' if len(there) > _MOST_NAMES else ''}."

    target = "target"
    for key in reversed(parts[0]):
        target = f"{{{key!r}: {target}}}"
    where = " and ".join(f"`{'.'.join(part)}`" for part in parts)
    return f" It has leaves of these names in {where}: `{target}` with `partial_restore=True` reads them alone."


def _stored_type(target: Any) -> tuple[tuple[int, ...], Any]:
    """orbax stores typed keys as integers."""
    value = np.asarray(target) if isinstance(target, _Number) else target
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype))
        return data.shape, data.dtype
    return tuple(value.shape), np.dtype(value.dtype)


def stored_bytes(tree: Any) -> int:
    types = map(_stored_type, jax.tree.leaves(tree))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in types)


def _type_fits(found: Any, target: Any) -> bool:
    """By shape and dtype; for numbers, by the kind of dtype."""
    shape, dtype = _stored_type(target)
    if tuple(found.shape) != shape:
        return False
    # A Python number becomes an array with its own dtype in the first step.
    if _is_number(found) or isinstance(target, _Number):
        return bool(_kind(found.dtype) == _kind(dtype))
    return bool(np.dtype(found.dtype) == dtype)


def _is_number(found: Any) -> bool:
    return isinstance(found, ocp.metadata.ScalarMetadata)


def _kind(dtype: Any) -> Any:
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), dtype)


def _restore_argument(target: Any, found: Any, *, is_weak: bool) -> Any:
    if isinstance(target, _Number | np.generic) or _is_number(found):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    runtime = runtime_of(target)
    if runtime is not None:
        target = target_of(target, runtime)
    if isinstance(target, DistributedTarget):
        return RemoteRestoreArgs(restore_type=RemoteArray, target=replace(target, weak_type=is_weak))
    if isinstance(target, BlockedArray) and all(isinstance(block, jax.Array) for block in target.blocks):
        target = BlockedTarget(target.shape, target.dtype, target.ranges, target.shardings)
    if isinstance(target, BlockedTarget):
        return RemoteRestoreArgs(restore_type=BlockedArray, target=target)

    is_key = jnp.issubdtype(target.dtype, jax.dtypes.extended)
    if isinstance(target, np.ndarray | RemoteArray) and not is_key:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    sharding = getattr(target, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)


def _number_like_target(found: Any, target: Any, text: str, name: str) -> Any:
    """Of Python, NumPy, or jax on the same devices."""
    value = np.asarray(found)
    if isinstance(target, _Number):
        return type(target)(value.item())
    with np.errstate(over="ignore", invalid="ignore"):
        cast = value.astype(target.dtype)
        is_exact = bool(np.array_equal(cast.astype(value.dtype), value, equal_nan=value.dtype.kind in "fc"))
    if not is_exact:
        raise CheckpointError(
            f"`{text}` in {name} is {value.item()}, which {target.dtype} does not hold. Pass a target of {value.dtype}."
        )
    if isinstance(target, np.generic):
        return cast[()]
    if isinstance(target, np.ndarray):
        return cast
    return jax.device_put(cast, getattr(target, "sharding", None) or jax.devices()[0])


def _weakly_typed(found: Any) -> Any:
    """Weakly typed, if Python's number has its dtype."""
    if not isinstance(found, jax.Array):
        return found
    number = jnp.asarray(found.item())
    return jax.device_put(number, found.sharding) if number.dtype == found.dtype else found


def _type_text(shape: Any, dtype: Any) -> str:
    return f"{dtype}{list(shape)}"
