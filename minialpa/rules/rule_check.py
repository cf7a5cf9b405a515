"""Equations with rules in; ShardingError out if the parts of an operation along a factor do not give the whole.

`check_parts` uses given values, `check_registered_rules` small arrays of random values. It shrinks each factor in all
arrays together, so the rule still fits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from minialpa.errors import ShardingError
from minialpa.ir.equations import (
    aval_of,
    fresh_var,
    is_extended,
    is_literal,
    sub_jaxprs,
    with_each_body,
)
from minialpa.rules.factors import Dims, Factors, Shapes, combine
from minialpa.rules.known_rules import RuleKey, cached, factors_of, kind_of, localizer_of, operation_name
from minialpa.rules.registered import rule_to_check
from minialpa.rules.sharding_rule import Names, ShardingRule, shapes_of
from minialpa.rules.shards import localize
from minialpa.support.private_jax import changed_aval, result_avals, under_settings_of, warn
from minialpa.tracing.evaluation import eval_on_shards
from minialpa.tracing.flattening import flatten_calls


@dataclass(frozen=True, slots=True)
class OperationPart:
    """`number` of `n` equal parts along a factor."""

    factor: int
    number: int
    n: int


def cut(x: Any, dims: Dims, part: OperationPart) -> Any:
    """The whole array if it lacks the factor."""
    for axis, dim in enumerate(dims):
        if part.factor in dim:
            size = x.shape[axis] // part.n
            x = x[(slice(None),) * axis + (slice(part.number * size, (part.number + 1) * size),)]
    return x


def wholes(parts: Sequence[np.ndarray], factors: Factors, factor: int, result: int) -> list[np.ndarray]:
    """The whole result: one array, or each part if each must be the whole."""
    axes = [axis for axis, dim in enumerate(factors.results[result]) if factor in dim]
    if axes:
        return [np.concatenate(parts, axis=axes[0])]
    if factors.is_partial(factor, result):
        return [np.asarray(functools.reduce(functools.partial(combine, factors.reductions[factor]), parts))]
    return list(parts)


#: Largest difference of results over their largest element, by bytes of the dtype.
_TOLERANCES = {1: 0.1, 2: 2e-2, 4: 1e-4, 8: 1e-9}
#: Of shrunk factors, before the lengths of the call.
_LENGTHS = (4, 16, 64, 256)
#: Limits of one check, over all arrays.
_MOST_ELEMENTS, _MOST_FLOPS = 1 << 22, 4e9


# ---- given values ----------------------------------------------------------------------------------------------------


def check_parts(eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> Iterator[tuple[str, int]]:
    """Cut each factor that may be split into parts, which must make `results` together.

    Yields the cut dimensions and the number of parts. Raises ShardingError if the rule is wrong.
    """
    factors = factors_of(eqn)
    for f, n in factors.smallest_splits():
        problem = _problem_of(eqn, factors, (f, n), operands, results)
        if problem:
            raise ShardingError(f"{_claim(eqn, factors, f)}, but {problem}.")
        yield _dims_text(factors, f), n


def _claim(eqn: JaxprEqn, factors: Factors, factor: int) -> str:
    """With the user's name of the factor, if any."""
    dims, rule, operation = _dims_text(factors, factor), rule_to_check(eqn), operation_name(eqn)
    if rule is None:
        return f"The sharding rule of `{operation}` allows splitting it along {dims} (array: dimension)"
    name = list(rule.named_factors(shapes_of(eqn.invars), shapes_of(eqn.outvars), operation).sizes)[factor]
    how = f", with its parts combined by {factors.reductions[factor]}" if factor in factors.reductions else ""
    return f"The sharding rule of `{operation}`, `{rule.text}`, allows splitting `{name}` ({dims}){how}"


def _dims_text(factors: Factors, factor: int) -> str:
    """`operand 0: 1, result 0: 1`."""
    found = [
        f"{kind} {i}: {d}"
        for kind, arrays in (("operand", factors.operands), ("result", factors.results))
        for i, dims in enumerate(arrays)
        for d, dim in enumerate(dims)
        if factor in dim
    ]
    return ", ".join(found)


def _problem_of(
    eqn: JaxprEqn, factors: Factors, split: tuple[int, int], operands: Sequence[Any], results: Sequence[Any]
) -> str:
    """How the results of the parts of `split` (factor, number of parts) differ from `results`, or ""."""
    factor, n = split
    shards = []
    for number in range(n):
        part = OperationPart(factor, number, n)
        cut_operands = [cut(x, dims, part) for x, dims in zip(operands, factors.operands, strict=True)]
        try:
            shards.append(_run(eqn, localize(eqn, factors, {factor: n}), cut_operands))
        except ShardingError:
            raise
        except Exception as error:
            return f"part {number} of {n} fails: {type(error).__name__}: {error}"

    for r, expected in enumerate(results):
        parts = [_as_numpy(shard[r]) for shard in shards]
        for found in wholes(parts, factors, factor, r):
            problem = _difference(found, _as_numpy(expected))
            if problem:
                return f"result {r} of {n} parts differs from the whole result: {problem}"
    return ""


