"""Input that cannot work: the message names the remedy, the caller's arrays survive, a right call still works."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import (
    AutoLayerOption,
    CheckpointError,
    DeletedArrayError,
    LogicalMesh,
    ManualStageOption,
    MinialpaError,
    PipeshardParallel,
    ShardingError,
    ShardParallel,
    TraceError,
    UniformStageOption,
)
from minialpa.testing import assert_allclose
from tests import plans
from tests.helpers import METHODS
from tests.plans import N_EXAMPLES, WIDTH, loss_of, make_params, train_step

pytestmark = pytest.mark.usefixtures("fresh_session")


def make_batch() -> Any:
    return jax.tree.map(jnp.asarray, plans.make_batch())


def works(parallel: Any, *args: Any) -> None:
    """A correct call gives the results of the plain step, on arguments that a refused call has seen."""
    assert_allclose(parallel(*args), train_step(make_params(), make_batch()), rtol=1e-4, atol=1e-5)


Errors = type[Exception] | tuple[type[Exception], ...]


def refused(error: Errors, message: str, call: Callable[..., Any], *args: Any) -> None:
    """`call(*args)` raises, and takes no array with it."""
    with pytest.raises(error, match=message):
        call(*args)
    for leaf in jax.tree.leaves(args):
        assert not isinstance(leaf, jax.Array) or not leaf.is_deleted()


def placed_args(parallel: Any) -> tuple[Any, Any]:
    """Arguments as in a training loop: on the devices, ready for donation."""
    params, _ = parallel(make_params(), make_batch())
    del params
    args: tuple[Any, Any] = parallel.preshard_dynamic_args(make_params(), make_batch())
    return args


# ---- batches --------------------------------------------------------------------------------------------------------


def test_leading_sizes_that_differ() -> None:
    parallel = minialpa.parallelize(train_step)
    params, batch = placed_args(parallel)
    message = r"arrays of the batch differ in their first dimension \(`batch\['x'\]` 16, `batch\['y'\]` 8"
    refused(TraceError, message, parallel, params, {"x": batch["x"], "y": batch["y"][:8]})
    works(parallel, params, batch)


def test_an_error_of_the_step_comes_as_it_is_also_if_leading_sizes_differ() -> None:
    parallel = minialpa.parallelize(lambda params, batch: params["none"])
    batch = make_batch()
    refused(KeyError, "none", parallel, make_params(), {"x": batch["x"], "y": batch["y"][:8]})


@pytest.mark.skipif(jax.__version__ == "0.11.2", reason="its compiler for CPUs crashes where empty arrays are donated")
def test_parameters_of_size_zero_simply_work() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            return loss_of(p, batch) + jnp.sum(p["none"]) + jnp.sum(p["nothing"] ** 2)

        value, grads = minialpa.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {**make_params(), "none": jnp.zeros((0,)), "nothing": jnp.zeros((3, 0))}
    parallel = minialpa.parallelize(step, method=METHODS["pipeline"])
    new, value = parallel(params, make_batch())
    expected, right = step(params, make_batch())
    assert_allclose((new, value), (expected, right), rtol=1e-4, atol=1e-5)
    assert new["nothing"].shape == (3, 0)
    assert_allclose(parallel(new, make_batch()), step(expected, make_batch()), rtol=1e-4, atol=1e-5)


def test_results_without_elements_can_be_read() -> None:
    def step(batch: Any) -> Any:
        return jax.lax.scan(lambda y, i: (y, y * i), batch, jnp.arange(0, dtype=batch.dtype)), batch[:, :0]

    found = minialpa.parallelize(step)(np.ones((16, 8), np.float32))
    assert [np.asarray(x).shape for x in jax.tree.leaves(found)] == [(16, 8), (0, 16, 8), (16, 0)]


@pytest.mark.parametrize("width", [0, 1])
def test_data_parallelism_beside_operands_without_elements(width: int) -> None:
    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            first, second, rest = jnp.split(jnp.concatenate([2 * batch[:, :0], batch], 1) @ w, [0, width], 1)
            return jnp.mean(jnp.square(rest)) + jnp.sum(first) + jnp.sum(jnp.sin(second))

        return minialpa.value_and_grad(loss)(w)

    w, batch = np.ones((8, 8), np.float32), np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
    found = minialpa.parallelize(step, method=minialpa.DataParallel(), batch_argnums=(1,), donate_argnums=())(w, batch)
    assert_allclose(found, step(w, batch), rtol=1e-4, atol=1e-5)


def test_micro_batches_without_a_batch() -> None:
    parallel = minialpa.parallelize(train_step, method=ShardParallel(num_micro_batches=2), batch_argnums=())
    refused(TraceError, "`batch_argnums` is empty", parallel, make_params(), make_batch())


# ---- leaves and trees -----------------------------------------------------------------------------------------------


class _Lazy:
    def __jax_array__(self) -> jax.Array:
        return jnp.ones((N_EXAMPLES, WIDTH))


def test_leaves_that_are_no_arrays_of_numbers_are_named() -> None:
    parallel = minialpa.parallelize(train_step)
    params, batch = placed_args(parallel)
    for value, kind in (
        ({1, 2}, "set.*static_argnums"),
        (np.array(["a"]), "NumPy array of <U1.*static_argnums"),
        (_Lazy(), r"_Lazy, which has `__jax_array__`.*jnp\.asarray"),
        (np.ma.masked_array(np.ones(4)), "masked array"),
        (jax.ShapeDtypeStruct((16, 8), jnp.float32), "`ShapeDtypeStruct`, a shape without values. Pass an array"),
        (np.dtype("float32"), "Float32DType"),
    ):
        message = rf"`batch\['more'\]` is a.* {kind}"
        refused(TraceError, message, parallel, params, {**batch, "more": value})
    for wrong in (
        jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((-N_EXAMPLES, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((N_EXAMPLES, WIDTH), np.dtype("S3")),
    ):
        with pytest.raises(TraceError, match=r"The argument `batch\['y'\]` (is a|has the shape)"):
            parallel.get_executable(params, {"x": batch["x"], "y": wrong})
    works(parallel, params, batch)


def test_errors_of_the_step_are_passed_on_and_tell_what_differs_from_an_earlier_call() -> None:
    parallel = minialpa.parallelize(train_step)
    refused(KeyError, "'v'", parallel, {"w": jnp.eye(WIDTH)}, make_batch())
    params, batch = placed_args(parallel)
    for wrong, error, change in (
        ({"w": params["w"]}, r"KeyError\('v'\)", r"`params\['v'\]`: not there; earlier float32"),
        ({**params, "w": jnp.ones((3, WIDTH))}, r"TypeError\(.*", r"`params\['w'\]`: float32\[3, \d+\]; earlier "),
    ):
        message = rf"The step fails with {error} on arguments that differ from an earlier call\..*\n  {change}"
        refused(TraceError, message, parallel, wrong, batch)
    works(parallel, params, batch)


def test_a_collective_in_a_step_for_one_device() -> None:
    def averaging(params: Any, batch: Any) -> Any:
        return jax.lax.pmean(loss_of(params, batch), "batch")

    message = r"unbound axis name: batch\). Write the step for one device, without collectives"
    refused(TraceError, message, minialpa.parallelize(averaging), make_params(), make_batch())


def test_a_pipeline_of_marked_layers_without_a_mark() -> None:
    def unmarked(params: Any, batch: Any) -> Any:
        return jax.tree.map(jnp.subtract, params, jax.grad(lambda p: jnp.mean((batch["x"] @ p["w"]) ** 2))(params))

    parallel = minialpa.parallelize(unmarked, method=PipeshardParallel(layer_option="manual"))
    with pytest.warns(UserWarning, match="end at `mark_pipeline_boundary.*it is one stage"):
        assert len(parallel.plan(make_params(), make_batch()).stages) == 1


def test_a_static_argument_that_cannot_be_hashed() -> None:
    def step(params: Any, batch: Any, names: Any) -> Any:
        return train_step(params, batch)

    parallel = minialpa.parallelize(step, static_argnums=(2,))
    params, batch = make_params(), make_batch()
    refused(TraceError, r"Argument `names` is static and must be hashable; got a list", parallel, params, batch, ["a"])
    refused(TraceError, "`names` is static", lambda *a: parallel(*a, names={}), params, batch)
    works(parallel, params, batch, ("a",))


def test_python_control_flow_on_values() -> None:
    def step(params: Any, batch: Any, big: Any) -> Any:
        if big > 1:
            params = jax.tree.map(lambda p: p * 2, params)
        return train_step(params, batch)

    parallel = minialpa.parallelize(step)
    params, batch = make_params(), make_batch()
    message = r"If the program depends on `big`, make it static, with `static_argnums=\(2,\)`"
    for value in (1, np.float32(1)):
        refused(TraceError, message, parallel, params, batch, value)
    works(minialpa.parallelize(step, static_argnums=2), params, batch, 1)
    indexed = minialpa.parallelize(lambda p, b, mask: b["x"][mask])
    refused(TraceError, r"choose with `jnp\.where\(mask, x, 0\)`", indexed, params, batch, jnp.ones(N_EXAMPLES, bool))


def test_argument_numbers_that_are_no_numbers() -> None:
    for option in ("static_argnums", "donate_argnums", "batch_argnums"):
        for value, message in (
            ("batch", rf"Pass argument numbers, such as `\(0,\)`, or \"auto\" as `{option}`; got 'batch'"),
            ((0.5,), rf"Pass argument numbers, such as `\(0,\)`, or \"auto\" as `{option}`; got \(0\.5,\)"),
            (None, rf"Pass argument numbers, such as `\(0,\)`, or \"auto\" as `{option}`; got None"),
            (2, f"`{option}` has 2, and the step has 2 arguments.*params, batch"),
            (-3, f"`{option}` has -3, and the step has 2 arguments.*params, batch"),
        ):
            with pytest.raises(TraceError, match=message):
                minialpa.parallelize(train_step, **{option: value})


# ---- devices --------------------------------------------------------------------------------------------------------


def manual(*submeshes: tuple[int, int], layers: Any = ((0,), (1,))) -> PipeshardParallel:
    option = ManualStageOption(layers, submeshes, [(a * b,) for a, b in submeshes], [{}] * len(submeshes))
    return PipeshardParallel(layer_option="manual", stage_option=option)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (ShardParallel(devices=LogicalMesh((4, 4))), r"needs 16 devices \(.*there are 8\. Plan for 8 devices"),
        (manual((1, 8), (1, 8)), "2 stages need 16 devices together, but the cluster has 8"),
        (
            manual((1, 4), (1, 4), layers=((0,), (0,))),
            r"List each of the layers 0 to 1 .* once and in order.*got \[\[0\], \[0\]\]",
        ),
        (
            PipeshardParallel(layer_option=AutoLayerOption(10_000)),
            r"cannot be cut into 10000 layers, because it has only \d+ .*Set `layer_option=.*to at most \d+",
        ),
        (
            PipeshardParallel(stage_option=UniformStageOption(5)),
            "`num_stages=5` needs at least 5 layers, but the model has 2",
        ),
        (
            PipeshardParallel(pipeline_schedule="inference"),
            '`inference` has no backward pass.*Set `pipeline_schedule` to "1f1b"',
        ),
    ],
)
def test_methods_that_ask_for_what_is_not_there(method: Any, message: str) -> None:
    parallel = minialpa.parallelize(train_step, method=method)
    refused((ShardingError, TraceError), message, parallel, make_params(), make_batch())


def test_a_pipeline_of_a_step_whose_results_need_no_operation() -> None:
    def nothing(params: Any, batch: Any) -> None:
        jax.grad(loss_of)(params, batch)

    message = "each of its results is an argument or a constant. Return the values.*or use .*`ShardParallel`"
    refused(TraceError, message, minialpa.parallelize(nothing, method=PipeshardParallel()), make_params(), make_batch())


def test_degrees_of_parallelism_that_do_not_fit() -> None:
    get = minialpa.get_3d_parallel_method
    refused(
        ShardingError,
        "`data_parallel=4`, `operator_parallel=2` and `pipeline_parallel=2` need 16 devices together, but there are 8",
        get,
        1,
        4,
        2,
        2,
    )
    refused(
        ShardingError,
        "`data_parallel=1`, `operator_parallel=16` and `pipeline_parallel=1` need 16 devices",
        get,
        1,
        -1,
        16,
        1,
    )
    refused(ShardingError, "`data_parallel` must be -1 or an integer >= 1; got '2'", get, 1, "2", 1, 1)
    works(minialpa.parallelize(train_step, method=get(2, -1, 2, 2)), make_params(), make_batch())


# ---- donated state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [ShardParallel(), PipeshardParallel(num_micro_batches=2, layer_option="manual")],
    ids=["shard", "pipeline"],
)
def test_a_state_that_an_earlier_call_took(method: Any) -> None:
    parallel = minialpa.parallelize(train_step, method=method)
    old, batch = placed_args(parallel)
    new, _ = parallel(old, batch)
    with pytest.raises(DeletedArrayError, match=r"`params\['\w'\]` has been deleted: it was donated to an"):
        parallel(old, batch)
    with pytest.raises(DeletedArrayError, match="donated to an earlier call"):
        parallel.preshard_dynamic_args(old, batch)
    half = {"w": new["w"], "v": old["v"]}
    with pytest.raises(DeletedArrayError, match=r"`params\['v'\]` has been deleted"):
        parallel(half, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves((new, batch)))
    assert_allclose(new, train_step(make_params(), make_batch())[0], rtol=1e-4, atol=1e-5)
    parallel(new, batch)


# ---- session --------------------------------------------------------------------------------------------------------


def test_init_again_with_other_arguments() -> None:
    minialpa.init(cluster="local", devices_per_host=4)
    minialpa.init(cluster="local", devices_per_host=4)
    with pytest.raises(MinialpaError, match=r"already called with other arguments. Call `minialpa.shutdown\(\)` first"):
        minialpa.init(cluster="local", devices_per_host=2)
    minialpa.shutdown()
    minialpa.shutdown()
    minialpa.init(cluster="local", devices_per_host=2)


def test_init_with_what_is_not_there() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "`cluster` must be 'local' or 'ray'; got 'slurm'": {"cluster": "slurm"},
        r"2 x 8 devices \(.*\) were requested and this process has 8\. .*`num_hosts`": {
            "num_hosts": 2,
            "devices_per_host": 8,
        },
        "`num_hosts` must be an integer >= 1 or None; got -1": {"num_hosts": -1},
        "`devices_per_host` must be an integer >= 1 or None; got '4'": {"devices_per_host": "4"},
        "`worker_timeout_s` must be a number > 0; got 0": {"worker_timeout_s": 0},
        "`worker_env` must be a mapping from strings to strings or None; got": {"worker_env": {"N": 1}},
        r"9 x 0 devices \(.*\) were requested": {"num_nodes": 9},
    }
    for message, arguments in wrong.items():
        refused(MinialpaError, message, functools.partial(minialpa.init, **arguments))
    minialpa.init()
    works(minialpa.parallelize(train_step), make_params(), make_batch())


# ---- values of traced arrays, and arguments of functions ------------------------------------------------------------


def _chooses(params: Any, batch: Any) -> Any:
    return params if loss_of(params, batch) > 0 else batch


def _converts(params: Any, batch: Any) -> Any:
    return float(params["w"][0, 0])


def _counts(params: Any, batch: Any, k: Any) -> Any:
    return [params for _ in range(k)]


@pytest.mark.parametrize(
    "step, extra, names, advice",
    [
        (_chooses, (), ("params['w']", "batch['x']"), "Choose with `jnp.where` or `jax.lax.cond`"),
        (_converts, (), ("params['w']",), "Return the value and use it outside"),
        (_counts, (3,), ("`k`",), "static, with `static_argnums=(2,)`"),
    ],
)
def test_code_that_needs_a_value_is_reported_by_the_names_of_the_user(
    step: Any, extra: tuple[Any, ...], names: tuple[str, ...], advice: str
) -> None:
    with pytest.raises(TraceError) as raised:
        minialpa.parallelize(step)(make_params(), make_batch(), *extra)
    for error in (raised.value, raised.value.__cause__):
        text = str(error)
        assert f"{step.__name__} at {__file__}:" in text
        assert "leaves" not in text and "flat_fun" not in text
    text = str(raised.value)
    assert all(name in text for name in (*names, advice))
    assert ("static" in text) == bool(extra)


def test_arguments_of_functions_in_each_others_places() -> None:
    parallel, params, batch = minialpa.parallelize(train_step), make_params(), make_batch()
    refused(
        MinialpaError,
        "Pass a function without arguments that makes the state as `create_state`",
        minialpa.train,
        parallel,
        params,
        [batch],
    )
    refused(MinialpaError, "looks like a single batch", minialpa.train, parallel, make_params, batch)
    save = functools.partial(minialpa.save_checkpoint, step=1)
    refused(
        CheckpointError,
        "Pass the folder of the checkpoints, a path, as the first argument; got a dict",
        save,
        params,
        "checkpoints",
    )
    plan = functools.partial(minialpa.plan, cluster=minialpa.ClusterSpec.preset("cpu"))
    refused(
        TraceError,
        r"Pass all arguments of the step as one tuple `args`, such as .*; got a dict",
        plan,
        train_step,
        params,
    )
    message = r'Pass a ClusterSpec as `cluster`, such as `ClusterSpec.preset\("h100"\)`'
    refused(ShardingError, message, lambda: minialpa.plan(train_step, (params, batch), cluster="h100"))  # type: ignore[arg-type]
