"""Rules as named factors: what may be split in one equation, and how its arrays follow.

`dot_general` on `[b i k],[b k j] -> [b i j]` has four factors. Splitting factor `i` splits dimension 1 of the first
operand and dimension 1 of the result; splitting `k`, absent from the result, leaves partial sums. The same table serves
the sharding strategies (a mesh axis is given to a factor) and micro-batches (the batch factor is split in time).
The form is that of Shardy's sharding rules (openxla/shardy, RFC "sharding rules").

`factors_of` gives the `Factors` of an equation, `localize` its parameters for shards of its arrays, and `run_shard` its
results on a shard, also if they depend on the position of the shard. f stands for the number of a factor.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from minialpa.errors import VerifyError
from minialpa.support.private_jax import settings_of, under_settings_of
from minialpa.tracing.jaxprs import eval_on_shards, is_call, is_control_flow, is_literal, keep, shape_of, sub_jaxprs

Reduction = Literal["sum", "max", "min", "and", "or", "prod"]
Dims = tuple[tuple[int, ...], ...]
#: Shapes of several arrays.
Shapes = tuple[tuple[int, ...], ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ramp:
    """Work that grows with the position: position i, counted from one of the ends, has min(i + 1, most) parts of it.

    Attributes:
        most: parts of the work of a position far from that end.
        block: positions that are computed together, so that only whole blocks are spared what their positions need not.
    """

    most: int
    block: int

    def parts(self, n_positions: int) -> int:
        """Parts of the work of the first positions."""
        steep = min(n_positions, self.most)
        return steep * (steep + 1) // 2 + (n_positions - steep) * self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Factors of one equation, numbered from 0.

    Attributes:
        sizes: the length of each factor.
        operands: for each operand and each of its dimensions, the factors that make it up, outermost first; the product
            of their sizes is the dimension's length. Dimensions of length 1 may have none.
        results: the same for each result.
        reductions: factors that some result lacks, and how the partial results of a split are combined. If the equation
            is jointly linear, an operand of `linear_operands` that lacks the reduced factor takes part once:
            scatter_add(operand, indices, updates) split over its indices keeps `operand` in one shard, zeros elsewhere.
        blocked: factors that may not be split, because the operation mixes positions along them (sort, cumsum) or
            because a shard's result would depend on its position.
        linear: `joint`: the results are linear in all operands listed in `linear_operands` taken together (add);
            `each`: linear in each of them alone (mul, dot), so not in a variable that is listed twice; else `none`.
        linear_operands: numbers of the operands that `linear` is about.
        flops: floating point operations of the whole equation.
        unaffected: pairs (factor, result) of a result that lacks a reduced factor and does not depend on arrays that
            have it, so that every shard computes the same, such as the counter of a loop.
        once: pairs (factor, operand) of additional operands that take part once: initial values of sums over a loop.
        positional: blocked factors of the second kind that can be split if shards know their positions, as devices do:
            see `on_mesh` and `OnShards`. Micro-batches split those of loops and branches only, see `in_time`.
        ramps: factors whose positions have unequal work, as under a causal mask.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reductions: Mapping[int, Reduction] = ()  # type: ignore[assignment]
    blocked: frozenset[int] = frozenset()
    linear: Literal["none", "joint", "each"] = "none"
    linear_operands: tuple[int, ...] = ()
    flops: float = 0.0
    unaffected: frozenset[tuple[int, int]] = frozenset()
    once: frozenset[tuple[int, int]] = frozenset()
    positional: frozenset[int] = frozenset()
    ramps: Mapping[int, Ramp] = ()  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "reductions", dict(self.reductions))
        object.__setattr__(self, "ramps", dict(self.ramps))

    @property
    def splittable(self) -> tuple[int, ...]:
        """Factors that may be split, in order."""
        return tuple(f for f, size in enumerate(self.sizes) if size > 1 and f not in self.blocked)

    def on_mesh(self) -> Factors:
        """The factors as mesh axes may split them: with positional factors not blocked."""
        return replace(self, blocked=self.blocked - self.positional)

    def in_time(self, eqn: JaxprEqn) -> Factors:
        """The factors of `eqn` as micro-batches may split them.

        Positional factors of loops and branches are not blocked: what is made inside, such as random bits, is made for
        each iteration anew, so there is no full-batch value of which a micro-batch could take its rows.
        """
        return self.on_mesh() if self.positional and is_control_flow(eqn) else self

    def leading_factor(self, operand: int, dim: int) -> int | None:
        """The factor that is split when dimension `dim` of an operand is cut into contiguous blocks, if any."""
        return self.leading(self.operands[operand][dim])

    def leading(self, dim: tuple[int, ...]) -> int | None:
        """The factor that is split when a dimension that is made of these is cut: the first longer than 1, if any."""
        return next((f for f in dim if self.sizes[f] > 1), None)

    def is_partial(self, factor: int, result: int) -> bool:
        """Whether shards along `factor` leave partial values of a result, to be combined by `reductions[factor]`."""
        has_factor = any(factor in dim for dim in self.results[result])
        return factor in self.reductions and not has_factor and (factor, result) not in self.unaffected

    def affects(self, factor: int, result: int) -> bool:
        """Whether a result depends on arrays that have `factor`."""
        return any(factor in dim for dim in self.results[result]) or self.is_partial(factor, result)

    def takes_part_once(self, factor: int, operand: int) -> bool:
        """Whether, of all shards along `factor`, only one may see the value of an operand, and the others zero."""
        if factor not in self.reductions or any(factor in dim for dim in self.operands[operand]):
            return False
        return (self.linear == "joint" and operand in self.linear_operands) or (factor, operand) in self.once

    def shape(self, dims: Dims, n_splits: Mapping[int, int]) -> tuple[int, ...]:
        """Local shape of an array whose factors are split into `n_splits[factor]` parts."""
        return tuple(math.prod(self.sizes[f] // n_splits.get(f, 1) for f in dim) for dim in dims)

    def local_shapes(self, n_splits: Mapping[int, int]) -> tuple[Shapes, Shapes]:
        """Local shapes of all operands, and of all results; `n_splits` as in `shape`."""
        operands = tuple(self.shape(dims, n_splits) for dims in self.operands)
        return operands, tuple(self.shape(dims, n_splits) for dims in self.results)

    def n_shares(self, factor: int, n: int) -> float:
        """How many times less than the whole the busiest of n parts along a factor has to do; n, if all do the same."""
        if factor not in self.ramps:
            return n
        size, work = self.sizes[factor], self.ramps[factor].parts
        return work(size) / (work(size) - work(size - size // n))

    def may_balance(self, factor: int, n: int) -> bool:
        """Whether n parts along a factor may exchange halves with each other, so that they have about equal work.

        Part i and part n - 1 - i exchange their second halves, each of which is some whole blocks.
        """
        if factor not in self.ramps or factor in self.positional or n < 2:
            return False
        return self.sizes[factor] % (2 * n * self.ramps[factor].block) == 0

    def n_balanced_shares(self, factor: int, n: int) -> float:
        """The same as `n_shares`, if parts exchange halves as `may_balance` says."""
        size, work = self.sizes[factor], self.ramps[factor].parts
        until = [work(half * size // (2 * n)) for half in range(2 * n + 1)]
        halves = [end - start for start, end in itertools.pairwise(until)]
        return work(size) / max(halves[2 * i] + halves[2 * (n - 1 - i) + 1] for i in range(n))

    def may_split(self, factor: int, n: int) -> bool:
        """Whether splitting `factor` in `n` cuts every array into contiguous, equal blocks."""
        if factor in self.blocked or self.sizes[factor] % n:
            return False
        for dims in (*self.operands, *self.results):
            for dim in dims:
                # With an outer factor in the same dimension, the blocks would be strided.
                if factor in dim and any(self.sizes[f] > 1 for f in dim[: dim.index(factor)]):
                    return False
        return True

    def smallest_splits(self) -> Iterator[tuple[int, int]]:
        """Each factor that may be split, with the least number of parts that it may be split into."""
        for f in self.splittable:
            n = next(n for n in range(2, self.sizes[f] + 1) if self.sizes[f] % n == 0)
            if self.may_split(f, n):
                yield f, n


@dataclass(frozen=True, slots=True)
class Starts:
    """Where shards begin in the whole arrays: an int32 for each dimension, 0 if no positional factor of it is split."""

    operands: tuple[tuple[Any, ...], ...]
    results: tuple[tuple[Any, ...], ...]


#: From the shapes of the shards of operands and results to the parameters of the primitive on them.
Localizer = Callable[[JaxprEqn, Shapes, Shapes], dict[str, Any]]
#: From shards of the operands, local parameters and positions to shards of the results.
OnShards = Callable[[JaxprEqn, Sequence[Any], Mapping[str, Any], Starts], Sequence[Any]]
Rule = Callable[[JaxprEqn], Factors]

_RULES: dict[str, Rule] = {}
_LOCALIZERS: dict[str, Localizer] = {}
_ON_SHARDS: dict[str, OnShards] = {}
_BY_EQUAL_OPERANDS: set[str] = set()
#: Primitives of kernels: for each the name of what an equation runs.
_OPERATION_NAMES: dict[str, Callable[[JaxprEqn], str]] = {}
_CACHES: list[Any] = []


def cached(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """`functools.lru_cache` for what follows from rules: forgotten when a rule is added."""

    def decorate(fun: Callable[..., T]) -> Callable[..., T]:
        _CACHES.append(functools.lru_cache(maxsize)(fun))
        remembering: Callable[..., T] = _CACHES[-1]
        return remembering

    return decorate


def forget() -> None:
    """Empty the caches of what follows from rules."""
    for cache in _CACHES:
        cache.cache_clear()


def rule(
    *primitives: str,
    localize: Localizer | None = None,
    on_shards: OnShards | None = None,
    by_equal_operands: bool = False,
    named: Callable[[JaxprEqn], str] | None = None,
) -> Callable[[Rule], Rule]:
    """Register the rule of one or more primitives, by name. Registering a primitive twice raises VerifyError.

    localize: gives the parameters for local shapes, if the primitive has shapes among its parameters.
    on_shards: computes the results on a shard if positional factors are split.
    by_equal_operands: whether the factors depend on which operands are the same array.
    named: for primitives of kernels, what an equation runs, for messages.
    """

    def register(fun: Rule) -> Rule:
        for name in primitives:
            if name in _RULES:
                raise VerifyError(f"Primitive `{name}` already has a rule.")
            _RULES[name] = fun
            keep(name)
            if localize is not None:
                _LOCALIZERS[name] = localize
            if on_shards is not None:
                _ON_SHARDS[name] = on_shards
            if by_equal_operands:
                _BY_EQUAL_OPERANDS.add(name)
            if named is not None:
                _OPERATION_NAMES[name] = named
        return fun

    return register


def has_rule(primitive: str) -> bool:
    """Whether a primitive has a rule."""
    return primitive in _RULES


def known_primitives() -> tuple[str, ...]:
    """Sorted names of all primitives with a rule."""
    return tuple(sorted(_RULES))


def primitives_without_rule(eqns: Iterable[JaxprEqn]) -> list[str]:
    """Sorted names of the operations that make arrays and have no rule, those in loop bodies and branches included."""
    names: set[str] = set()
    for eqn in eqns:
        name = eqn.primitive.name
        if name in _OPERATION_NAMES:
            if not factors_of(eqn).splittable and any(math.prod(shape_of(var)) > 1 for var in eqn.outvars):
                names.add(operation_name(eqn))
        elif has_rule(name) or is_call(eqn):
            for inner in sub_jaxprs(eqn):
                names.update(primitives_without_rule(inner.eqns))
        elif any(shape_of(var) for var in eqn.outvars):
            names.add(name)
    return sorted(names)


def operation_name(eqn: JaxprEqn) -> str:
    """The name of an equation for messages: that of the primitive, or of what a kernel's primitive calls."""
    named = _OPERATION_NAMES.get(eqn.primitive.name)
    return str(eqn.primitive.name) if named is None else named(eqn)


