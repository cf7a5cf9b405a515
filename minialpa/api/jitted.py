"""A jitted function goes in; the function inside and the options of its wrapper come out.

Wrappers are `jax.jit`, `flax.nnx.jit` and `equinox.filter_jit`, also inside `functools.partial` or as methods. Of
nested wrappers the outermost counts, as in jax.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any, Literal

import jax

from minialpa.api.step_compiler import function_name
from minialpa.errors import ShardingError, TraceError
from minialpa.pytrees import check_no_graph, graph_node_class
from minialpa.support.private_jax import options_of_jit, warn

_DEVICES = "The `devices` of a method choose devices."
#: Options of `jax.jit` that `parallelize` refuses, with the replacements.
REFUSED = {
    "abstracted_axes": "Each set of shapes is planned by itself.",
    "backend": _DEVICES,
    "compiler_options": "Plans hold the options that their programs are compiled with.",
    "device": _DEVICES,
}

#: Numbers and names of arguments.
Arguments = tuple[Sequence[int] | Literal["auto"], tuple[str, ...]]
_AUTO: Arguments = ("auto", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class JitOptions:
    """Options of a wrapper. "auto": the wrapper leaves them open.

    Attributes:
        in_shardings, out_shardings: as `jax.jit` takes them.
        only_arrays: whether all leaves that are no arrays are static, as in equinox.
        updates_modules: whether modules of flax.nnx, also bound ones, get new values.
    """

    static: Arguments = _AUTO
    donate: Arguments = _AUTO
    in_shardings: Any = "auto"
    out_shardings: Any = "auto"
    only_arrays: bool = False
    updates_modules: bool = False

    def of_bound(self, bound: Callable[..., Any], n_bound: int) -> JitOptions:
        """The options of `bound`, whose first `n_bound` arguments are given."""
        shardings = self.in_shardings
        if isinstance(shardings, tuple):
            numbers = () if self.static[0] == "auto" else self.static[0]
            shardings = shardings[n_bound - sum(number < n_bound for number in numbers) :]
        return replace(
            self,
            static=_after(self.static, bound, n_bound),
            donate=_after(self.donate, bound, n_bound),
            in_shardings=shardings,
        )


Unjitted = tuple[Callable[..., Any], JitOptions]


def unjitted(fun: Any) -> Unjitted:
    """Other functions return unchanged. Raises ShardingError or TraceError for a wrapper that cannot be taken off."""
    return _unjitted(fun) or (fun, JitOptions())


def _unjitted(fun: Any) -> Unjitted | None:
    if isinstance(fun, functools.partial) or _is_equinox_partial(fun):
        found, args, named = _unjitted(fun.func), fun.args, fun.keywords
    elif isinstance(fun, MethodType):
        found, args, named = _without_wrapper(fun.__func__), (fun.__self__,), {}
    elif (found := _without_wrapper(fun)) is not None:
        return found
    else:
        found, args, named = _without_wrapper(inspect.getattr_static(type(fun), "__call__", None)), (fun,), {}
    if found is None:
        return None
    inside, options = found
    if options.updates_modules:
        check_no_graph((args, named), f"The function `{function_name(inside)}`, or its object,")
    bound = functools.partial(inside, *args, **named)
    return bound, options.of_bound(bound, len(args))


def _is_equinox_partial(fun: Any) -> bool:
    kind = getattr(sys.modules.get("equinox"), "Partial", None)
    return kind is not None and isinstance(fun, kind)


def _without_wrapper(fun: Any) -> Unjitted | None:
    return _of_jit(fun) or _of_nnx(fun) or _of_equinox(fun)


def _of_jit(fun: Any) -> Unjitted | None:
    options = _options_of_jit(fun, fun)
    return None if options is None else (_on_copies(fun.__wrapped__), options)


def _options_of_jit(fun: Any, outer: Any) -> JitOptions | None:
    """The options for calls of `outer`. Warns of, or refuses, other options."""
    given = options_of_jit(fun)
    if given is None:
        return None
    for name in ("device", "backend"):
        if getattr(given, name) is not None:
            raise ShardingError(f"`{name}` is an option of `jax.jit`, not of `parallelize`. {REFUSED[name]}")
    if any(layout is not None for layout in (*given.in_layouts_leaves, *given.out_layouts_leaves)):
        raise ShardingError("The jitted function fixes layouts of arrays. Pass the function before `jax.jit`.")
    if given.compiler_options_kvs:
        warn(f"`compiler_options` of the jitted function have no effect. {REFUSED['compiler_options']}")
    inside = outer.__wrapped__
    return JitOptions(
        static=_known(inside, given.static_argnums, given.static_argnames),
        donate=_known(inside, given.donate_argnums, given.donate_argnames),
        in_shardings=_shardings(given.in_shardings_treedef, given.in_shardings_leaves),
        out_shardings=_shardings(given.out_shardings_treedef, given.out_shardings_leaves),
    )


def _of_nnx(fun: Any) -> Unjitted | None:
    is_cached = isinstance(fun, FunctionType) and fun.__code__.co_name == "cache_args_wrapper"  # nnx.cached_partial
    if not is_cached and type(fun).__module__ != "flax.nnx.transforms.compilation":
        return None
    if is_cached or getattr(fun, "partial_args", False):
        raise TraceError(
            f"`nnx.{'cached' if is_cached else 'jit'}_partial` holds arguments of the function, but a parallelized "
            "step updates only modules that a call passes. Pass the function to `parallelize`, and the modules as "
            "arguments."
        )
    if not hasattr(fun, "jitted_fn"):
        return None
    options = _options_of_jit(fun.jitted_fn, fun)
    if options is None:
        return None
    # flax has added entries for static arguments.
    shardings = fun.in_shardings
    if isinstance(shardings, tuple | list):
        static = () if options.static[0] == "auto" else options.static[0]
        shardings = tuple(entry for number, entry in enumerate(shardings) if number not in static)
    return fun.fun, replace(
        options,
        in_shardings="auto" if shardings is None else shardings,
        out_shardings="auto" if fun.out_shardings is None else fun.out_shardings,
        updates_modules=True,
    )


def _of_equinox(fun: Any) -> Unjitted | None:
    kind = getattr(sys.modules.get("equinox._jit"), "_JitWrapper", None)
    if kind is None or not isinstance(fun, kind):
        return None
    inside = fun.__wrapped__
    n = len(_parameters_of(inside))
    donated = [*([0] if fun.donate_first else []), *(range(1, n) if fun.donate_rest else [])]
    return inside, JitOptions(donate=(donated or "auto", ()), only_arrays=True)


def _on_copies(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` on copies of modules of flax.nnx: `jax.jit` does not pass on their changes."""
    module = graph_node_class()
    if module is None:
        return fun

    def copied(value: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf, value) if isinstance(value, module) else value

    @functools.wraps(fun)
    def on_copies(*args: Any, **kwargs: Any) -> Any:
        return fun(*map(copied, args), **{name: copied(value) for name, value in kwargs.items()})

    on_copies.__name__ = function_name(fun)
    return on_copies


