"""Steps as people write them: the recognised batch arguments, and arguments that libraries make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import minialpa
from minialpa import DataParallel, PipeshardParallel, ShardParallel, TraceError
from minialpa.testing import assert_allclose
from tests.plans import N_EXAMPLES, WIDTH, make_params

Arrays = dict[str, Any]


pytestmark = pytest.mark.usefixtures("fresh_session")


@pytest.fixture(autouse=True)
def _promotion_as_users_have_it() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


def make_x(n: int = N_EXAMPLES, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, WIDTH), np.float32)


def make_y(n: int = N_EXAMPLES) -> np.ndarray:
    return make_x(n, seed=2)


def forward(params: Arrays, x: Any) -> jax.Array:
    h = jnp.tanh(x @ params["w"])
    minialpa.mark_pipeline_boundary()
    return h @ params["v"]


def loss_of(params: Arrays, x: Any, y: Any) -> jax.Array:
    return jnp.mean((forward(params, x) - y) ** 2)


OPTIMIZER = optax.adam(1e-2)


Loss = Callable[[Any], jax.Array]


def descend(params: Arrays, loss: Loss) -> Any:
    value, grads = minialpa.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def by_adam(params: Arrays, opt_state: Any, loss: Loss) -> Any:
    value, grads = minialpa.value_and_grad(loss)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, value


def two_arrays(params: Arrays, x: Any, y: Any) -> Any:
    return descend(params, lambda p: loss_of(p, x, y))


def with_key(params: Arrays, opt_state: Any, batch: Arrays, key: jax.Array) -> Any:
    x = jnp.where(jax.random.bernoulli(key, 0.5, batch["x"].shape), batch["x"], 0.0)
    return by_adam(params, opt_state, lambda p: loss_of(p, x, batch["y"]))


def batch_first(batch: Arrays, params: Arrays) -> Any:
    return two_arrays(params, batch["x"], batch["y"])


def predict(params: Arrays, x: Any, scale: Any) -> Any:
    return forward(params, x) * scale


def class_weights(params: Arrays, batch: Arrays, weights: Any) -> Any:
    wanted = weights[None] * jax.nn.softmax(batch["y"])
    return descend(params, lambda p: -jnp.mean(jax.nn.log_softmax(forward(p, batch["x"])) * wanted))


def contrastive(params: Arrays, opt_state: Any, batch: Arrays) -> Any:
    def loss(p: Arrays) -> jax.Array:
        logits = forward(p, batch["x"]) @ forward(p, batch["y"]).T
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))

    return by_adam(params, opt_state, loss)


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), tree)


BATCH = {"x": make_x(), "y": make_y()}
FOUND: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]] = {
    "key": (with_key, (make_params(), OPTIMIZER.init(make_params()), BATCH, jax.random.key(3)), ("batch",)),
    "batch first": (batch_first, (BATCH, make_params()), ("batch",)),
    "predictions of the shape of x": (predict, (make_params(), make_x(), jnp.float32(2)), ("x",)),
    "as many examples as rows": (two_arrays, (make_params(), make_x(WIDTH), make_y(WIDTH)), ("x", "y")),
    "weights of classes": (class_weights, (make_params(), BATCH, jnp.ones(WIDTH)), ("batch",)),
    "examples that mix": (contrastive, (make_params(), OPTIMIZER.init(make_params()), BATCH), ("batch",)),
}


@pytest.mark.parametrize(("step", "args", "found"), FOUND.values(), ids=FOUND)
def test_the_batch_is_found(step: Callable[..., Any], args: Any, found: tuple[str, ...]) -> None:
    method = ShardParallel(jax.local_devices()[:2])
    assert minialpa.parallelize(step, method=method).plan(*shapes(args)).batch == found


def test_micro_batches_are_cut_from_the_batch_that_was_found() -> None:
    args, y = (make_params(), make_x()), make_y()
    method = ShardParallel(jax.local_devices()[:2], num_micro_batches=2)
    parallel = minialpa.parallelize(two_arrays, method=method, donate_argnums=())
    assert_allclose(parallel(*args, y=y), two_arrays(*args, y), rtol=1e-4, atol=1e-5)
    assert "Batch: arguments `x`, `y` (16 examples)" in parallel.plan(*args, y=y).summary().splitlines()


def test_errors_of_examples_name_the_batch_that_was_found() -> None:
    args = make_params(), make_x(10), make_y(10)
    method = ShardParallel(num_micro_batches=4)
    with pytest.raises(TraceError, match="cannot be split into 4") as caught:
        minialpa.parallelize(two_arrays, method=method, on_ragged="error")(*args)
    (note,) = caught.value.__notes__
    assert note == "The examples were taken to be in `x`, `y`. Otherwise, give `batch_argnums`."
    with pytest.raises(TraceError, match="cannot be split into 4") as caught:
        minialpa.parallelize(two_arrays, method=method, batch_argnums=(1, 2), on_ragged="error")(*args)
    assert not hasattr(caught.value, "__notes__")


def two_tables(params: Arrays, opt_state: Any, one: Any, other: Any) -> Any:
    """Each of the last two arguments could hold the examples."""
    mean = lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]))  # noqa: E731
    return by_adam(params, opt_state, lambda p: mean(p, one) + mean(p, other))


@pytest.mark.parametrize("method", [DataParallel(), None], ids=["data", "auto"])
def test_a_batch_that_is_not_clear_is_refused_where_examples_are_split(method: Any) -> None:
    args = (make_params(), OPTIMIZER.init(make_params()), make_x(16), make_x(32))
    parallel = minialpa.parallelize(two_tables, method=method)
    message = r"`batch_argnums=\(2,\)` for `one` \(16 examples\) or `batch_argnums=\(3,\)` for `other` \(32 examples\)"
    with pytest.raises(TraceError, match=message):
        parallel(*args)
    assert not any(x.is_deleted() for x in jax.tree.leaves(args) if isinstance(x, jax.Array))

    # The batch need not be recognised if examples stay together, or if the user names it.
    assert minialpa.parallelize(two_tables, method=ShardParallel()).plan(*args).batch == ()
    if method is not None:
        chosen = minialpa.parallelize(two_tables, method=method, batch_argnums=(3,), donate_argnums=())
        assert_allclose(chosen(*args), two_tables(*args), rtol=1e-4, atol=1e-5)


def test_a_step_without_a_batch_is_refused_where_examples_are_split() -> None:
    def step(params: Arrays) -> Any:
        return two_arrays(params, BATCH["x"], BATCH["y"])

    for method in (ShardParallel(num_micro_batches=2), DataParallel()):
        with pytest.raises(TraceError, match=r"splits examples. minialpa found no argument .*`batch_argnums=\("):
            minialpa.parallelize(step, method=method)(make_params())


def test_a_graph_of_nodes_and_edges_needs_no_batch_where_examples_stay_together() -> None:
    def step(params: Arrays, graph: Arrays) -> Any:
        def loss(params: Arrays) -> jax.Array:
            h = graph["nodes"] @ params["w"]
            messages = jnp.tanh(h[graph["from"]] - h[graph["to"]])
            return jnp.mean((jax.ops.segment_sum(messages, graph["to"], h.shape[0]) @ params["v"]) ** 2)

        return descend(params, loss)

    rng = np.random.default_rng(0)
    graph = {"nodes": make_x(16), "from": rng.integers(0, 16, 40), "to": rng.integers(0, 16, 40)}
    expected = jax.jit(step)(make_params(), graph)
    for method in (None, ShardParallel(logical_shape=(2, 4)), PipeshardParallel()):
        parallel = minialpa.parallelize(step, method=method)
        assert parallel.plan(make_params(), graph).batch == ()
        assert_allclose(parallel(make_params(), graph), expected, rtol=1e-5, atol=1e-6)
    for method in (ShardParallel(num_micro_batches=2), DataParallel()):
        with pytest.raises(TraceError, match=r"splits examples. The arrays .* differ in their first dimension"):
            minialpa.parallelize(step, method=method)(make_params(), graph)


# ---- equinox --------------------------------------------------------------------------------------------------------


class Gated(eqx.Module):
    """A module with leaves of many kinds."""

    weight: jax.Array
    act: Callable[[Any], Any]
    on: bool
    rate: float
    name: str

    def __call__(self, x: Any) -> Any:
        return self.act(x @ self.weight) * self.rate if self.on else x


def test_what_is_no_array_in_a_module_is_part_of_the_program() -> None:
    seen = []

    def step(model: Gated, x: Any) -> Any:
        seen.append((model.on, model.rate, model.name))
        return model(x), model

    parallel = minialpa.parallelize(step, donate_argnums=())
    model = Gated(jnp.eye(WIDTH), jnp.tanh, True, 1.0, "a")
    others = [Gated(model.weight, jnp.sin, True, 1.0, "a"), Gated(model.weight, jnp.tanh, True, 2.0, "a")]
    others += [Gated(model.weight, jnp.tanh, False, 1.0, "a"), Gated(model.weight, jnp.tanh, True, 1.0, "b")]
    for one in (model, *others, model):
        out, new = parallel(one, make_x())
        assert_allclose(out, one(make_x()), rtol=1e-5, atol=1e-6)
        assert (new.act, new.on, new.rate, new.name) == (one.act, one.on, one.rate, one.name)
    assert len(seen) == len(parallel._executables) == 5
    with pytest.raises(TraceError, match="hold a set, which is neither an array nor hashable"):
        parallel(eqx.tree_at(lambda m: m.name, model, {1, 2}), make_x())


# ---- flax.nnx -------------------------------------------------------------------------------------------------------


class Net(nnx.Module):
    """Two layers with dropout, whose random numbers are part of its state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.drop(jnp.tanh(self.first(x))))


