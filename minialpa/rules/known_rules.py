"""The rule table: `rule` registers the rule of a primitive, `factors_of` gives the `Factors` of an equation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.errors import VerifyError
from minialpa.ir.equations import is_call, is_literal, shape_of, sub_jaxprs
from minialpa.rules.factors import Dims, Factors, Shapes
from minialpa.support.private_jax import settings_of
from minialpa.tracing.flattening import keep

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Starts:
    """For each dimension of each array, the int32 begin of a shard; 0 if no positional factor is split."""

    operands: tuple[tuple[Any, ...], ...]
    results: tuple[tuple[Any, ...], ...]


#: (equation, shapes of operands on a shard, shapes of results) -> parameters on the shard.
Localizer = Callable[[JaxprEqn, Shapes, Shapes], dict[str, Any]]
#: (equation, operands on a shard, parameters on the shard, positions) -> results on the shard.
OnShards = Callable[[JaxprEqn, Sequence[Any], Mapping[str, Any], Starts], Sequence[Any]]
Rule = Callable[[JaxprEqn], Factors]


@dataclass(frozen=True, slots=True)
class _Entry:
    rule: Rule
    localize: Localizer | None
    on_shards: OnShards | None
    by_equal_operands: bool
    named: Callable[[JaxprEqn], str] | None


_RULES: dict[str, _Entry] = {}
_CACHES: list[Any] = []


def cached(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """`functools.lru_cache`, which `forget` empties when a rule is added."""

    def decorate(fun: Callable[..., T]) -> Callable[..., T]:
        _CACHES.append(functools.lru_cache(maxsize)(fun))
        remembering: Callable[..., T] = _CACHES[-1]
        return remembering

    return decorate


def forget() -> None:
    """The caches depend on the rules."""
    for cache in _CACHES:
        cache.cache_clear()


def rule(
    *primitives: str,
    localize: Localizer | None = None,
    on_shards: OnShards | None = None,
    by_equal_operands: bool = False,
    named: Callable[[JaxprEqn], str] | None = None,
) -> Callable[[Rule], Rule]:
    """Register the rule of primitives, by name. Raises VerifyError if a primitive has one.

    localize: the parameters on shards, for a primitive with shapes among its parameters.
    on_shards: the results on a shard, for a primitive with positional factors.
    by_equal_operands: whether the factors depend on which operands are the same array.
    named: makes the primitive a kernel (`is_kernel`), and gives the name of an equation in messages.
    """

    def register(fun: Rule) -> Rule:
        for name in primitives:
            if name in _RULES:
                raise VerifyError(
                    f"The primitive `{name}` already has a rule. This is a bug in minialpa: report it with this "
                    "message."
                )
            _RULES[name] = _Entry(fun, localize, on_shards, by_equal_operands, named)
            keep(name)
        return fun

    return register


def has_rule(primitive: str) -> bool:
    return primitive in _RULES


def known_primitives() -> tuple[str, ...]:
    return tuple(sorted(_RULES))


def primitives_without_rule(eqns: Iterable[JaxprEqn]) -> list[str]:
    """Sorted names, also from loops and branches: every device computes these operations in full."""
    names: set[str] = set()
    for eqn in eqns:
        name = eqn.primitive.name
        if is_kernel(eqn):
            if not factors_of(eqn).splittable and any(math.prod(shape_of(var)) > 1 for var in eqn.outvars):
                names.add(operation_name(eqn))
        elif has_rule(name) or is_call(eqn):
            for inner in sub_jaxprs(eqn):
                names.update(primitives_without_rule(inner.eqns))
        elif any(shape_of(var) for var in eqn.outvars):
            names.add(name)
    return sorted(names)


def operation_name(eqn: JaxprEqn) -> str:
    """The user's name of a kernel, or the primitive's."""
    entry = _RULES.get(eqn.primitive.name)
    return str(eqn.primitive.name) if entry is None or entry.named is None else entry.named(eqn)


def is_kernel(eqn: JaxprEqn) -> bool:
    """The planner does not plan a kernel's code."""
    entry = _RULES.get(eqn.primitive.name)
    return entry is not None and entry.named is not None


def replicated_factors(eqn: JaxprEqn, flops: float = 0.0) -> Factors:
    """Every dimension is a blocked factor."""
    sizes: list[int] = []

    def fresh(atom: Any) -> Dims:
        dims = []
        for size in shape_of(atom):
            sizes.append(size)
            dims.append((len(sizes) - 1,))
        return tuple(dims)

    operands = tuple(fresh(atom) for atom in eqn.invars)
    results = tuple(fresh(var) for var in eqn.outvars)
    blocked = frozenset(range(len(sizes)))
    return Factors(sizes=tuple(sizes), operands=operands, results=results, blocked=blocked, flops=flops)


@cached(maxsize=2**15)
def factors_of(eqn: JaxprEqn) -> Factors:
    """By its primitive's rule; `replicated_factors` without a rule, or with side effects.

    One device runs an equation with side effects for all others, and loops and branches around it. Results are cached:
    planning asks for them dozens of times.
    """
    try:
        return _factors(kind_of(eqn))
    except TypeError:  # a parameter that cannot be hashed
        return _factors_by_rule(eqn)


@dataclass(frozen=True, slots=True)
class RuleKey:
    """Equations with equal keys differ only in names and literals, which rules do not read.

    key: primitive, parameters, shapes, dtypes and jax context.
    """

    key: Hashable
    eqn: JaxprEqn = field(compare=False)


def kind_of(eqn: JaxprEqn) -> RuleKey:
    """Unhashable if a parameter is."""
    arrays = tuple((shape_of(atom), getattr(atom.aval, "dtype", None)) for atom in (*eqn.invars, *eqn.outvars))
    entry = _RULES.get(eqn.primitive.name)
    equal = equal_operands(eqn) if entry is not None and entry.by_equal_operands else ()
    return RuleKey((eqn.primitive.name, tuple(eqn.params.items()), arrays, settings_of(eqn), equal), eqn)


@cached(maxsize=4096)
def _factors(kind: RuleKey) -> Factors:
    return _factors_by_rule(kind.eqn)


def equal_operands(eqn: JaxprEqn) -> tuple[int, ...]:
    """For each operand, the first one that is the same array."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(_array_key(atom), k) for k, atom in enumerate(eqn.invars))


def _array_key(atom: Any) -> Hashable:
    if not is_literal(atom):
        key: Hashable = atom
        return key
    value = np.asarray(atom.val)
    return str(value.dtype), value.shape, value.tobytes()


def _factors_by_rule(eqn: JaxprEqn) -> Factors:
    entry = _RULES.get(eqn.primitive.name)
    if entry is None:
        return replicated_factors(eqn)
    factors = entry.rule(eqn)
    return replicated_factors(eqn, factors.flops) if eqn.effects else factors


def localizer_of(eqn: JaxprEqn) -> Localizer | None:
    entry = _RULES.get(eqn.primitive.name)
    return None if entry is None else entry.localize


def on_shards_of(eqn: JaxprEqn) -> OnShards:
    on_shards = _RULES[eqn.primitive.name].on_shards
    assert on_shards is not None, eqn
    return on_shards