def is_kernel(eqn: JaxprEqn) -> bool:
    """Whether an equation runs code that the planner cannot look into, or need not."""
    return eqn.primitive.name in _OPERATION_NAMES


def replicated_factors(eqn: JaxprEqn, flops: float = 0.0) -> Factors:
    """Factors for primitives without a rule: every dimension is a blocked factor of its own, so nothing is split."""
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


def factors_of(eqn: JaxprEqn) -> Factors:
    """Factors of an equation by its primitive's rule; `replicated_factors` if there is no rule."""
    arrays = tuple((shape_of(atom), getattr(atom.aval, "dtype", None)) for atom in (*eqn.invars, *eqn.outvars))
    equal = equal_operands(eqn) if eqn.primitive.name in _BY_EQUAL_OPERANDS else ()
    key = (eqn.primitive.name, tuple(eqn.params.items()), arrays, settings_of(eqn), equal)
    try:
        return _factors(_EquationKey(key, eqn))
    except TypeError:  # a parameter that cannot be hashed
        return _by_rule(eqn)


@dataclass(frozen=True, slots=True)
class _EquationKey:
    """Equations with equal keys differ only in names and literals, which rules do not look at.

    Attributes:
        key: primitive, parameters, shapes, dtypes and jax context.
        eqn: the first equation of the kind.
    """

    key: Hashable
    eqn: JaxprEqn = field(compare=False)