# ---- options --------------------------------------------------------------------------------------------------------


def _parameters_of(fun: Any) -> dict[str, Any]:
    try:
        return dict(inspect.signature(fun).parameters)
    except (TypeError, ValueError):  # a builtin
        return {}


def _known(fun: Any, numbers: Iterable[int], names: Iterable[str]) -> Arguments:
    """Non-negative numbers, as jax 0.12 has them, and names of arguments."""
    positive = [number + len(_parameters_of(fun)) if number < 0 else number for number in numbers]
    return (positive, tuple(names)) if positive or names else _AUTO


def _after(given: Arguments, bound: Any, n_bound: int) -> Arguments:
    if given[0] == "auto":
        return _AUTO
    numbers = [number - n_bound for number in given[0] if number >= n_bound]
    known = _parameters_of(bound)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    names = tuple(name for name in given[1] if takes_any or name in known)
    return (numbers, names) if numbers or names else _AUTO


def _shardings(tree: Any, leaves: Sequence[Any]) -> Any:
    """A pytree prefix of shardings; None where the planner chooses."""
    if all(leaf is None or _is_open(leaf) for leaf in leaves):
        return "auto"
    return jax.tree.unflatten(tree, [None if _is_open(leaf) else leaf for leaf in leaves])


def _is_open(leaf: Any) -> bool:
    return type(leaf).__name__ == "UnspecifiedValue"
