"""Every reduction of jax as a function of an array and an axis, steps with many of them, and the verdict on each."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import minialpa
from minialpa.methods import Method
from tests.dtypes import numpy_dtype

N, WIDTH = 8, 8
#: Without `jax_enable_x64`, 64 bits become 32.
DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (4, 8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
)
#: (array, axis) -> array. An axis of None is both.
Reduction = Callable[[Any, int | None], Any]


def _axes(x: Any, axis: int | None) -> tuple[int, ...]:
    return (0, 1) if axis is None else (axis,)


def _rows(x: Any, axis: int | None) -> tuple[Any, int]:
    """The array and an axis of it; a vector for None."""
    return (x.reshape(-1), 0) if axis is None else (x, axis)


def _reducer(combine: Callable[[Any, Any], Any], identity: Callable[[Any], Any]) -> Reduction:
    return lambda x, axis: lax.reduce(x, jnp.asarray(identity(x.dtype), x.dtype), combine, _axes(x, axis))


def _least(dtype: Any) -> Any:
    if dtype == np.bool_:
        return False
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, np.integer) else -jnp.inf


def _along(fun: Callable[..., Any]) -> Reduction:
    def reduce(x: Any, axis: int | None) -> Any:
        x, axis = _rows(x, axis)
        return fun(x, axis=axis)

    return reduce


def _of_first(fun: Callable[[Any], Any]) -> Reduction:
    """A function of the array with the axis first."""
    return _along(lambda x, axis: fun(jnp.moveaxis(x, axis, 0)))


def _by_index(method: str) -> Reduction:
    """Updates at indices, several of which are equal."""
    start = lambda x: jnp.full((3, *x.shape[1:]), 1, x.dtype)  # noqa: E731
    return _of_first(lambda x: getattr(start(x).at[jnp.arange(x.shape[0]) % 3], method)(x))


def _by_segment(fun: Callable[..., Any]) -> Reduction:
    return _of_first(lambda x: fun(x, jnp.arange(x.shape[0]) % 3, 4))


def _scanned(combine: Callable[[Any, Any], Any]) -> Reduction:
    body = lambda total, row: (combine(total, row), None)  # noqa: E731
    return _of_first(lambda x: lax.scan(body, jnp.ones_like(x[0]), x)[0])


def _windows(init: Callable[[Any], Any], combine: Callable[..., Any]) -> Reduction:
    def reduce(x: Any, axis: int | None) -> Any:
        window = tuple(2 if i in _axes(x, axis) else 1 for i in range(x.ndim))
        return lax.reduce_window(x, jnp.asarray(init(x.dtype), x.dtype), combine, window, window, "VALID")

    return reduce


def _dot(x: Any, axis: int | None) -> Any:
    match axis:
        case 0:
            return jnp.einsum("bi,bj->ij", x, x)
        case 1:
            return jnp.einsum("bi,ci->bc", x, x[:3])
    return jnp.einsum("bi,bi->", x, x)


_OF_NUMPY = (
    *("sum", "prod", "max", "min", "any", "all", "argmax", "argmin", "mean", "var", "std", "median", "ptp"),
    *("count_nonzero", "nansum", "nanprod", "nanmax", "nanmin", "nanmean", "nanargmax"),
)
_INDEXED = ("add", "subtract", "multiply", "max", "min", "set")
_SCANS = {"add": operator.add, "mul": operator.mul, "max": jnp.maximum, "xor": operator.xor}


def _of_numpy(name: str) -> Reduction:
    return lambda x, axis: getattr(jnp, name)(x, axis)


def _of_bits(name: str) -> Reduction:
    return lambda x, axis: getattr(jnp, f"bitwise_{name}").reduce(x, axis=axis)


def _of_lax(name: str) -> Reduction:
    return lambda x, axis: getattr(lax, f"reduce_{name}")(x, _axes(x, axis))


REDUCTIONS: dict[str, Reduction] = {
    **{name: _of_numpy(name) for name in _OF_NUMPY},
    "sum of its dtype": lambda x, axis: jnp.sum(x, axis, dtype=x.dtype),
    "prod of its dtype": lambda x, axis: jnp.prod(x, axis, dtype=x.dtype),
    **{f"bitwise {name}": _of_bits(name) for name in ("and", "or", "xor")},
    **{f"lax.reduce {name}": _of_lax(name) for name in ("and", "or", "xor")},
    "logsumexp": lambda x, axis: jax.nn.logsumexp(x, axis),
    "quantile": lambda x, axis: jnp.quantile(x, jnp.float32(0.3), axis),
    "top_k": lambda x, axis: lax.top_k(jnp.moveaxis(*_rows(x, axis), -1), 2)[0],
    "norm": lambda x, axis: jnp.linalg.norm(x, axis=axis),
    **{name: _along(getattr(jnp, name)) for name in ("sort", "argsort", "cumsum", "cumprod")},
    **{name: _along(getattr(lax, name)) for name in ("cummax", "cummin", "cumlogsumexp")},
    "associative_scan": _along(lambda x, axis: lax.associative_scan(jnp.add, x, axis=axis)),
    "lax.reduce by add": _reducer(lax.add, lambda dtype: 0),
    "lax.reduce by mul": _reducer(lax.mul, lambda dtype: 1),
    "lax.reduce by max": _reducer(lax.max, _least),
    "lax.reduce by or": _reducer(lax.bitwise_or, lambda dtype: 0),
    "lax.reduce by xor": _reducer(lax.bitwise_xor, lambda dtype: 0),
    "lax.reduce from three": _reducer(lax.add, lambda dtype: 3),
    "lax.reduce by a function": _reducer(lambda a, b: a * b + a + b, lambda dtype: 0),
    "windows by add": _windows(lambda dtype: 0, lax.add),
    "windows by max": _windows(_least, lax.max),
    "windows by mul": _windows(lambda dtype: 1, lax.mul),
    **{
        name: _by_segment(getattr(jax.ops, name))
        for name in ("segment_sum", "segment_prod", "segment_max", "segment_min")
    },
    **{f"at {name}": _by_index(name) for name in _INDEXED},
    "bincount": lambda x, axis: jnp.bincount(x.reshape(-1), length=5),
    "histogram": lambda x, axis: jnp.histogram(x, 4, (-2, 2))[0],
    "einsum": _dot,
    "einsum to 32 bits": lambda x, axis: jnp.einsum("bi,bj->ij", x, x, preferred_element_type=jnp.int32),
    **{f"scan of {name}": _scanned(combine) for name, combine in _SCANS.items()},
    "fori_loop": lambda x, axis: lax.fori_loop(0, x.shape[0], lambda i, a: a + x[i], jnp.zeros_like(x[0])),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A reduction of an array (N, WIDTH) of a dtype.

    of: the batch, activations or weights, which are also a state that the step replaces with the reduction. axis: the
    axis of the examples, 0, the other one, or None for both.
    """

    name: str
    dtype: str
    of: str = "batch"
    axis: int | None = 0