@cached(maxsize=4096)
def _factors(kind: _EquationKey) -> Factors:
    return _by_rule(kind.eqn)


def equal_operands(eqn: JaxprEqn) -> tuple[int, ...]:
    """For each operand, the number of the first one that is the same array."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(_array_key(atom), k) for k, atom in enumerate(eqn.invars))


def _array_key(atom: Any) -> Hashable:
    if not is_literal(atom):
        return id(atom)
    value = np.asarray(atom.val)
    return str(value.dtype), value.shape, value.tobytes()


def _by_rule(eqn: JaxprEqn) -> Factors:
    fun = _RULES.get(eqn.primitive.name)
    return replicated_factors(eqn) if fun is None else fun(eqn)


def localize(eqn: JaxprEqn, factors: Factors, n_splits: Mapping[int, int]) -> dict[str, Any]:
    """Parameters of `eqn`'s primitive for the shards that splitting each factor into `n_splits[factor]` leaves."""
    fun = _LOCALIZERS.get(eqn.primitive.name)
    if fun is None:
        return dict(eqn.params)
    return fun(eqn, *factors.local_shapes(n_splits))


def run_shard(
    eqn: JaxprEqn, factors: Factors, operands: Sequence[Any], n_splits: Mapping[int, int], parts: Mapping[int, Any]
) -> list[Any]:
    """The shard of each result, from shards of the operands.

    n_splits[f]: number of parts that a factor is split into.
    parts[f]: number of this shard's part, for each positional factor that is split: an int32, which may be traced.
    """
    params = localize(eqn, factors, n_splits)
    if not parts:
        return eval_on_shards(eqn, operands, params)

    begins = {f: part * (factors.sizes[f] // n_splits[f]) for f, part in parts.items()}
    return _on_shards_from(eqn, factors, operands, params, functools.partial(_first_known, begins))


def run_from(
    eqn: JaxprEqn, factors: Factors, operands: Sequence[Any], n_splits: Mapping[int, int], begins: Mapping[int, Any]
) -> list[Any]:
    """The shard of each result, where blocked factors are split as well: positional ones, and those of results alone.

    begins[f]: the position at which the shard begins, for each blocked factor that is split.
    """
    # What is not positional is made in full, and cut.
    whole = begins.keys() - factors.positional
    params = localize(eqn, factors, {f: n for f, n in n_splits.items() if f not in whole})
    if len(whole) < len(begins):
        start = functools.partial(_first_known, {f: begin for f, begin in begins.items() if f not in whole})
        results = _on_shards_from(eqn, factors, operands, params, start)
    else:
        results = eval_on_shards(eqn, operands, params)

    for f in whole:
        for r, dims in enumerate(factors.results):
            for d, dim in enumerate(dims):
                if f in dim:
                    inner = math.prod(factors.sizes[other] for other in dim if other != f)
                    results[r] = part_of(results[r], d, begins[f] * inner, n_splits[f])
    return results


def _first_known(begins: Mapping[int, Any], dim: tuple[int, ...]) -> Any:
    """Where a shard begins along a dimension with these factors; 0 if none of them is split by position."""
    return next((begins[f] for f in dim if f in begins), 0)


def part_of(x: Any, dim: int, start: Any, n: int) -> Any:
    """One n-th of an array along a dimension, from a position that may be traced."""
    return lax.dynamic_slice_in_dim(x, start, np.shape(x)[dim] // n, dim)


def run_rows(eqn: JaxprEqn, factors: Factors, operands: Sequence[Any], factor: int, rows: tuple[int, int]) -> list[Any]:
    """The results of an equation at the positions (start, stop) of one factor, from operands cut to these positions."""
    sizes = list(factors.sizes)
    sizes[factor] = rows[1] - rows[0]
    params = localize(eqn, replace(factors, sizes=tuple(sizes)), {})
    if factor not in factors.positional:
        return eval_on_shards(eqn, operands, params)
    return _on_shards_from(eqn, factors, operands, params, lambda dim: rows[0] if factor in dim else 0)


def _on_shards_from(
    eqn: JaxprEqn,
    factors: Factors,
    operands: Sequence[Any],
    params: Mapping[str, Any],
    start: Callable[[tuple[int, ...]], Any],
) -> list[Any]:
    """The results of an equation on a shard that knows where it begins; `start` says it of each dimension's factors."""

    def starts(arrays: Iterable[Dims]) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(start(dim) for dim in dims) for dims in arrays)

    on_shards = _ON_SHARDS[eqn.primitive.name]
    with under_settings_of(eqn):
        return list(on_shards(eqn, operands, params, Starts(starts(factors.operands), starts(factors.results))))
