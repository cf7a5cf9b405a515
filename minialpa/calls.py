"""A call of a step: binds its arguments (`Parameters.bind` -> `Call`), and rebuilds them from leaves (`rebuild`).

Any thread may use a `Parameters` or a `Call`. Mistakes of the user raise TraceErrors that name the argument.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.ref import AbstractRef, Ref
from jax.tree_util import PyTreeDef

from minialpa.arrays import RemoteArray
from minialpa.errors import TraceError
from minialpa.pytrees import (
    GraphArguments,
    check_no_graph,
    check_returned,
    hide_leaves,
    hide_static,
    leaves_in_modules,
    show_static,
    split_graph,
    variables_in,
    with_static,
)
from minialpa.support.private_jax import (
    ArrayImpl,
    UsersMesh,
    current_settings,
    named_for_messages,
    under_mesh,
    users_mesh,
)
from minialpa.tracing.arguments import leaf_type
from minialpa.tracing.host_memory import memory_kind_of
from minialpa.tracing.refs import is_ref_leaf
from minialpa.tracing.user_meshes import explicit_sharding

#: Types that describe an array without its data.
Shape = jax.ShapeDtypeStruct | jax.core.ShapedArray | AbstractRef
Argnums = int | Sequence[int] | Literal["auto"]
Argnames = str | Iterable[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of one call.

    Attributes:
        leaves: the leaves of all arguments that are not static.
        tree: the pytree of these arguments, and their positions or names.
        static: the position or name, and the value, of each static argument.
        n_args: the number of positional arguments.
        settings: the settings of jax at the call, see `current_settings`.
        mesh: the mesh of the user at the call.
        has_static: whether the pytree holds functions, each in a `StaticLeaf`.
        graph: the structure of the flax.nnx modules among the arguments, whose values are leaves; None without any.
        modules: these modules, which get new values after the step.
        given: all non-static arguments as the caller passed them, if there are modules among them.
        only_arrays: whether all other leaves of arguments and results are static, as in equinox.
    """

    leaves: list[Any]
    tree: Any
    static: tuple[tuple[int | str, Hashable], ...]
    n_args: int
    settings: Hashable
    mesh: UsersMesh
    has_static: bool = False
    graph: GraphArguments | None = None
    modules: tuple[Any, ...] = ()
    given: tuple[Any, ...] = ()
    only_arrays: bool = False

    @property
    def static_types(self) -> tuple[type, ...]:
        """Types of static values: 1, True and 1.0 are equal, but a step may compute different results from them."""
        return tuple(type(value) for _, value in self.static)

    def key(self) -> Hashable:
        """Equal for two calls if one program serves both: everything except the values of leaves."""
        return (
            self.tree,
            self.static,
            self.static_types,
            self.n_args,
            self.settings,
            self.graph,
            tuple(_leaf_key(x) for x in self.leaves),
        )


