"""Rules of users: a `ShardingRule` of a primitive, an FFI target or a Python function in, its `Factors` out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Primitive, jaxpr_as_fun

from minialpa.errors import ShardingError
from minialpa.ir.equations import aval_of, is_weak, sub_jaxprs, type_of
from minialpa.rules.common import n_elements
from minialpa.rules.factors import Factors, Shapes
from minialpa.rules.known_rules import factors_of, forget, has_rule, is_kernel, replicated_factors, rule
from minialpa.rules.sharding_rule import NamedFactors, ShardingRule, batched_rule, derivative_rule, shapes_of
from minialpa.support.private_jax import (
    changed_aval,
    current_settings,
    define_batching,
    define_function,
    result_avals,
)
from minialpa.tracing.flattening import written_out

#: Types of the operands -> floating point operations.
Flops = Callable[..., float]
#: (parameters, shapes of operands on a shard, shapes of results) -> parameters on the shard.
ParamsOf = Callable[[dict[str, Any], Shapes, Shapes], dict[str, Any]]


def check_shards(eqn: JaxprEqn, factors: Factors, names: Sequence[str], operation: str, local: Any) -> None:
    """Cut each factor once. Raises ShardingError unless the operation makes shards of the shapes of its rule.

    local: a `known_rules.Localizer`.
    """
    for f, n in factors.smallest_splits():
        operands, results = factors.local_shapes({f: n})
        avals = [changed_aval(aval_of(atom), shape=shape) for atom, shape in zip(eqn.invars, operands, strict=True)]
        try:
            made = shapes_of(result_avals(eqn, avals, local(eqn, operands, results)))
        except ShardingError:
            raise
        except Exception as error:
            raise ShardingError(
                f"The sharding rule of `{operation}` allows splitting `{names[f]}`, but the operation does not take "
                f"shards of shapes {list(operands)}. Correct the rule, or add `{names[f]}` to `need_replication`. "
                f"{type(error).__name__}: {error}"
            ) from error
        if made != results:
            raise ShardingError(
                f"The sharding rule of `{operation}` allows splitting `{names[f]}`, but from shards of shapes "
                f"{list(operands)} the operation makes results of shapes {list(made)} instead of {list(results)}. "
                "Correct the rule, or pass `localize` if parameters of the operation contain shapes."
            )


def elements_made(eqn: JaxprEqn) -> float:
    """Assumed flops of unknown code: one for each element of the largest result."""
    return float(max((n_elements(var) for var in eqn.outvars), default=0))


def jaxpr_flops(jaxpr: Any) -> float:
    """Loops and branches included."""
    return sum(_equation_flops(eqn) for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _equation_flops(eqn: JaxprEqn) -> float:
    inner = [] if is_kernel(eqn) else [jaxpr_flops(body) for body in sub_jaxprs(eqn)]
    if not inner:
        if has_rule(eqn.primitive.name):
            return factors_of(eqn).flops
        compiled = written_out(eqn)
        return 0.0 if compiled is None else jaxpr_flops(compiled)
    if eqn.primitive.name == "cond":
        return max(inner)
    return sum(inner) * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)


# ---- primitives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _UserRule:
    """check: whether the first step with the operation tests the rule."""

    text: ShardingRule
    flops: Flops | None
    check: bool


#: By primitive, and by target of `jax.ffi.ffi_call`.
_PRIMITIVES: dict[str, _UserRule] = {}
_TARGETS: dict[str, _UserRule] = {}


def registered_rules(eqns: Sequence[JaxprEqn]) -> list[tuple[str, ShardingRule]]:
    """For primitives and targets, and for functions in these equations, by name."""
    named = [(name, rules[name].text) for rules in (_PRIMITIVES, _TARGETS) for name in sorted(rules)]
    return named + list(_function_rules(eqns))


def _function_rules(eqns: Sequence[JaxprEqn]) -> Iterator[tuple[str, ShardingRule]]:
    for eqn in eqns:
        if eqn.primitive.name == "minialpa_function":
            yield eqn.params["function"].name, eqn.params["function"].text
        for body in sub_jaxprs(eqn):
            yield from _function_rules(body.eqns)


def register_primitive(
    name: str, text: ShardingRule, *, localize: ParamsOf | None, flops: Flops | None, check: bool
) -> None:
    """Raises ShardingError if the primitive has a rule."""
    if has_rule(name):
        raise ShardingError(f"The primitive `{name}` already has a sharding rule. Remove the second rule for it.")

    def local(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
        return dict(eqn.params) if localize is None else localize(dict(eqn.params), operands, results)

    def of_equation(eqn: JaxprEqn) -> Factors:
        named, factors = _factors_by(text, eqn, name, elements_made(eqn), flops)
        check_shards(eqn, factors, tuple(named.sizes), name, local)
        return factors

    rule(name, localize=local, named=lambda eqn: name)(of_equation)
    _PRIMITIVES[name] = _UserRule(text, flops, check)
    forget()


def _factors_by(
    text: ShardingRule, eqn: JaxprEqn, name: str, default_flops: float, flops: Flops | None
) -> tuple[NamedFactors, Factors]:
    named = text.named_factors(shapes_of(eqn.invars), shapes_of(eqn.outvars), name)
    types = [jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype) for atom in eqn.invars]
    return named, named.factors(default_flops if flops is None else float(flops(*types)))


# ---- foreign functions ----------------------------------------------------------------------------------------------


def register_target(name: str, text: ShardingRule, *, flops: Flops | None, check: bool) -> None:
    """Raises ShardingError if calls of the foreign function have a rule. check: see `_UserRule`."""
    if name in _TARGETS:
        raise ShardingError(f"The FFI target `{name}` already has a sharding rule. Remove the second rule for it.")
    _TARGETS[name] = _UserRule(text, flops, check)
    forget()


def _local_call(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    avals = eqn.params["result_avals"]
    local = tuple(changed_aval(aval, shape=shape) for aval, shape in zip(avals, results, strict=True))
    return dict(eqn.params, result_avals=local)


def _target_name(eqn: JaxprEqn) -> str:
    return f"ffi:{eqn.params['target_name']}"


@rule("ffi_call", localize=_local_call, named=_target_name)
def _ffi_call(eqn: JaxprEqn) -> Factors:
    """By the target's rule: `vmap_method` does not give the number of dimensions that `vmap` has added."""
    target = _TARGETS.get(eqn.params["target_name"])
    if target is None or eqn.effects:
        return replicated_factors(eqn, elements_made(eqn))
    return _factors_by(target.text, eqn, _target_name(eqn), elements_made(eqn), target.flops)[1]


