"""The check of `jax_debug_nans` and `jax_debug_infs`: a call in; its result out, or a FloatingPointError as in jax.

jax checks the results of every compiled function. A step may be many, and what one hands to the next may be infinite or
NaN where `jax.jit` makes no such result: a mask, or what `jnp.where` drops. So only results of steps are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minialpa.pytrees import split_graph


def checks_values() -> bool:
    """Whether the settings of jax forbid some values."""
    config: Any = jax.config  # which does not declare its flags
    return bool(config.jax_debug_nans or config.jax_debug_infs)


def call_checked(name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call. Raises FloatingPointError for a value that the settings of jax do not allow.

    name: of the step, for messages.
    """
    config: Any = jax.config  # which does not declare its flags
    tests = {"nan": np.isnan if config.jax_debug_nans else None, "inf": np.isinf if config.jax_debug_infs else None}
    given: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
    _, graph = split_graph(dict(given))
    if graph is None:  # The step donates copies, so that the user can inspect the arguments after an error.
        args, kwargs = jax.tree.map(_copy, (args, kwargs))
    with jax.debug_nans(False), jax.debug_infs(False):
        result = call(*args, **kwargs)

    # Modules of flax.nnx get their new values in place.
    values, graph = split_graph(dict(given))
    modules = {} if graph is None else {key: values[key] for key in graph.names}
    for what, tree in (("result", result), ("modules", modules)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            found = [kind for kind, test in tests.items() if test is not None and _any(test, leaf)]
            if found:
                value = f"`{what}{jax.tree_util.keystr(path)}` of {name}"
                raise FloatingPointError(
                    f"invalid value ({found[0]}) encountered in {value}. To find the operation, call the function "
                    "without `parallelize`."
                )
    return result


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) and not leaf.is_deleted() else leaf


def _any(test: Callable[[Any], Any], leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, np.inexact) and bool(np.any(test(np.asarray(leaf))))
