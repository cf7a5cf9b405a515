"""Every dtype in every place of a step, in one process, equals `jax.jit`, also in its weak type."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import ShardParallel, TraceError, Zero2Parallel
from tests.dtypes import DTYPES, KEYS, N, as_argument, as_result, as_state, described, values
from tests.helpers import METHODS

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")  # of 64 bits

X = np.arange(N, dtype=np.float32)


def check(step: Any, *args: Any, method: str) -> None:
    assert described(minialpa.parallelize(step, method=METHODS[method])(*args)) == described(jax.jit(step)(*args))


@pytest.mark.parametrize("name", ["bool", "int2", "float8_e8m0fnu", "rbg"])
@pytest.mark.parametrize("x64", [False, True])
def test_a_dtype_is_argument_state_and_result_as_jit_has_it(name: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        for given in (values(name), jnp.asarray(values(name))):
            check(as_argument, np.float32(1), given, method="shard")
            check(as_state, given, X, method="shard")
        check(as_result((name,)), np.uint32(3), X, method="shard")


@pytest.mark.filterwarnings("ignore:The layers of this pipeline end at:UserWarning")
@pytest.mark.parametrize("method", ["shard", "pipeline"])
def test_all_dtypes_at_once(method: str) -> None:
    given = {name: values(name) for name in (*DTYPES, *KEYS)}
    check(as_state, given, X, method=method)
    check(as_result((*DTYPES, *KEYS)), np.uint32(3), X, method=method)
    step = minialpa.parallelize(as_state, method=METHODS[method])
    state = step(step(given, X)[0], X)[0]
    assert described(state) == described(jax.jit(lambda x: x)(given))


@pytest.mark.parametrize("dtype", ["int8", "complex64"])
def test_results_of_python_numbers_stay_weak_from_call_to_call(dtype: str) -> None:
    def step(state: Any, x: jax.Array) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return {name: value * 2 for name, value in state.items()}, [x * value for value in state.values()]

    x = np.ones(N, jnp.dtype(dtype))
    parallel, reference = minialpa.parallelize(step), jax.jit(step)
    states: list[Any] = [{"i": 1, "f": 1.5, "c": 1j}] * 2
    for _ in range(3):
        results = [fun(state, x) for fun, state in zip((parallel, reference), states, strict=True)]
        assert described(results[0]) == described(results[1])
        weak = [jax.tree.map(lambda leaf: leaf.weak_type, result) for result in results]
        assert weak[0] == weak[1]
        states = [result[0] for result in results]
    assert len(parallel._executables) == 1
    strong = {"i": np.int32(3), "f": np.float32(1), "c": np.complex64(1)}
    assert described(parallel(strong, x)) == described(reference(strong, x))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.ones(N, ">f4"), r"byte order is not native.*astype\('float32'\)"),
        (np.array([b"a"]), "strings"),
        (np.array(["a"], np.dtypes.StringDType()), "strings"),
        (np.zeros(N, [("x", "<f4"), ("y", "<i4")]), r"structured dtype.*x\['x'\]"),
        (np.zeros(N, "V4"), "no such arrays"),
        (np.array([None]), "no such arrays"),
        (np.zeros(N, "m8[s]"), "times"),
        (np.ones(N, np.longdouble), r"wider than any dtype of jax.*astype\('float64'\)"),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, np.ndarray) else "",
)
def test_an_array_that_jax_does_not_take_is_refused_by_what_it_is(array: Any, reason: str) -> None:
    step = minialpa.parallelize(as_argument)
    with pytest.raises(TypeError):
        jax.jit(lambda x: x)(array)
    for _ in range(2):
        for given in ({"field": array}, array):
            with pytest.raises(TraceError, match=reason):
                step(np.float32(1), given)
        assert float(step(np.float32(1), X)) == 1 + X.sum()


def _narrowed(params: Any, batch: Any) -> Any:
    """Sums over examples in a narrower dtype: in the step itself, and in the derivative of a scan."""
    narrow = params["w"].dtype

    def loss(params: Any) -> Any:
        scale = params["scale"]
        total = jnp.sum(batch["x"][:, None] * scale[None], 0).astype(narrow).astype(np.float32)
        rows, _ = jax.lax.scan(lambda h, w: (h + batch["x"] * w.astype(np.float32), None), batch["x"], params["w"])
        return jnp.sum(total) + jnp.sum(rows)

    value, gradients = minialpa.value_and_grad(loss)(params)
    return jax.tree.map(jnp.add, params, gradients), value


@pytest.mark.parametrize(
    ("method", "dtype"), [(ShardParallel(num_micro_batches=4), "float16"), (Zero2Parallel(None, 2), "bfloat16")]
)
def test_a_sum_is_made_narrower_after_it_is_complete(method: Any, dtype: str) -> None:
    """Partial sums overflow float16, and lose their last digits in bfloat16."""
    params = {"scale": np.ones(8, np.float32), "w": np.zeros(2, dtype)}
    batch = {"x": np.array([40001, 40002, 40003, 40004] * 2 + [-40000] * 8, np.float32)}
    found = minialpa.parallelize(_narrowed, method=method, batch_argnums=1)(params, batch)
    assert described(found) == described(jax.jit(_narrowed)(params, batch))
