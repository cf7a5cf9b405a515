"""Laws of rules, and equations with the values of every array for checking them.

Halving: a factor is split in two, each half is computed with local parameters, and the joined halves equal the whole.
Position: the same holds for positional factors, also for several at once, if each part knows its number.
Linearity: if a rule calls an equation linear, f(a + b) = f(a) + f(b).
Structure: factors multiply to shapes, and each factor is in operands and results, or reduced.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from minialpa.rules.factors import Dims, Factors
from minialpa.rules.known_rules import factors_of
from minialpa.rules.rule_check import OperationPart, cut, wholes
from minialpa.rules.shards import localize, run_shard


@dataclass(frozen=True)
class Case:
    """An equation with the values of its operands and results."""

    eqn: JaxprEqn
    operands: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True)
class Job:
    """An equation to compute, with other operands and parameters than its own."""

    eqn: JaxprEqn
    operands: Sequence[Any]
    params: Mapping[str, Any]


@dataclass(frozen=True)
class _PartsJob:
    """All parts of an equation, by position.

    Attributes:
        n_splits: number of parts along each factor that is split.
        parts: for each part its number along each of these factors, and its operands.
    """

    eqn: JaxprEqn
    n_splits: Mapping[int, int]
    parts: Sequence[tuple[Mapping[int, np.int32], Sequence[Any]]]


def bind(job: Job) -> tuple[Any, ...]:
    results = job.eqn.primitive.bind(*job.operands, **job.params)
    return tuple(results) if job.eqn.primitive.multiple_results else (results,)


def compute(jobs: Sequence[Job]) -> list[tuple[Any, ...]]:
    """The results of each job; numpy arrays, except for keys."""

    # One compilation for all jobs: compilation is most of the time of these tests.
    def run(operands: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        return [bind(replace(job, operands=values)) for job, values in zip(jobs, operands, strict=True)]

    return jax.tree.map(_to_host, jax.jit(run)([list(job.operands) for job in jobs]))


def compute_parts(jobs: Sequence[_PartsJob]) -> list[list[tuple[Any, ...]]]:
    """For each job the results of each part; numpy arrays, except for keys."""

    # One program for all parts, with the number of each part as an argument as on devices, compiles fast, too.
    def run(stacked: Sequence[Any]) -> list[Any]:
        return [_run_parts(job, parts) for job, parts in zip(jobs, stacked, strict=True)]

    stacked = [jax.tree.map(lambda *xs: jnp.stack(xs) if is_key(xs[0]) else np.stack(xs), *job.parts) for job in jobs]
    computed = jax.tree.map(_to_host, jax.jit(run)(stacked))
    return [
        [tuple(x[i] for x in results) for i in range(len(job.parts))]
        for job, results in zip(jobs, computed, strict=True)
    ]


def _run_parts(job: _PartsJob, stacked: Any) -> tuple[Any, ...]:
    def one(part: tuple[Mapping[int, Any], Sequence[Any]]) -> tuple[Any, ...]:
        numbers, operands = part
        return tuple(run_shard(job.eqn, factors_of(job.eqn), operands, job.n_splits, numbers))

    return jax.lax.map(one, stacked)


def is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _to_host(x: Any) -> Any:
    return x if is_key(x) else np.asarray(x)


def equations_of(jaxpr: Any) -> Iterator[JaxprEqn]:
    """The equations of an inlined jaxpr, in order."""
    for eqn in jaxpr.eqns:
        inner = _inner_jaxpr(eqn)
        if inner is None:
            yield eqn
        else:
            yield from equations_of(getattr(inner, "jaxpr", inner))


def _inner_jaxpr(eqn: JaxprEqn) -> Any | None:
    """The jaxpr of a call, which the planner inlines. `reduce_window` and others have jaxprs and are not calls."""
    if eqn.primitive.name not in ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"):
        return None
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def _flat_cases(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], out: list[Any]) -> Iterator[Case]:
    """One case for each equation of an inlined jaxpr, in order; the results of the jaxpr are appended to `out`."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = tuple(read(v) for v in eqn.invars)
        inner = _inner_jaxpr(eqn)
        if inner is None:
            results = bind(Job(eqn, operands, eqn.params))
            yield Case(eqn, operands, results)
        else:
            inner_results: list[Any] = []
            closed = (getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()))
            yield from _flat_cases(*closed, operands, inner_results)
            results = tuple(inner_results)
        env.update(zip(eqn.outvars, results, strict=True))
    out.extend(read(v) for v in jaxpr.outvars)


def _signature(case: Case) -> str:
    arrays = [f"{x.dtype}{x.shape}" for x in case.operands]
    return f"{case.eqn.primitive.name} {arrays} {case.eqn.params}"


def cases_of(fun: Callable[..., Any], *arguments: Any) -> tuple[Case, ...]:
    """The cases of a function, each different equation once."""
    closed = jax.make_jaxpr(fun)(*arguments)
    found: dict[str, Case] = {}

    def run(*arguments: Any) -> list[tuple[Any, ...]]:
        found.update((_signature(case), case) for case in _flat_cases(closed.jaxpr, closed.consts, arguments, []))
        return [(case.operands, case.results) for case in found.values()]

    values = jax.tree.map(_to_host, jax.jit(run)(*arguments))
    return tuple(Case(case.eqn, *arrays) for case, arrays in zip(found.values(), values, strict=True))