def values(name: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Integers of all sizes, of which products wrap around; floats with exact sums, among them -0, inf and NaN."""
    rng, dtype = np.random.default_rng(seed), numpy_dtype(name)
    if name == "bool":
        return rng.random((N, WIDTH)) < 0.7
    if "int" in name:
        info = ml_dtypes.iinfo(dtype)
        kind = np.uint64 if int(info.min) == 0 else np.int64
        drawn = rng.integers(int(info.min), int(info.max), (N, WIDTH), kind, endpoint=True)
        # Products of odd numbers are never zero.
        return np.where(np.arange(WIDTH) < 2, drawn, drawn | kind(1)).astype(dtype)
    x = rng.choice([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], (N, WIDTH))
    x[:, 1] = rng.choice([0.0, -0.0], N)
    if name == "complex64":  # products of complex infinities depend on their order
        x = x + 1j * x[:, ::-1]
        x[N // 2, 2] = np.nan
        return x.astype(dtype)
    x[N // 2, 2], x[1, 3], x[N - 1, 4] = np.nan, np.inf, -np.inf
    return x.astype(dtype)


def make_step(cases: Sequence[Case]) -> Callable[[Any, Any], Any]:
    """A training step of two layers, (state, batch) -> (state, (loss, results)), with a result for each case."""

    def step(state: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            h = jnp.tanh(batch["h"] @ w[0])
            minialpa.mark_pipeline_boundary()
            found = [REDUCTIONS[case.name](_operand(case, state, batch), case.axis) for case in cases]
            return jnp.mean((h @ w[1]) ** 2), found

        (value, found), grads = minialpa.value_and_grad(loss, has_aux=True)(state["w"])
        w = [w - np.float32(0.1) * g for w, g in zip(state["w"], grads, strict=True)]
        return {**state, "w": w, "count": {k: _added(v, batch["x"][k]) for k, v in state["count"].items()}}, (
            value,
            found,
        )

    return step


def _operand(case: Case, state: Any, batch: Any) -> Any:
    x, s = batch["x"][case.dtype], state["s"][case.dtype]
    return {"batch": x, "weights": s, "activation": x ^ s if x.dtype == np.bool_ else x + s}[case.of]


def _added(count: Any, x: Any) -> Any:
    """A running count, of booleans a running parity."""
    if x.dtype == np.bool_:
        return count ^ jnp.bitwise_xor.reduce(x, axis=0)
    return count + jnp.sum(x, 0, dtype=x.dtype)


def make_args(cases: Sequence[Case]) -> tuple[Any, Any]:
    rng, dtypes = np.random.default_rng(1), sorted({case.dtype for case in cases})
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    state = {
        "w": [draw(WIDTH, WIDTH), draw(WIDTH, WIDTH)],
        "s": {name: values(name, seed=2) for name in dtypes},
        "count": {name: values(name, seed=3)[0] for name in dtypes},
    }
    return state, {"h": draw(N, WIDTH), "x": {name: values(name) for name in dtypes}}


# ---- verdicts -------------------------------------------------------------------------------------------------------


def verdicts(cases: Sequence[Case], method: Method) -> dict[Case, str]:
    """For each case that `jax.jit` accepts: `equal`, the difference, or the reason of a refusal."""
    if not cases:
        return {}
    step, args = make_step(cases), make_args(cases)
    try:
        expected = jax.block_until_ready(jax.jit(step)(*args))
        found = minialpa.parallelize(step, method=method, batch_argnums=(1,), donate_argnums=())(*args)
    except Exception as error:
        if len(cases) > 1:
            half = len(cases) // 2
            return verdicts(cases[:half], method) | verdicts(cases[half:], method)
        return {cases[0]: f"refused: {error}"} if isinstance(error, minialpa.MinialpaError) else _crash(cases[0], error)

    made = {case: _difference(*pair) for case, *pair in zip(cases, expected[1][1], found[1][1], strict=True)}
    for name in expected[0]["count"]:
        text = _difference(expected[0]["count"][name], found[0]["count"][name])
        assert not text, f"running count of {name}: {text}"
    return {case: text or "equal" for case, text in made.items()}


def _crash(case: Case, error: Exception) -> dict[Case, str]:
    """The crash of a case; empty if `jax.jit` fails, too."""
    try:
        jax.block_until_ready(jax.jit(make_step([case]))(*make_args([case])))
    except Exception:
        return {}
    return {case: f"crash: {error!r}"}


def _difference(expected: Any, found: Any) -> str:
    a, b = np.asarray(expected), np.asarray(found)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"wrong: {b.dtype}{b.shape} in place of {a.dtype}{a.shape}"
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return "" if np.array_equal(a, b) else f"wrong: {b} in place of {a}"
    wide = [x.astype(np.complex128) for x in (a, b)]
    # Large terms of a mean may cancel.
    rounding = 8 * float(jnp.finfo(a.dtype).eps)
    largest = np.abs(wide[0], where=np.isfinite(wide[0]), out=np.zeros(a.shape)).max(initial=1)
    close = np.allclose(*wide, rtol=rounding, atol=rounding * float(largest), equal_nan=True)
    return "" if close else f"wrong: {b} in place of {a}"


def taken(cases: Sequence[Case]) -> list[Case]:
    """The cases that jax traces."""

    def is_taken(case: Case) -> bool:
        try:
            jax.eval_shape(make_step([case]), *make_args([case]))
        except (TypeError, ValueError):
            return False
        return True

    return [case for case in cases if is_taken(case)]
