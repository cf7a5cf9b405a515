"""`parallelize`: a Python step in, a function with the same arguments and results out that runs on all devices."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from dataclasses import dataclass
from typing import Any, Callable, Hashable, Literal, Sequence

import jax
import numpy as np

from minialpa.cluster import ClusterSpec
from minialpa.errors import MinialpaError, ShardingError, TraceError
from minialpa.inter.emit import emit_program
from minialpa.inter.pipeline import plan_step
from minialpa.methods import Method, ShardParallel, Target, resolve_devices
from minialpa.plan import Plan
from minialpa.progress import ProgressBar
from minialpa.session import current_session
from minialpa.trace import TracedStep, trace_step

Argnums = Sequence[int] | Literal["auto"]


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's arguments: dynamic leaves, and everything else, by which programs are kept apart."""

    leaves: list[Any]
    tree: Any
    static: tuple[tuple[int | str, Hashable], ...]
    n_args: int

    def key(self) -> Hashable:
        return (self.tree, self.static, self.n_args, tuple(_leaf_key(x) for x in self.leaves))


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.Array):
        return (leaf.shape, leaf.dtype)
    if isinstance(leaf, np.ndarray | np.generic | jax.ShapeDtypeStruct):
        dtype = leaf.dtype
        return (leaf.shape, dtype if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else _canonical(dtype))
    # A step count that starts as a Python int comes back as an array of the default integer type.
    return ((), _canonical(np.dtype(int))) if type(leaf) is int else type(leaf)


