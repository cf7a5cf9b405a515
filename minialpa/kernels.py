"""Sharding rules for a user's kernels: `register_sharding_rule` adds one, `check_sharding_rule` tests it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax.extend.core import JaxprEqn, Primitive

import minialpa.rules.table  # noqa: F401 (the rules of jax's own primitives come first)
from minialpa.errors import ShardingError, meant
from minialpa.rules.factors import Reduction
from minialpa.rules.known_rules import is_kernel, known_primitives, operation_name
from minialpa.rules.notation import parse_rule
from minialpa.rules.registered import Flops, OpaqueFunction, ParamsOf, opaque_call, register_primitive, register_target
from minialpa.rules.rule_check import check_parts
from minialpa.rules.sharding_rule import ShardingRule
from minialpa.support.private_jax import api_boundary, argument_names, compiled_primitives, named_for_messages
from minialpa.tracing.evaluation import eval_equation, eval_flat
from minialpa.tracing.flattening import trace_flat


@api_boundary
def register_sharding_rule(
    operation: Callable[..., Any] | Primitive | str,
    rule: str,
    *,
    reductions: Mapping[str, Reduction] | Iterable[str] = (),
    need_replication: Iterable[str] = (),
    factor_sizes: Mapping[str, int] | None = None,
    static_argnums: Sequence[int] = (),
    localize: ParamsOf | None = None,
    flops: Flops | None = None,
    check: bool = True,
) -> Any:
    """Register the dimensions of an operation that devices and micro-batches may split.

        attend = register_sharding_rule(flash_attention, "b q h d, b k h d, b k h d -> b q h d")

    Args:
        operation: a function, such as one that calls a kernel; a primitive or its name; or `"ffi:"` and the name of a
            target of `jax.ffi.ffi_call`.
        rule: the factors of operands and results. `(h d)` is one dimension of two factors, `...` any number of leading
            dimensions. A factor that some result lacks is split only if it is in `reductions`.
        reductions: factors with partial results, and how to combine these: "sum", "max", ...; names alone mean "sum".
        need_replication: factors that may not be split.
        factor_sizes: the lengths of inner factors, if no dimension determines them.
        static_argnums: for a function, the arguments that are not arrays. Keyword arguments are static, too.
        localize: for a primitive whose parameters hold shapes: a function from the parameters and the shapes of the
            operands and results on a shard to the parameters on the shard.
        flops: a function from the types of the operands to floating point operations. By default, minialpa counts the
            operations of a function; a primitive has one for each element of its largest result.
        check: whether the first step with the operation tests the rule on small arrays; see `check_sharding_rule`.

    For a function, returns the function to call instead: one equation with this rule, whose derivative recomputes the
    function under a derived rule. Otherwise returns None.

    Raises ShardingError if the rule cannot be read, or if the operation has one. A parallelized step raises it if the
    rule is wrong.
    """
    text = parse_rule(rule, reductions=reductions, need_replication=need_replication, factor_sizes=factor_sizes)
    if isinstance(operation, Primitive):
        operation = str(operation.name)
    if isinstance(operation, str):
        if static_argnums:
            raise ShardingError(
                f"Remove `static_argnums={tuple(static_argnums)}` from the rule of `{operation}`: only functions take "
                "it, and parameters of a primitive or an FFI target are always static."
            )
        target = operation.removeprefix("ffi:")
        if target == operation:
            _check_name(operation)
            return register_primitive(operation, text, localize=localize, flops=flops, check=check)
        if localize is not None:
            raise ShardingError(
                f"Remove `localize` from the rule of the FFI target `{target}`: only primitives take it."
            )
        return register_target(target, text, flops=flops, check=check)

    if not callable(operation):
        raise ShardingError(f"Give the rule a function, a primitive or the name of a primitive; got {operation!r}.")
    if isinstance(operation, _WithRule):
        raise ShardingError(
            f"`{operation.__name__}` already has the sharding rule `{operation._text.text}`. Change the rule where it "
            "is registered, or register the function that it wraps."
        )
    if localize is not None:
        raise ShardingError(
            f"Remove `localize` from the rule of `{getattr(operation, '__name__', operation)}`: only primitives take "
            "it."
        )
    _note_rule(operation, text)
    return _WithRule(operation, text, tuple(static_argnums), flops, check)


#: The first rule of each function.
_RULES: WeakKeyDictionary[Callable[..., Any], ShardingRule] = WeakKeyDictionary()


def _note_rule(function: Callable[..., Any], text: ShardingRule) -> None:
    """Raise ShardingError if the function has another rule."""
    try:
        known = _RULES.setdefault(function, text)
    except TypeError:  # a callable object without a hash or weak references
        return
    if known != text:
        raise ShardingError(
            f"`{getattr(function, '__name__', function)}` already has another sharding rule, `{known.text}`. Change "
            f"that rule where it is registered, or register `{text.text}` for a second function that calls this one."
        )


def _check_name(primitive: str) -> None:
    """Raise ShardingError if jax has no primitive of this name."""
    names = compiled_primitives() | set(known_primitives())
    if primitive not in names:
        advice = meant(primitive, names) or " Import the library that defines it first."
        raise ShardingError(f"jax has no primitive `{primitive}`.{advice}")


class _WithRule:
    """A function with a sharding rule. Each call is one equation."""

    def __init__(
        self,
        fun: Callable[..., Any],
        text: ShardingRule,
        static_argnums: tuple[int, ...],
        flops: Flops | None,
        check: bool,
    ) -> None:
        functools.update_wrapper(self, fun)
        self.__name__: str = getattr(fun, "__name__", type(fun).__name__)
        self._fun, self._text, self._static_argnums, self._flops = fun, text, static_argnums, flops
        self._check = check
        self._functions: dict[Any, tuple[OpaqueFunction, list[Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        static = {i % len(args): args[i] for i in self._static_argnums if -len(args) <= i < len(args)}
        dynamic = [arg for i, arg in enumerate(args) if i not in static]
        leaves, tree = jax.tree.flatten(dynamic)

        key = (tree, len(args), tuple(static.items()), tuple(sorted(kwargs.items())))
        try:
            known = key in self._functions
        except TypeError as error:
            given = {f"argument {i}": x for i, x in static.items()} | {f"`{name}`": x for name, x in kwargs.items()}
            wrong = " and ".join(name for name, x in given.items() if not isinstance(x, Hashable)) or "one of them"
            raise ShardingError(
                f"`{self.__name__}` has a sharding rule, so its keyword arguments and `static_argnums` must be "
                f"hashable, but {wrong} is not ({error}). Pass arrays by position, outside `static_argnums`."
            ) from error
        if not known:
            self._functions[key] = self._opaque_function(tree, len(args), static, kwargs)
        function, out_trees = self._functions[key]
        results = opaque_call(function, leaves)
        return jax.tree.unflatten(out_trees[-1], results)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _opaque_function(
        self, tree: Any, n_args: int, static: Mapping[int, Any], kwargs: Mapping[str, Any]
    ) -> tuple[OpaqueFunction, list[Any]]:
        """The function on the leaves of its arrays, and a list that receives the pytree of its results."""
        out_trees: list[Any] = []

        def flat(*leaves: Any) -> Any:
            arrays = iter(jax.tree.unflatten(tree, leaves))
            args = [static[i] if i in static else next(arrays) for i in range(n_args)]
            results, out_tree = jax.tree.flatten(self._fun(*args, **kwargs))
            out_trees[:] = [out_tree]
            return results

        return OpaqueFunction(self.__name__, flat, self._text, self._flops, check=self._check), out_trees


# ---- checking -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckedFactor:
    """A factor of an operation that passed the test.

    Attributes:
        operation: name of the function, primitive, target or kernel.
        arrays: the split dimensions, such as `operand 0: 1, result 0: 1`.
    """

    operation: str
    arrays: str
    parts: int


@api_boundary
def check_sharding_rule(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[CheckedFactor, ...]:
    """Run `fun(*args, **kwargs)` and test the rules of its kernels, derived rules included.

    For each factor that may be split, equal parts are computed by themselves; together they must give the whole
    results. Use values as in training: equal values hide mistakes. To test the rule of a derivative, pass a function
    with the derivative, such as `jax.grad(loss)`.

    Returns the tested factors. Raises ShardingError if a rule is wrong, or if there is no kernel.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))

    def on_arrays(*arrays: Any) -> Any:
        own_args, own_kwargs = jax.tree.unflatten(tree, arrays)
        return fun(*own_args, **own_kwargs)

    flat, _ = trace_flat(named_for_messages(on_arrays, fun, argument_names(fun, args, kwargs)), *leaves)
    checked: list[list[CheckedFactor]] = []

    def evaluate(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        results = eval_equation(eqn, operands)
        if is_kernel(eqn):
            parts = check_parts(eqn, operands, results)
            checked.append([CheckedFactor(operation_name(eqn), dims, n) for dims, n in parts])
        return results

    eval_flat(flat, leaves, evaluate)
    if not checked:
        raise ShardingError(
            f"`{getattr(fun, '__name__', fun)}` runs no operation with a registered sharding rule outside of loops. "
            "Pass a function that calls the operation directly."
        )
    return tuple(itertools.chain.from_iterable(checked))