def nnx_step(model: Net, optimizer: Any, x: Any, y: Any) -> jax.Array:
    value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return value


def make_net() -> tuple[Net, Any]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def test_nnx_modules_are_updated_in_place_as_by_nnx_jit() -> None:
    with jax.numpy_rank_promotion("allow"):
        model, optimizer = make_net()
        other, other_optimizer = make_net()
        parallel = minialpa.parallelize(nnx_step, method=PipeshardParallel(num_micro_batches=2))
        serial = nnx.jit(nnx_step)
        for seed in range(2):
            value = parallel(model, optimizer, make_x(seed=seed), make_y())
            right = serial(other, other_optimizer, make_x(seed=seed), make_y())
            assert_allclose(value, right, rtol=1e-4, atol=1e-5)
        new, expected = nnx.state((model, optimizer)), nnx.state((other, other_optimizer))
        assert int(new[0]["drop"]["rngs"]["count"][...]) == 2
        for one, two in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
            if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
                assert_allclose(one, two, rtol=1e-3, atol=1e-5)
        assert len(parallel._executables) == 1


def test_an_nnx_state_is_merged_changed_and_returned() -> None:
    """As a checkpoint holds it: the values of the modules, without their structure."""
    with jax.numpy_rank_promotion("allow"):
        structure, state = nnx.split(make_net())

        def step(state: Any, x: Any, y: Any) -> Any:
            model, optimizer = nnx.merge(structure, state)
            value = nnx_step(model, optimizer, x, y)
            return nnx.state((model, optimizer)), value

        parallel, other = minialpa.parallelize(step, method=ShardParallel(num_micro_batches=2)), make_net()
        for seed in range(2):
            state, value = parallel(state, make_x(seed=seed), make_y())
            assert_allclose(value, nnx.jit(nnx_step)(*other, make_x(seed=seed), make_y()), rtol=1e-4, atol=1e-5)
        assert len(parallel._executables) == 1