class Parameters:
    """The parameters of a step.

    Attributes:
        donate: the numbers of the arguments whose memory the results may reuse, or "auto".
        batch: the numbers of the arguments that hold examples, or "auto".
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        static: tuple[Argnums, Argnames],
        donate: tuple[Argnums, Argnames],
        batch: Argnums,
        only_arrays: bool = False,
    ) -> None:
        """static, donate: numbers and names of arguments. batch: numbers. only_arrays: as in `Call`."""
        self._signature = _signature_of(fun)
        self._names = list(self._signature.parameters) if self._signature else []
        kinds = {p.kind: name for name, p in self._signature.parameters.items()} if self._signature else {}
        self._varargs = kinds.get(inspect.Parameter.VAR_POSITIONAL)
        self._takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
        self._only_arrays = only_arrays
        names = (static[1],) if isinstance(static[1], str) or not isinstance(static[1], Iterable) else tuple(static[1])
        self._static = self._argnums("static", static[0], names)
        self._static_keywords = frozenset(names).difference(self._names) if self._takes_any_name else frozenset()
        self.donate = self._argnums("donate", *donate)
        self.batch = self._argnums("batch", batch, ())

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with these arguments. Raises TraceError if a static argument has no hash."""
        args, kwargs = self.as_positional(args, kwargs)

        static: list[tuple[int | str, Hashable]] = []
        dynamic: dict[int | str, Any] = {}
        given: tuple[tuple[int | str, Any], ...] = (*enumerate(args), *kwargs.items())
        for name, value in given:
            if self._is_static(name, value):
                static.append((name, _check_hashable(self.label(name), value)))
            else:
                dynamic[name] = value

        # Only calls after an import of flax.nnx look for modules.
        graph: GraphArguments | None = None
        modules: tuple[Any, ...] = ()
        with_modules: tuple[Any, ...] = ()
        if "flax.nnx" in sys.modules:
            given_values = dynamic
            dynamic, graph = split_graph(given_values)
            if graph is not None:
                modules = tuple(given_values[name] for name in graph.names)
                with_modules = tuple(given_values.values())

        values = tuple(dynamic.values())
        leaves, tree = jax.tree.flatten(values)
        hidden = hide_leaves(leaves, [True] * len(leaves) if self._only_arrays else leaves_in_modules(values))
        has_functions = hidden is not leaves
        if has_functions:
            leaves, tree = jax.tree.flatten(jax.tree.unflatten(tree, hidden))
        return Call(
            leaves=leaves,
            tree=(tree, tuple(dynamic)),
            static=tuple(static),
            n_args=len(args),
            settings=current_settings(),
            mesh=users_mesh(),
            has_static=has_functions,
            graph=graph,
            modules=modules,
            given=with_modules,
            only_arrays=self._only_arrays,
        )

    def paths(self, call: Call) -> tuple[list[str], list[int]]:
        """The name of each leaf, such as `state.params['w']`, and the number of its argument."""
        tree, names = call.tree
        paths, numbers = [], []
        for name, value in zip(names, jax.tree.unflatten(tree, call.leaves), strict=True):
            label = self.label(name)
            for path, _ in jax.tree_util.tree_leaves_with_path(value):
                paths.append(label + jax.tree_util.keystr(path))
                numbers.append(self.number(name))
        return paths, numbers

    def leaf_types(self, call: Call) -> dict[str, str]:
        """The dtype and shape of each leaf by its path, such as "float32[16, 8]"."""
        types = [(path, leaf_type(leaf, path)) for path, leaf in zip(self.paths(call)[0], call.leaves, strict=True)]
        return {path: f"{found.dtype}{list(found.shape)}" for path, found in types}

    def positions_in_call(self, key: Any, values: Mapping[int, Any]) -> dict[int, slice] | None:
        """For each argument in `values`, by number, the slice of its leaves in calls with the key `key`.

        None if such calls lack one of these arguments, or have it with another structure, shape or dtype.
        """
        (tree, names), *_, leaf_keys = key
        positions: dict[int, slice] = {}
        start = 0
        for name, child in zip(names, tree.children(), strict=True):
            number, stop = self.number(name), start + child.num_leaves
            if number in values:
                leaves, own_tree = jax.tree.flatten(values[number])
                if own_tree != child or tuple(map(_leaf_key, leaves)) != leaf_keys[start:stop]:
                    return None
                positions[number] = slice(start, stop)
            start = stop
        return positions if len(positions) == len(values) else None

    def number(self, name: int | str) -> int:
        """The position of a name in the signature, or -1 if the signature lacks it or it is of `*args`."""
        if isinstance(name, int):
            return name
        return self._names.index(name) if name in self._names and name != self._varargs else -1

    def as_positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with keywords at their positions, so that numbers mean the same in all spellings of a call."""
        if self._signature is None or not kwargs:
            return args, kwargs
        unknown = [name for name in kwargs if name not in self._names]
        if unknown and not self._takes_any_name:
            known = ", ".join(self._names)
            raise TypeError(f"The step got an unexpected keyword argument `{unknown[0]}`. Its arguments are {known}.")
        bound = self._signature.bind(*args, **kwargs)
        return bound.args, bound.kwargs

    def _is_static(self, name: int | str, value: Any) -> bool:
        """With "auto", an argument is static if it is a leaf and not a number."""
        if name in self._static_keywords:
            return True
        if self._static != "auto":
            return self.number(name) in self._static
        is_number = self._only_arrays and type(value) in (int, float, complex)
        return jax.tree_util.all_leaves([value]) and (is_number or not is_numeric(value))

    def label(self, name: int | str) -> str:
        """The argument as users write it, such as `batch`, or `rest[0]` for the first argument in `*rest`."""
        if isinstance(name, str):
            return name
        if self._varargs is not None and name >= self._names.index(self._varargs):
            return f"{self._varargs}[{name - self._names.index(self._varargs)}]"
        return self._names[name] if name < len(self._names) else f"args[{name}]"

    def _argnums(self, option: str, value: Argnums, names: Argnames) -> tuple[int, ...] | Literal["auto"]:
        """The argument numbers, from 0. Negative numbers in `value` count from the last parameter, as in jax.

        option: the name of the option, without "_argnums".
        """
        given_names = (names,) if isinstance(names, str) else names
        if not isinstance(given_names, Iterable):
            raise TraceError(f"Pass argument names, such as `('mode',)`, as `{option}_argnames`; got {names!r}.")
        known = (name for name in given_names if name in self._names or not self._takes_any_name)
        named = [self._number_of(option, name) for name in known]
        if isinstance(value, str) and value == "auto":
            return tuple(dict.fromkeys(named)) or "auto"

        given = (value,) if isinstance(value, int) else tuple(value) if isinstance(value, Iterable) else None
        if given is None or not all(isinstance(number, int) for number in given):
            raise TraceError(f'Pass argument numbers, such as `(0,)`, or "auto" as `{option}_argnums`; got {value!r}.')
        for number in given:
            self._check_number(option, number)
        # `jax.jit` finds numbers of names and names of numbers, and keeps both.
        numbers = [number + len(self._names) if number < 0 else number for number in (*named, *given)]
        return tuple(dict.fromkeys(numbers))

    def check_apart(self) -> None:
        """Raise TraceError for an argument that is static and donated."""
        if self._static != "auto" and self.donate != "auto":
            for number in set(self._static) & set(self.donate):
                raise TraceError(
                    f"`{self.label(number)}` is in `static_argnums` and in `donate_argnums` (or `..._argnames`). "
                    "A static argument has no memory to donate. Remove it from one."
                )

    def _number_of(self, option: str, name: str) -> int:
        if name not in self._names:
            known = f"Name one of {', '.join(self._names)}." if self._names else f"Use `{option}_argnums`."
            raise TraceError(f"`{option}_argnames` has {name!r}, and the step has no parameter of this name. {known}")
        return self._names.index(name)

    def _check_number(self, option: str, number: int) -> None:
        if self._signature and self._varargs is None and not -len(self._names) <= number < len(self._names):
            raise TraceError(
                f"`{option}_argnums` has {number}, and the step has {len(self._names)} arguments, numbered from 0: "
                f"{', '.join(self._names)}."
            )


def _signature_of(fun: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fun)
    except Exception:  # A builtin has no signature, and attributes of a callable object may raise anything.
        return None


def are_alive(leaves: Sequence[Any]) -> bool:
    """Whether a program may run on these leaves: no leaf is deleted, traced, or only a shape."""
    # Fast for the usual case: most leaves are arrays of jax.
    others = [leaf for leaf in leaves if type(leaf) is not ArrayImpl]
    arrays = [leaf for leaf in leaves if type(leaf) is ArrayImpl] if others else leaves
    return not any(map(ArrayImpl.is_deleted, arrays)) and all(map(_is_alive, others))


def _is_alive(leaf: Any) -> bool:
    if isinstance(leaf, Shape | jax.core.Tracer):
        return False
    # The runner checks arrays in Refs, in its turn: another thread may be replacing them.
    return not isinstance(leaf, jax.Array | RemoteArray) or not leaf.is_deleted()


def leaf_types(leaves: Sequence[Any]) -> list[Any]:
    """Equal only for leaves of equal classes and keys, under the same settings of jax.

    Comparing is fast, since arrays of one type mostly share an object. A NumPy bool has the key of an array without
    dimensions, but as a whole argument it is static.
    """
    return [leaf.aval if type(leaf) is ArrayImpl else (type(leaf), *_other_type(leaf)) for leaf in leaves]


def _other_type(leaf: Any) -> tuple[Any, ...]:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else (_leaf_key(leaf),)


def _leaf_key(leaf: Any) -> Hashable:
    """Shape, dtype, weak type (dtypes of results depend on it), memory kind in host memory or "in a Ref", and sharding
    on Explicit axes; else the Python type.
    """
    if is_ref_leaf(leaf):
        return (leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False)), "in a Ref")
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | Shape | RemoteArray):
        kind = (leaf.shape, _canonical_dtype(leaf.dtype), bool(getattr(leaf, "weak_type", False)))
        memory, sharding = memory_kind_of(leaf), explicit_sharding(leaf)
        typed = () if sharding is None else (sharding.spec, sharding.mesh.abstract_mesh)
        return (*kind, *(() if memory is None else (memory,)), *typed)
    # A step count that starts as a Python int returns as a weakly typed array. With one key for both, the second call
    # finds the program of the first.
    if type(leaf) in (int, float, complex):
        return ((), _canonical_dtype(np.dtype(type(leaf))), True)
    return (type(leaf),)


def _canonical_dtype(dtype: Any) -> Any:
    """The dtype that jax gives an array of `dtype`: without x64, int32 for int64."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended) or dtype.kind in "OSUMm":
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def rebuild(call: Call, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of `call`, with `leaves` as its leaves."""
    tree, names = call.tree
    dynamic = jax.tree.unflatten(tree, leaves)
    values = dict(zip(names, show_static(dynamic) if call.has_static else dynamic, strict=True))
    if call.graph is not None:
        values.update(zip(call.graph.names, call.graph.merge(values), strict=True))
    values.update(call.static)
    args = tuple(values[i] for i in range(call.n_args))
    return args, {name: value for name, value in values.items() if isinstance(name, str)}


def on_leaves(fun: Callable[..., Any], call: Call, paths: Sequence[str]) -> Callable[..., Any]:
    """`fun` as a function of the leaves of `call`, with the names `paths`. `shown` rebuilds its result."""

    def flat_fun(*leaves: Any) -> Any:
        args, kwargs = rebuild(call, leaves)
        in_graph = () if call.graph is None else call.graph.names
        given = (*enumerate(args), *kwargs.items())
        variables = variables_in([value for name, value in given if name not in in_graph])

        with under_mesh(call.mesh):
            result = fun(*args, **kwargs)
        check_returned(variables, result)
        check_no_graph(result, "The result")
        arrays = hide_static(result, only_arrays=call.only_arrays)
        _check_arrays(arrays)
        if call.graph is None:
            return arrays
        modules = tuple(args[name] if isinstance(name, int) else kwargs[name] for name in in_graph)
        # First, since `find_aliases` searches results in order.
        return call.graph.values_of(modules), arrays

    if inspect.isroutine(fun):
        functools.update_wrapper(flat_fun, fun)
    return named_for_messages(flat_fun, fun, paths)


def _check_arrays(result: Any) -> None:
    """Raise TraceError for a leaf of a step's result that is neither an array nor a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if isinstance(leaf, Ref):
            raise TraceError(
                f"The step returns a Ref as `result{jax.tree_util.keystr(path)}`. Return its value, `ref[...]`; the "
                "caller's Ref has the new value after the step."
            )
        try:
            jax.typeof(leaf)
        except Exception as error:  # also one from the leaf's own code
            raise TraceError(
                f"The step returns a {type(leaf).__name__} as `result{jax.tree_util.keystr(path)}`. Return arrays, "
                "numbers and functions in pytrees, and compute other values outside of the step."
            ) from error


def shown(tree: PyTreeDef) -> Callable[[Sequence[Any]], Any]:
    """A function from the result leaves of `on_leaves`, whose pytree is `tree`, to the result.

    If the call has modules, the result is a pair: their new values, and the result of the step.
    """
    template, shown_tree, positions = with_static(tree)
    if len(positions) == len(template):
        return functools.partial(jax.tree.unflatten, tree)

    def result_of(leaves: Sequence[Any]) -> Any:
        result = list(template)
        for i, leaf in zip(positions, leaves, strict=True):
            result[i] = leaf
        return jax.tree.unflatten(shown_tree, result)

    return result_of


def is_numeric(value: Any) -> bool:
    """Whether a value is a number, an array, or an array after `jnp.asarray`.

    A bool is not, so flags are static by default.
    """
    if isinstance(value, bool | np.bool_):
        return False
    arrays = jax.Array | Shape | np.ndarray | np.generic | RemoteArray | Ref
    return isinstance(value, arrays | int | float | complex) or hasattr(type(value), "__jax_array__")


def _check_hashable(name: str, value: Any) -> Hashable:
    """The value of the static argument `name`. Raises TraceError if it has no hash."""
    try:
        hash(value)
    except TypeError as error:
        raise TraceError(
            f"Argument `{name}` is static and must be hashable; got a {type(value).__name__}. Pass a hashable value "
            "such as a tuple or a string, or arrays in a pytree."
        ) from error
    assert isinstance(value, Hashable)
    return value


def is_train_state(value: Any) -> bool:
    """Whether a value has the attributes of a flax TrainState. Runs no code of the value, which may raise any error."""
    names = ("params", "opt_state", "apply_gradients")
    return all(inspect.getattr_static(value, name, None) is not None for name in names)