def _as_numpy(array: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(array) if is_extended(array.dtype) else array)


def _difference(found: np.ndarray, expected: np.ndarray) -> str:
    """Empty for equal arrays."""
    if found.shape != expected.shape:
        return f"its shape is {found.shape} instead of {expected.shape}"
    if found.dtype != expected.dtype:
        return f"its dtype is {found.dtype} instead of {expected.dtype}"
    if not jnp.issubdtype(expected.dtype, np.inexact):
        return "" if np.array_equal(found, expected) else f"{np.sum(found != expected)} elements differ"

    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    one, other = found.astype(wide), expected.astype(wide)
    largest = float(np.max(np.abs(other), initial=0.0, where=np.isfinite(other)))
    tolerance = _TOLERANCES[min(expected.dtype.itemsize, 8)] * max(largest, 1e-30)
    is_same = np.isclose(one, other, rtol=0, atol=tolerance, equal_nan=True)
    if np.all(is_same):
        return ""
    return f"{np.sum(~is_same)} of {found.size} elements differ, by up to {np.nanmax(np.abs(one - other)):.3g}"


def _run(eqn: JaxprEqn, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    """On CPUs, Pallas interprets kernels."""
    devices = [x.devices() for x in operands if isinstance(x, jax.Array)]
    if all(device.platform == "cpu" for some in devices for device in some):
        params = {name: _with_interpreted_kernels(x) if isinstance(x, ClosedJaxpr) else x for name, x in params.items()}
    return eval_on_shards(eqn, operands, params)


@functools.lru_cache(maxsize=256)
def _with_interpreted_kernels(program: ClosedJaxpr) -> ClosedJaxpr:
    if not _has_kernel(program.jaxpr):
        return program
    flat = flatten_calls(program.jaxpr, tuple(program.consts))
    eqns = [
        with_each_body(_with_interpreted_kernels, eqn)
        if eqn.primitive.name != "pallas_call"
        else eqn.replace(params=dict(eqn.params, interpret=True))
        for eqn in flat.eqns
    ]
    body = program.jaxpr.replace(constvars=list(flat.constvars), eqns=eqns, outvars=list(flat.outvars))
    return ClosedJaxpr(body, list(flat.consts))


def _has_kernel(program: Any) -> bool:
    return any(eqn.primitive.name == "pallas_call" or any(map(_has_kernel, sub_jaxprs(eqn))) for eqn in program.eqns)


# ---- random values ---------------------------------------------------------------------------------------------------


def check_registered_rules(eqns: Iterable[JaxprEqn], *, on_default_device: bool) -> None:
    """Test the rules of users for equations, including loops and branches, once for each kind of equation.

    Tests run on the CPU; with `on_default_device`, kernels that fail there run on jax's default device. Raises
    ShardingError if a rule is wrong; warns if an operation runs on neither device.
    """
    for eqn in eqns:
        if rule_to_check(eqn) is not None:
            kind = kind_of(eqn)
            check = _why_unchecked_once if _can_be_hashed(kind) else _why_unchecked
            unchecked = check(kind, on_default_device)
            if unchecked:
                warn(unchecked)
        for body in sub_jaxprs(eqn):
            check_registered_rules(body.eqns, on_default_device=on_default_device)


def _why_unchecked(kind: RuleKey, on_default_device: bool) -> str:
    """Empty after a check. Raises ShardingError if the rule is wrong."""
    rule = rule_to_check(kind.eqn)
    assert rule is not None
    if not any(True for _ in factors_of(kind.eqn).smallest_splits()):
        return ""

    failure = "it is too large"
    for device in _devices(on_default_device):
        with _on_one_device(device, kind.eqn):
            has_run, problem = _check_on_small_arrays(kind.eqn, rule)
        if has_run and problem:
            raise ShardingError(
                f"{problem} A test on small random arrays found this. Correct the rule or `reductions`, or add the "
                "name to `need_replication`. If the operation does not take random values, test it with "
                "`minialpa.check_sharding_rule` on your values, and register it with `check=False`."
            )
        if has_run:
            return ""
        failure = problem or failure
    return (
        f"The sharding rule of `{operation_name(kind.eqn)}`, `{rule.text}`, is not tested, because the operation does "
        f"not run here ({failure}). Test it with `minialpa.check_sharding_rule` where it runs, and register it with "
        "`check=False`."
    )


_why_unchecked_once = cached(maxsize=4096)(_why_unchecked)


def _can_be_hashed(kind: RuleKey) -> bool:
    try:
        hash(kind)
    except TypeError:
        return False
    return True


def _devices(on_default_device: bool) -> Iterator[jax.Device]:
    with suppress(RuntimeError):  # `jax_platforms` may leave it out
        yield jax.devices("cpu")[0]
    if on_default_device and jax.default_backend() != "cpu":
        yield jax.devices()[0]


@contextmanager
def _on_one_device(device: jax.Device, eqn: JaxprEqn) -> Iterator[None]:
    """With the equation's settings and without jax's optional checks."""
    with (
        under_settings_of(eqn),
        jax.default_device(device),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        yield


def _check_on_small_arrays(eqn: JaxprEqn, rule: ShardingRule) -> tuple[bool, str]:
    """Whether an operation runs, and the fault of its rule or the reason why it does not run.

    The smallest sizes that run decide, unless the rule is wrong there: then the largest ones decide.
    """
    sizes = _sizes_to_try(eqn, rule)
    first = _first_that_runs(eqn, sizes)
    # Small sizes may be too small for the parts, such as one block of a kernel.
    return _first_that_runs(eqn, sizes[::-1]) if all(first) else first


def _first_that_runs(eqn: JaxprEqn, sizes: Iterable[tuple[Shapes, Shapes]]) -> tuple[bool, str]:
    failure = ""
    for operands, results in sizes:
        try:
            small = _with_shapes(eqn, operands, results)
            if factors_of(small).flops > _MOST_FLOPS:
                continue
            values, whole = _run_on_random_values(small)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            continue

        try:
            for _ in check_parts(small, values, whole):
                pass
        except ShardingError as error:
            return True, str(error)
        return True, ""
    return False, failure


def _sizes_to_try(eqn: JaxprEqn, rule: ShardingRule) -> list[tuple[Shapes, Shapes]]:
    """The smallest first."""
    named = rule.named_factors(shapes_of(eqn.invars), shapes_of(eqn.outvars), operation_name(eqn))
    given = {name for name, _ in rule.sizes}
    found: dict[tuple[Shapes, Shapes], int] = {}
    for most in (*_LENGTHS, max(named.sizes.values(), default=1)):
        # An operation may need the full length of blocked factors.
        for kept in (given, given | named.blocked()):
            sizes = {name: n if name in kept else _shrunk_length(n, most) for name, n in named.sizes.items()}
            shapes = _shapes(named.operands, sizes), _shapes(named.results, sizes)
            n_elements = sum(math.prod(shape) for some in shapes for shape in some)
            if n_elements <= _MOST_ELEMENTS:
                found[shapes] = n_elements
    return sorted(found, key=lambda shapes: found[shapes])


def _shrunk_length(n: int, most: int) -> int:
    """The largest divisor of n up to `most`, which most blocks fit, else `most`."""
    if n <= most:
        return n
    return next((d for d in range(most, 1, -1) if n % d == 0), most)


def _shapes(arrays: Sequence[tuple[Names, ...]], sizes: Mapping[str, int]) -> Shapes:
    # Dimensions of length 1 have no factors.
    return tuple(tuple(math.prod(sizes[name] for name in dim) for dim in dims) for dims in arrays)


def _with_shapes(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> JaxprEqn:
    """Raises if the operation does not map operands to results."""
    if (operands, results) == (shapes_of(eqn.invars), shapes_of(eqn.outvars)):
        return eqn
    local = localizer_of(eqn)
    params = dict(eqn.params) if local is None else local(eqn, operands, results)
    avals = [changed_aval(aval_of(atom), shape=shape) for atom, shape in zip(eqn.invars, operands, strict=True)]
    made = result_avals(eqn, avals, params)
    if shapes_of(made) != results:
        raise ShardingError(f"from shapes {list(operands)} it makes results of shapes {list(shapes_of(made))}")
    invars = [atom if is_literal(atom) else fresh_var(aval) for atom, aval in zip(eqn.invars, avals, strict=True)]
    small: JaxprEqn = eqn.replace(invars=invars, outvars=list(map(fresh_var, made)), params=params)
    return small


def _run_on_random_values(eqn: JaxprEqn) -> tuple[list[Any], list[Any]]:
    """Numbers of both signs if the results are finite."""
    signed = lambda rng, shape: rng.normal(size=shape)  # noqa: E731
    positive = lambda rng, shape: rng.uniform(0.1, 0.9, shape)  # noqa: E731
    for draw in (signed, positive):
        values = _random_operands(eqn, draw)
        results = _run(eqn, eqn.params, values)
        if all(np.all(np.isfinite(x)) for x in results if jnp.issubdtype(x.dtype, np.inexact)):
            break
    return values, results


def _random_operands(eqn: JaxprEqn, draw: Any) -> list[Any]:
    """Integers are less than every length: they may be positions."""
    rng = np.random.default_rng(0)
    most = min((n for shape in shapes_of(eqn.invars) for n in shape if n > 1), default=2)

    def value(atom: Any) -> Any:
        if is_literal(atom):
            return atom.val
        aval = aval_of(atom)
        shape, dtype = tuple(aval.shape), aval.dtype
        if is_extended(dtype):
            return _keys(shape, dtype)
        if jnp.issubdtype(dtype, np.complexfloating):
            return jnp.asarray(draw(rng, shape) + 1j * draw(rng, shape), dtype)
        if jnp.issubdtype(dtype, np.inexact):
            return jnp.asarray(draw(rng, shape), dtype)
        return jnp.asarray(rng.integers(0, 2 if dtype == np.bool_ else most, shape), dtype)

    return list(map(value, eqn.invars))


def _keys(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    found: list[Any] = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), jax.ShapeDtypeStruct(shape, dtype))
    key = jax.random.key(0, impl=found[0])
    return jax.random.split(key, shape) if shape else key