def cases_of_all(programs: Sequence[tuple[Callable[..., Any], Sequence[Any]]]) -> tuple[Case, ...]:
    """The cases of several functions, run as one program, which compiles in less time."""
    leaves, tree = jax.tree.flatten([tuple(arguments) for _, arguments in programs])

    def run(*leaves: Any) -> list[Any]:
        return [fun(*arguments) for (fun, _), arguments in zip(programs, tree.unflatten(leaves), strict=True)]

    return cases_of(run, *leaves)


def only(fun: Callable[..., Any], *arguments: Any) -> JaxprEqn:
    """The last equation of a function."""
    return list(equations_of(jax.make_jaxpr(fun)(*arguments).jaxpr))[-1]


def vjp(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients with respect to all arguments; the cotangents are the results."""

    def gradients(*arguments: Any) -> Any:
        results, pull_back = jax.vjp(fun, *arguments)
        return pull_back(results)

    return gradients


def _operands_of_half(case: Case, factors: Factors, factor: int, half: int) -> list[Any]:
    """Halves of the operands. An addend of a sum that lacks the factor goes only to the first half."""
    arrays = []
    for i, (x, dims) in enumerate(zip(case.operands, factors.operands, strict=True)):
        is_added_to = half == 1 and factors.takes_part_once(factor, i)
        arrays.append(np.zeros_like(x) if is_added_to else cut(x, dims, OperationPart(factor, half, 2)))
    return arrays


def _numbers(x: Any) -> np.ndarray:
    """Values to compare; bfloat16 as float32, keys as the integers they consist of."""
    x = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    return x.astype(np.float32) if x.dtype == jnp.bfloat16 else x


def _joined(factors: Factors, factor: int, result: int, parts: Sequence[np.ndarray]) -> np.ndarray:
    whole, *others = wholes(parts, factors, factor, result)
    for other in others:
        np.testing.assert_array_equal(whole, other)
    return whole


def check_halving(found: Sequence[Case]) -> None:
    """Checks the halving law for every factor that may be split in any of the equations."""
    todo = [
        (case, factors, f)
        for case in found
        for factors in [factors_of(case.eqn)]
        for f in factors.splittable
        if factors.may_split(f, 2)
    ]
    jobs = [
        Job(case.eqn, _operands_of_half(case, factors, f, half), localize(case.eqn, factors, {f: 2}))
        for case, factors, f in todo
        for half in (0, 1)
    ]
    computed = compute(jobs)
    for (case, factors, f), first, second in zip(todo, computed[::2], computed[1::2], strict=True):
        for r, (expected, *halves) in enumerate(zip(case.results, first, second, strict=True)):
            joined = _joined(factors, f, r, [_numbers(half) for half in halves])
            message = f"factor {f} of {case.eqn}: {notation(case.eqn)}"
            np.testing.assert_allclose(joined, _numbers(expected), rtol=2e-4, atol=2e-5, err_msg=message)


def _shard(x: Any, dims: Dims, n_splits: Mapping[int, int], numbers: Mapping[int, np.int32]) -> Any:
    """The shard of an array. Positional factors have their own dimensions."""
    for f, number in numbers.items():
        x = cut(x, dims, OperationPart(f, int(number), n_splits[f]))
    return x


def _assembled(factors: Factors, n_splits: Mapping[int, int], shards: np.ndarray, result: int) -> np.ndarray:
    """The whole result. `shards`: an array of arrays, with an axis for each split factor."""
    for f in reversed(n_splits):
        joined = np.empty(shards.shape[:-1], object)
        for i in np.ndindex(*joined.shape):
            joined[i] = _joined(factors, f, result, list(shards[i]))
        shards = joined
    return np.asarray(shards[()])


_MANY_PARTS = 24


def _splits_by_position(factors: Factors) -> Iterator[dict[int, int]]:
    """Each positional factor in its fewest parts and in many; and all of them in their fewest parts."""
    fewest = {}
    for f in sorted(factors.positional):
        counts = [n for n in range(2, factors.sizes[f] + 1) if factors.on_mesh().may_split(f, n)]
        fewest[f] = counts[0]
        many = max(n for n in counts if n <= max(_MANY_PARTS, counts[0]))
        yield from ({f: n} for n in {counts[0], many})
    if len(fewest) > 1:
        yield fewest


def check_positions(found: Sequence[Case]) -> int:
    """Checks the law of positions for all positional factors. Returns the number of ways of splitting them."""
    todo = [(case, splits) for case in found for splits in _splits_by_position(factors_of(case.eqn))]
    jobs = [_parts_job(case, n_splits) for case, n_splits in todo]
    for (case, n_splits), parts in zip(todo, compute_parts(jobs) if jobs else [], strict=True):
        for r, expected in enumerate(case.results):
            shards = np.empty(len(parts), object)
            for i, results in enumerate(parts):
                shards[i] = _numbers(results[r])
            whole = _assembled(factors_of(case.eqn), n_splits, shards.reshape(tuple(n_splits.values())), r)
            np.testing.assert_array_equal(whole, _numbers(expected), err_msg=f"{n_splits} of {notation(case.eqn)}")
    return len(todo)


def _parts_job(case: Case, n_splits: Mapping[int, int]) -> _PartsJob:
    parts = []
    for place in itertools.product(*map(range, n_splits.values())):
        numbers = {f: np.int32(i) for f, i in zip(n_splits, place, strict=True)}
        operands = zip(case.operands, factors_of(case.eqn).operands, strict=True)
        parts.append((numbers, [_shard(x, dims, n_splits, numbers) for x, dims in operands]))
    return _PartsJob(case.eqn, n_splits, parts)


def check_structure(case: Case) -> None:
    factors = factors_of(case.eqn)
    pairs = [*zip(factors.operands, case.operands, strict=True), *zip(factors.results, case.results, strict=True)]
    for dims, array in pairs:
        assert factors.shape(dims, {}) == array.shape, (case.eqn, dims, array.shape)
    in_results = {f for dims in factors.results for dim in dims for f in dim}
    in_operands = {f for dims in factors.operands for dim in dims for f in dim}
    assert factors.positional <= factors.blocked, case.eqn
    assert {f for f, _ in factors.unaffected | factors.counted_once} <= set(factors.reductions), case.eqn
    # A reduced factor is missing in some result.
    for f in factors.reductions:
        assert any(not any(f in dim for dim in dims) for dims in factors.results), case.eqn
    # A factor of operands alone is lost unless it is combined.
    assert in_operands - in_results <= {*factors.reductions, *factors.blocked} | _ones(factors), case.eqn


def _ones(factors: Factors) -> set[int]:
    return {f for f, size in enumerate(factors.sizes) if size == 1}


def _random_like(x: Any, rng: np.random.Generator) -> np.ndarray:
    if jnp.issubdtype(x.dtype, np.integer):
        return rng.integers(0, 5, x.shape).astype(x.dtype)
    values = rng.standard_normal(x.shape)
    return (values + 1j * rng.standard_normal(x.shape) if np.iscomplexobj(x) else values).astype(x.dtype)


def check_linearity(found: Sequence[Case], rng: np.random.Generator) -> None:
    """Checks f(a + b) = f(a) + f(b), other operands fixed, for all groups of operands that a rule calls linear."""
    todo = [(case, group) for case in found for group in _linear_groups(factors_of(case.eqn))]
    jobs = []
    for case, group in todo:
        a, b = ({i: _random_like(case.operands[i], rng) for i in group} for _ in range(2))
        for changed in (a, b, {i: a[i] + b[i] for i in group}):
            operands = [changed.get(i, x) for i, x in enumerate(case.operands)]
            jobs.append(Job(case.eqn, operands, case.eqn.params))
    computed = compute(jobs)
    for (case, group), *triple in zip(todo, computed[::3], computed[1::3], computed[2::3], strict=True):
        is_short = any(x.dtype == jnp.bfloat16 for x in (*case.operands, *case.results))
        for of_a, of_b, of_sum in zip(*(map(_numbers, results) for results in triple), strict=True):
            tolerance = (0.1 if is_short else 1e-4) * max(1.0, float(np.nanmax(np.abs(of_sum), initial=0.0)))
            np.testing.assert_allclose(of_a + of_b, of_sum, atol=tolerance, err_msg=f"{case.eqn} in {group}")


def _linear_groups(factors: Factors) -> list[tuple[int, ...]]:
    """Groups of operands in which, taken together, the equation is linear."""
    if factors.linear == "each":
        return [(i,) for i in factors.linear_operands]
    return [factors.linear_operands] if factors.linear == "joint" else []


def notation(eqn: JaxprEqn) -> str:
    """Factors as text, `[a b], [b c] -> [a c] sum(b)`.

    Capitals are blocked, `A'` is blocked but positional or shifted, 1 is a dimension without a factor.
    """
    factors, letters = factors_of(eqn), {}  # type: ignore[var-annotated]

    def letter(f: int) -> str:
        n = len(letters)
        name = letters.setdefault(f, string.ascii_lowercase[n % 26] + str(n // 26 or ""))
        return str(name.upper() + "'" * (f in {*factors.positional, *factors.shifts}) if f in factors.blocked else name)

    def dim(factor_ids: Sequence[int]) -> str:
        names = [letter(f) for f in factor_ids if factors.sizes[f] != 1]
        return "1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"

    def side(arrays: Sequence[Dims]) -> str:
        return ", ".join("[" + " ".join(dim(d) for d in dims) + "]" for dims in arrays)

    text = f"{side(factors.operands)} -> {side(factors.results)}"
    reduced = [f"{how}({letters[f]})" for f, how in factors.reductions.items() if f in letters]
    return " ".join([text, *reduced])


def check_all(found: Sequence[Case]) -> None:
    """Checks all laws but linearity."""
    check_halving(found)
    check_positions(found)
    for case in found:
        check_structure(case)
