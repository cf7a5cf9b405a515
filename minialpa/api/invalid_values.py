"""The check of `jax_debug_nans` and `jax_debug_infs`: a call goes in; its result or a FloatingPointError comes out.

Only results of the whole step are checked, as for `jax.jit`. Values between its programs may be infinite or NaN: a
mask, or an operand that `jnp.where` drops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minialpa.pytrees import split_graph
from minialpa.support.private_jax import value_of_ref
from minialpa.tracing.refs import is_ref_leaf


def checks_values() -> bool:
    config: Any = jax.config  # which does not declare its flags
    return bool(config.jax_debug_nans or config.jax_debug_infs)


def call_checked(name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raises FloatingPointError, with the leaf and the step `name`, for a forbidden value."""
    config: Any = jax.config  # which does not declare its flags
    tests = {"nan": np.isnan if config.jax_debug_nans else None, "inf": np.isinf if config.jax_debug_infs else None}
    given: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
    _, graph = split_graph(dict(given))  # the structure of modules of flax.nnx among the arguments, or None
    # The step donates copies: the user can inspect arguments after an error. Modules get new values in place.
    if graph is None:
        args, kwargs = jax.tree.map(_copy, (args, kwargs))
    with jax.debug_nans(False), jax.debug_infs(False):
        result = call(*args, **kwargs)

    values, graph = split_graph(dict(given))
    modules = {} if graph is None else {key: values[key] for key in graph.names}
    refs = jax.tree.map(lambda x: value_of_ref(x) if is_ref_leaf(x) else None, (args, kwargs))
    for what, tree in (("result", result), ("modules", modules), ("refs", refs)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            found = [kind for kind, test in tests.items() if test is not None and _any_element(test, leaf)]
            if found:
                value = f"`{what}{jax.tree_util.keystr(path)}` of {name}"
                raise FloatingPointError(
                    f"invalid value ({found[0]}) encountered in {value}. To find the operation, call the function "
                    "without `parallelize`."
                )
    return result


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) and not leaf.is_deleted() else leaf


def _any_element(test: Callable[[Any], Any], leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, np.inexact) and bool(np.any(test(np.asarray(leaf))))