def test_nnx_modules_whose_changes_would_be_lost_are_refused() -> None:
    def nested(pair: Any, x: Any) -> Any:
        return pair["model"](x)

    def returned(model: Net, x: Any) -> Any:
        return model, model(x)

    def changed(model: Net, x: Any) -> Any:
        model.extra = nnx.Param(jnp.ones(3))
        return model(x)

    def counted(state: Any, x: Any) -> Any:
        state["count"][...] += 1
        return x * state["count"][...]

    with jax.numpy_rank_promotion("allow"):
        variables, (model, _) = {"count": nnx.Variable(jnp.float32(1))}, make_net()
        for step, argument, message in (
            (counted, variables, "changes an nnx Variable in place that is in no module"),
            (counted, nnx.State(variables), "changes an nnx Variable in place that is in no module"),
            (nested, {"model": model}, r"Argument `pair` holds an nnx Net.*`nnx.split`"),
            (returned, model, r"The result holds an nnx Net.*`nnx.split`"),
            (changed, model, r"changes an nnx module in more than the values.*`model.eval\(\)`"),
        ):
            with pytest.raises(TraceError, match=message):
                minialpa.parallelize(step)(argument, make_x())
        assert_allclose(minialpa.parallelize(lambda s, x: x * s["count"][...])(variables, make_x()), make_x())
        assert minialpa.parallelize(lambda model, x: model(x))(model, make_x()).shape == (N_EXAMPLES, WIDTH)