# ---- functions ------------------------------------------------------------------------------------------------------


class OpaqueFunction:
    """A function of arrays, or shards of arrays, that runs as one equation. Compared by identity.

    Its derivative is another opaque function, which recomputes the function, with the rule of `derivative_rule`; under
    `vmap` the rule gets one more factor. Jaxprs, derivatives and batches are cached, so equal calls are equal
    equations.
    """

    def __init__(
        self,
        name: str,
        fun: Callable[..., Any],
        text: ShardingRule,
        flops: Flops | None = None,
        *,
        check: bool = True,
    ) -> None:
        """fun: maps arrays to a list of arrays.
        flops: from the types of operands; by default, from the jaxpr.
        check: whether the rule `text` is tested before use.
        """
        self.name, self.fun, self.text, self.flops, self.check = name, fun, text, flops, check
        self._traced: dict[Any, Any] = {}
        self._derived: dict[Any, OpaqueFunction] = {}

    def __repr__(self) -> str:
        return self.name

    def jaxpr(self, avals: Sequence[Any]) -> Any:
        """On operands of these types, as a closed jaxpr. Raises ShardingError for traced closures."""
        key = (current_settings(), *((tuple(aval.shape), str(aval.dtype), is_weak(aval)) for aval in avals))
        if key not in self._traced:
            structs = list(map(type_of, avals))
            closed = jax.make_jaxpr(self.fun)(*structs)
            if any(isinstance(value, jax.core.Tracer) for value in closed.consts):
                raise ShardingError(
                    f"`{self.name}`, which has a sharding rule, reads a value of the step from an enclosing function. "
                    "Pass the value to it as an argument, and add the argument to the rule."
                )
            self._traced[key] = closed
        return self._traced[key]

    def derivative(self, avals: Sequence[Any], made: Sequence[Any]) -> OpaqueFunction:
        """From operands and cotangents of results to cotangents of operands."""
        inexact = tuple([i for i, a in enumerate(avs) if jnp.issubdtype(a.dtype, np.inexact)] for avs in (avals, made))
        text = derivative_rule(self.text, shapes_of(avals), shapes_of(made), inexact)  # type: ignore[arg-type]
        of_operands, of_results = inexact
        key = ("derivative", text)
        if key not in self._derived:
            n = len(avals)

            def fun(*arrays: Any) -> Any:
                operands, cotangents = arrays[:n], arrays[n:]

                def floats(*values: Any) -> Any:
                    filled = list(operands)
                    for k, value in zip(of_operands, values, strict=True):
                        filled[k] = value
                    results = self.fun(*filled)
                    return [results[r] for r in of_results]

                _, pull = jax.vjp(floats, *(operands[k] for k in of_operands))
                return list(pull(list(cotangents)))

            flops = self.flops
            derivative_flops = None if flops is None else lambda *types: 3.0 * flops(*types[:n])
            self._derived[key] = OpaqueFunction(
                f"derivative of {self.name}", fun, text, derivative_flops, check=self.check
            )
        return self._derived[key]

    def batched(self, is_batched: Sequence[bool], operands: Shapes, results: Shapes) -> OpaqueFunction:
        """A leading dimension more for some operands and all results."""
        text = batched_rule(self.text, is_batched, operands, results)
        key = ("batched", tuple(is_batched), text)
        if key not in self._derived:
            fun = jax.vmap(self.fun, in_axes=tuple(0 if batched else None for batched in is_batched))
            flops, dims = self.flops, tuple(is_batched)

            def batched_flops(*types: Any) -> float:
                assert flops is not None
                rest = [jax.ShapeDtypeStruct(t.shape[b:], t.dtype) for t, b in zip(types, dims, strict=True)]
                n = max(t.shape[0] for t, b in zip(types, dims, strict=True) if b)
                return float(n) * flops(*rest)

            given = None if flops is None else batched_flops
            self._derived[key] = OpaqueFunction(self.name, fun, text, given, check=self.check)
        return self._derived[key]