def _canonical(dtype: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(dtype)


class ParallelizedFunc:
    """A step that is planned, compiled and cached for each set of argument shapes, and runs by the plan."""

    def __init__(
        self,
        fun: Callable[..., Any],
        method: Method | Plan,
        static_argnums: Argnums,
        donate_argnums: Argnums,
        batch_argnums: Sequence[int],
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun, self._method = fun, method
        self._static, self._donate, self._batch = static_argnums, donate_argnums, tuple(batch_argnums)
        self._executables: dict[Hashable, tuple[Any, Any]] = {}
        self._last: Any = None
        self._known_trees: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._bind(args, kwargs)
        executable, out_tree = self._get(call)
        self._last = executable
        return jax.tree.unflatten(out_tree, executable.run(call.leaves))

    def get_executable(self, *args: Any, **kwargs: Any) -> Any:
        """Plan and compile for these arguments, arrays or `jax.ShapeDtypeStruct`s, without running."""
        self._last = self._get(self._bind(args, kwargs))[0]
        return self._last

    def get_last_executable(self) -> Any:
        """The executable of the last call; None before the first."""
        return self._last

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments, arrays or `jax.ShapeDtypeStruct`s. Compiles and runs nothing."""
        return self._plan_for(self._trace(self._bind(args, kwargs)))[0]

    def preshard_dynamic_args(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments, laid out on the devices as the step wants them."""
        call = self._bind(args, kwargs)
        placed = self._get(call)[0].place(call.leaves)
        new_args, new_kwargs = _rebuild(call, placed)
        return (new_args, new_kwargs) if kwargs else new_args

    # ---- calls ----------------------------------------------------------------------------------------------------

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        if kwargs:
            args, kwargs = self._as_positional(args, kwargs)
        static: list[tuple[int | str, Hashable]] = []
        dynamic: dict[int | str, Any] = {}
        for name, value in (*enumerate(args), *kwargs.items()):
            if self._is_static(name, value):
                static.append((name, _hashable(name, value)))
            else:
                dynamic[name] = value
        leaves, tree = jax.tree.flatten(tuple(dynamic.values()))
        return _Call(leaves, (tree, tuple(dynamic)), tuple(static), len(args))

    def _as_positional(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keyword arguments in their places, so that argument numbers mean the same however a call is written."""
        try:
            bound = inspect.signature(self._fun).bind(*args, **kwargs)
        except ValueError:  # a builtin without a signature
            return args, kwargs
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def _is_static(self, name: int | str, value: Any) -> bool:
        if self._static != "auto":
            return name in self._static
        return jax.tree_util.all_leaves([value]) and not _is_numeric(value)

    def _get(self, call: _Call) -> tuple[Any, Any]:
        key = call.key()
        found = self._executables.get(key)
        if found is None:
            found = self._compile(call)
            self._executables[key] = found
            self._known_trees.append(call.tree)
        return found

    def _compile(self, call: _Call) -> tuple[Any, Any]:
        from minialpa.runtime.executable import Executable  # the runtime is loaded when something runs

        traced = self._trace(call)
        plan, target = self._plan_for(traced)
        devices = target.devices or current_session().devices
        needed = sum(stage.n_devices for stage in plan.stages)
        if needed > len(devices):
            raise ShardingError(f"The plan needs {needed} devices and there are {len(devices)}. Plan for fewer devices, or pass more.")
        with ProgressBar() as bar:
            bar.report("Compiling", 0, 1)
            return Executable(plan, emit_program(traced, plan), devices), traced.out_tree

    # ---- planning -------------------------------------------------------------------------------------------------

    def _plan_for(self, traced: TracedStep) -> tuple[Plan, Target]:
        if isinstance(self._method, Plan):
            return self._method, Target(self._method.cluster, None, None)
        target = resolve_devices(self._method.devices)
        with ProgressBar() as bar:
            plan = plan_step(
                traced, target.cluster, self._method.options(), logical_mesh=target.logical_mesh, progress=bar.report
            )
        return plan, target

    def _trace(self, call: _Call) -> TracedStep:
        tree, names = call.tree
        values = jax.tree.unflatten(tree, call.leaves)
        paths, numbers = [], []
        for name, value in zip(names, values, strict=True):
            label = self._label(name)
            for path, _ in jax.tree_util.tree_leaves_with_path(value):
                paths.append(label + jax.tree_util.keystr(path))
                numbers.append(self._number(name))

        def flat_fun(*leaves: Any) -> Any:
            args, kwargs = _rebuild(call, leaves)
            return self._fun(*args, **kwargs)

        state_like = [self._number(n) for n, v in zip(names, values, strict=True) if _is_train_state(v)]
        is_batch = [number in self._batch for number in numbers]
        try:
            return trace_step(flat_fun, call.leaves, paths, is_batch, numbers, self._donated(), state_like)
        except MinialpaError:
            raise
        except Exception as error:
            self._explain_mismatch(call, error)
            raise

    def _donated(self) -> Sequence[int] | Literal["auto"]:
        return self._donate if isinstance(self._donate, str) else tuple(self._donate)

    def _explain_mismatch(self, call: _Call, error: Exception) -> None:
        """Raise a clearer error if the arguments have another structure than those of earlier calls."""
        if self._known_trees and call.tree not in self._known_trees:
            raise TraceError(
                f"The step fails on these arguments: {error!r}. Their structure differs from that of earlier calls:\n"
                f"  now     {call.tree[0]}\n  earlier {self._known_trees[-1][0]}"
            ) from error

    def _label(self, name: int | str) -> str:
        if isinstance(name, str):
            return name
        try:
            return list(inspect.signature(self._fun).parameters)[name]
        except (ValueError, IndexError):
            return f"args[{name}]"

    def _number(self, name: int | str) -> int:
        """Number of an argument; keyword-only ones count by their place in the signature."""
        if isinstance(name, int):
            return name
        parameters = list(inspect.signature(self._fun).parameters)
        return parameters.index(name) if name in parameters else -1


def _rebuild(call: _Call, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tree, names = call.tree
    values = dict(zip(names, jax.tree.unflatten(tree, leaves), strict=True))
    values.update(call.static)
    args = tuple(values[i] for i in range(call.n_args))
    return args, {name: value for name, value in values.items() if isinstance(name, str)}


def _is_numeric(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return False
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | int | float | complex)


def _hashable(name: int | str, value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError as error:
        raise TraceError(f"Argument {name} is static and must be hashable; got a {type(value).__name__}.") from error
    assert isinstance(value, Hashable)
    return value


def _is_train_state(value: Any) -> bool:
    """Whether a value is a flax TrainState, or made like one: parameters and the optimizer's state in one object."""
    return all(hasattr(value, name) for name in ("params", "opt_state", "apply_gradients"))


def parallelize(
    fun: Callable[..., Any] | None = None,
    *,
    method: Method | Plan | None = None,
    static_argnums: Argnums = "auto",
    donate_argnums: Argnums = "auto",
    batch_argnums: Sequence[int] = (1,),
) -> Any:
    """Run a step, written for one device, on all devices. Use it as a call or a decorator, with or without arguments.

    method: how; None shards every operator over all devices of the session (`ShardParallel`). A saved `Plan` runs as it is.
    static_argnums: arguments that are Python values; "auto": those that are not pytrees of arrays and numbers.
    donate_argnums: arguments whose memory the results may take over; "auto": training states that the step replaces.
    batch_argnums: arguments whose leaves hold examples along dimension 0; micro-batches are cut from these.
    """
    if fun is None:
        return functools.partial(
            parallelize, method=method, static_argnums=static_argnums, donate_argnums=donate_argnums,
            batch_argnums=batch_argnums,
        )  # fmt: skip
    return ParallelizedFunc(fun, method or ShardParallel(), static_argnums, donate_argnums, batch_argnums)


def plan(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    cluster: ClusterSpec,
    method: Method | None = None,
    batch_argnums: Sequence[int] = (1,),
) -> Plan:
    """Plan `fun(*args)` for `cluster`, with no device. `args` may hold `jax.ShapeDtypeStruct`s in place of arrays."""
    chosen = dataclasses.replace(method or ShardParallel(), devices=cluster)
    return ParallelizedFunc(fun, chosen, "auto", "auto", batch_argnums).plan(*args)