# ---- inspection, as of functions of jax.jit -------------------------------------------------------------------------


def test_repr_says_what_runs_and_how() -> None:
    step = minialpa.parallelize(two_arrays, method=ShardParallel(num_micro_batches=2))
    assert repr(step) == "<parallelized two_arrays by ShardParallel(num_micro_batches=2)>"
    assert repr(minialpa.parallelize(two_arrays)) == "<parallelized two_arrays by AutoParallel()>"
    plan = step.plan(make_params(), make_x(), make_y())
    saved = minialpa.parallelize(two_arrays, method=plan)
    assert repr(saved) == "<parallelized two_arrays by a saved plan for 8 devices>"


def test_trace_gives_what_jit_gives() -> None:
    args = make_params(), make_x(), make_y()
    traced = minialpa.parallelize(two_arrays).trace(*args)
    expected = jax.jit(two_arrays).trace(*args)
    assert traced.jaxpr.in_avals == expected.jaxpr.in_avals and traced.jaxpr.out_avals == expected.jaxpr.out_avals
    assert jax.tree.structure(traced.out_info) == jax.tree.structure(expected.out_info)
    assert "dot_general" in traced.lower().as_text()


def test_lower_plans_and_compile_makes_the_program_that_the_next_call_runs() -> None:
    step = minialpa.parallelize(two_arrays, method=ShardParallel(), donate_argnums=())
    args = make_params(), make_x(), make_y()
    lowered = step.lower(*shapes(args))
    assert lowered.plan == step.plan(*args) and not step._executables
    executable = lowered.compile()
    assert_allclose(step(*args), two_arrays(*args), rtol=1e-4, atol=1e-5)
    assert step.get_last_executable() is executable is step.lower(*args).compile()
    with pytest.raises(AttributeError, match=r"no attribute 'memory_analysis'.*`get_stage_allocation_size\(\)`"):
        executable.memory_analysis()
    assert executable.get_parallel_plan() == lowered.plan

    first, *others = args
    assert_allclose(executable(first, others[0], y=others[1]), two_arrays(*args), rtol=1e-4, atol=1e-5)
    with pytest.raises(
        TraceError, match=r"`x` is float32\[\d+, 1\] instead of float32\[\d+, \d+\]\. Compile for these"
    ):
        executable(first, others[0][:, :1], others[1])


def test_a_method_that_is_none_is_refused_at_once() -> None:
    cluster = minialpa.ClusterSpec.preset("h100", devices_per_host=2)
    wrong: dict[str, Any] = {
        r"got 'zero_3'. Use `Zero3Parallel\(\)`": "zero_3",
        r"got 'fast'. Use `AutoParallel\(\)` or `DataParallel\(\)` or ": "fast",
        r"`method` is the class `ShardParallel`. Make an object of it: `ShardParallel\(\)`": ShardParallel,
        r"`method` must be a parallel method such as `ShardParallel\(\)`, or a `Plan`; got 3": 3,
    }
    for message, method in wrong.items():
        with pytest.raises(minialpa.ShardingError, match=message):
            minialpa.parallelize(two_arrays, method=method)
        with pytest.raises(minialpa.ShardingError, match=message):
            minialpa.plan(two_arrays, (make_params(), make_x(), make_y()), cluster=cluster, method=method)


def test_a_donated_argument_that_comes_back_is_no_batch() -> None:
    """Such as the cache of a decoder: it has a row for each example, and the call takes over its memory."""

    def next_values(w: jax.Array, cache: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = jnp.concatenate([cache[:, 1:], (x @ w)[:, None]], axis=1)
        return cache, jnp.sum(cache, axis=1)

    w, cache, x = jnp.ones((8, 8)), jnp.ones((16, 4, 8)), jnp.ones((16, 8))
    expected = jax.jit(next_values)(w, cache, x)
    parallel = minialpa.parallelize(next_values, method=ShardParallel(), donate_argnums=(1,))
    cache = parallel.preshard_dynamic_args(w, cache, x)[1]
    assert_allclose(parallel(w, cache, x), expected)
    assert cache.is_deleted()