function_p = Primitive("minialpa_function")
function_p.multiple_results = True


def opaque_call(function: OpaqueFunction, arrays: Sequence[Any]) -> list[Any]:
    """The results of an opaque function as one equation, which can be differentiated.

    Raises ShardingError if the rule does not fit the arrays, or if the function reads traced values by closure.
    """
    return list(_differentiable(function, *arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(function: OpaqueFunction, *arrays: Any) -> Any:
    # Raises here, so the error has the line of the call.
    avals = [jax.typeof(array) for array in arrays]
    function.text.named_factors(shapes_of(avals), shapes_of(function.jaxpr(avals).out_avals), function.name)
    return tuple(_bind(function, arrays))


def _forward(function: OpaqueFunction, *arrays: Any) -> Any:
    return _differentiable(function, *arrays), arrays


def _backward(function: OpaqueFunction, arrays: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    """Float0 for integers."""
    avals = [jax.typeof(array) for array in arrays]
    derivative = function.derivative(avals, function.jaxpr(avals).out_avals)
    of_results = [c for c in cotangents if getattr(c, "dtype", None) != jax.dtypes.float0]
    found = iter(opaque_call(derivative, [*arrays, *of_results]))
    return tuple(
        next(found) if jnp.issubdtype(aval.dtype, np.inexact) else np.zeros(aval.shape, jax.dtypes.float0)
        for aval in avals
    )


_differentiable.defvjp(_forward, _backward)


def run_function(*arrays: Any, function: OpaqueFunction, text: ShardingRule, jaxpr: Any) -> list[Any]:
    del function, text
    return list(jaxpr_as_fun(jaxpr)(*arrays))


def _batch(
    arrays: Sequence[Any], dims: Sequence[int | None], *, function: OpaqueFunction, text: ShardingRule, jaxpr: Any
) -> Any:
    is_batched = [dim is not None for dim in dims]
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    batched = function.batched(is_batched, shapes_of(jaxpr.in_avals), shapes_of(jaxpr.out_avals))
    results = _bind(batched, moved)
    return results, [0] * len(results)


def _bind(function: OpaqueFunction, arrays: Sequence[Any]) -> list[Any]:
    closed = function.jaxpr([jax.typeof(array) for array in arrays])
    return list(function_p.bind(*arrays, function=function, text=function.text, jaxpr=closed))


function_p.def_impl(lambda *arrays, **params: jax.jit(functools.partial(run_function, **params))(*arrays))
function_p.def_abstract_eval(lambda *avals, function, text, jaxpr: list(jaxpr.out_avals))
define_batching(function_p, _batch)
define_function(function_p, run_function)


def _local_function(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    avals = [changed_aval(aval_of(atom), shape=shape) for atom, shape in zip(eqn.invars, operands, strict=True)]
    return dict(eqn.params, jaxpr=eqn.params["function"].jaxpr(avals))


@rule("minialpa_function", localize=_local_function, named=lambda eqn: eqn.params["function"].name)
def _function(eqn: JaxprEqn) -> Factors:
    function: OpaqueFunction = eqn.params["function"]
    default_flops = 0.0 if function.flops is not None else jaxpr_flops(eqn.params["jaxpr"])
    named, factors = _factors_by(function.text, eqn, function.name, default_flops, function.flops)
    check_shards(eqn, factors, tuple(named.sizes), function.name, _local_function)
    return factors


def rule_to_check(eqn: JaxprEqn) -> ShardingRule | None:
    """None if `check` is False."""
    match eqn.primitive.name:
        case "minialpa_function":
            function: OpaqueFunction = eqn.params["function"]
            return function.text if function.check else None
        case "ffi_call":
            found = _TARGETS.get(eqn.params["target_name"])
        case name:
            found = _PRIMITIVES.get(name)
    return found.text if found is not None and found.check else None
