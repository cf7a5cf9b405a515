"""Input that cannot work: the message names the remedy, the caller's arrays survive, a right call still works."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
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
from tests.helpers import METHODS

WIDTH, N_EXAMPLES = 8, 16


pytestmark = pytest.mark.usefixtures("fresh_session")


def make_params() -> Any:
    return {"w": jnp.eye(WIDTH) * 0.5, "v": jnp.ones((WIDTH, WIDTH)) * 0.1}


def make_batch(n: int = N_EXAMPLES) -> Any:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.standard_normal((n, WIDTH), np.float32)) for name in ("x", "y")}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x = jnp.tanh(batch["x"] @ params["w"])
    minialpa.mark_pipeline_boundary()
    return jnp.mean((x @ params["v"] - batch["y"]) ** 2)


def train_step(params: Any, batch: Any) -> Any:
    value, grads = minialpa.value_and_grad(loss_fn)(params, batch)
    return {name: p - 0.1 * grads[name] if name in grads else p for name, p in params.items()}, value


def works(parallel: Any, *args: Any) -> None:
    """A correct call gives what the plain step gives, on arguments that a refused call has seen."""
    assert_allclose(parallel(*args), train_step(make_params(), make_batch()), rtol=1e-4, atol=1e-5)


Errors = type[Exception] | tuple[type[Exception], ...]


def refused(error: Errors, message: str, call: Callable[..., Any], *args: Any) -> None:
    """`call(*args)` raises, and takes no array with it."""
    with pytest.raises(error, match=message):
        call(*args)
    for leaf in jax.tree.leaves(args):
        assert not isinstance(leaf, jax.Array) or not leaf.is_deleted()


def placed_args(parallel: Any) -> tuple[Any, Any]:
    """Arguments as a training loop has them: on the devices, ready to be donated."""
    params, _ = parallel(make_params(), make_batch())
    del params
    args: tuple[Any, Any] = parallel.preshard_dynamic_args(make_params(), make_batch())
    return args


# ---- batches --------------------------------------------------------------------------------------------------------


def test_leading_sizes_that_differ() -> None:
    parallel = minialpa.parallelize(train_step)
    params, batch = placed_args(parallel)
    message = r"leading dimensions of the batch differ: `batch\['x'\]` 16, `batch\['y'\]` 8"
    refused(TraceError, message, parallel, params, {"x": batch["x"], "y": batch["y"][:8]})
    works(parallel, params, batch)


@pytest.mark.skipif(jax.__version__ == "0.11.2", reason="its compiler for CPUs crashes where empty arrays are donated")
def test_parameters_of_size_zero_simply_work() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            return loss_fn(p, batch) + jnp.sum(p["none"]) + jnp.sum(p["nothing"] ** 2)

        value, grads = minialpa.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {**make_params(), "none": jnp.zeros((0,)), "nothing": jnp.zeros((3, 0))}
    parallel = minialpa.parallelize(step, method=METHODS["pipeline"])
    new, value = parallel(params, make_batch())
    expected, right = step(params, make_batch())
    assert_allclose((new, value), (expected, right), rtol=1e-4, atol=1e-5)
    assert new["nothing"].shape == (3, 0)
    assert_allclose(parallel(new, make_batch()), step(expected, make_batch()), rtol=1e-4, atol=1e-5)


def test_micro_batches_without_a_batch() -> None:
    parallel = minialpa.parallelize(train_step, method=ShardParallel(num_micro_batches=2), batch_argnums=())
    refused(TraceError, "None is listed in `batch_argnums`", parallel, make_params(), make_batch())


# ---- leaves and trees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["adam", {1, 2}, np.array(["a"]), np.array([None])])
def test_a_leaf_that_is_no_array(value: Any) -> None:
    parallel = minialpa.parallelize(train_step)
    params, batch = placed_args(parallel)
    kind = f"NumPy array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    message = rf"leaf `params\['name'\]` is a {kind}.*static_argnums"
    refused(TraceError, message, parallel, {**params, "name": value}, batch)
    works(parallel, params, batch)


def test_a_shape_in_place_of_an_array() -> None:
    parallel = minialpa.parallelize(train_step)
    params, batch = placed_args(parallel)
    message = r"`batch\['y'\]` is a shape, and a call needs arrays"
    refused(TraceError, message, parallel, params, {"x": batch["x"], "y": jax.ShapeDtypeStruct((16, 8), jnp.float32)})
    works(parallel, params, batch)


@pytest.mark.parametrize("leaf", ["ref", "dtype", "dimension", "negative", "text"])
def test_a_leaf_that_is_no_array_of_numbers_is_named(leaf: str) -> None:
    wrong: Any = {
        "ref": lambda: jax.new_ref(jnp.ones((N_EXAMPLES, WIDTH))),
        "dtype": lambda: np.dtype("float32"),
        "dimension": lambda: jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), WIDTH), jnp.float32),
        "negative": lambda: jax.ShapeDtypeStruct((-N_EXAMPLES, WIDTH), jnp.float32),
        "text": lambda: jax.ShapeDtypeStruct((N_EXAMPLES, WIDTH), np.dtype("S3")),
    }[leaf]()
    parallel = minialpa.parallelize(train_step, method=ShardParallel())
    batch = make_batch()
    with pytest.raises(TraceError, match=r"Argument leaf `batch\['y'\]` (is a|has shape)"):
        parallel.get_executable(make_params(), {"x": batch["x"], "y": wrong})
    works(parallel, make_params(), batch)


class _Lazy:
    def __jax_array__(self) -> jax.Array:
        return jnp.ones((N_EXAMPLES, WIDTH))


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [(_Lazy(), r"_Lazy, which has `__jax_array__`.*jnp\.asarray"), (np.ma.masked_array(np.ones(4)), "masked array")],
    ids=["lazy", "masked"],
)
def test_what_only_looks_like_an_array_is_refused_by_what_it_is(leaf: Any, reason: str) -> None:
    parallel = minialpa.parallelize(train_step)
    refused(TraceError, reason, parallel, make_params(), {**make_batch(), "more": leaf})
    refused(TraceError, reason, parallel, make_params(), leaf)


def test_arguments_that_differ_from_those_of_an_earlier_call() -> None:
    parallel = minialpa.parallelize(train_step)
    params, batch = placed_args(parallel)
    for wrong, message in (
        ({"w": params["w"]}, r"KeyError\('v'\)\n  `params\['v'\]`: not there; earlier float32"),
        (
            {**params, "w": jnp.ones((3, WIDTH))},
            r"TypeError\(.*\n  `params\['w'\]`: float32\[3, \d+\]; earlier ",
        ),
    ):
        refused(TraceError, f"which differ from an earlier call: {message}", parallel, wrong, batch)
    works(parallel, params, batch)


def test_an_argument_that_the_step_does_not_have() -> None:
    parallel = minialpa.parallelize(train_step)
    message = "unexpected keyword argument `examples`. Its arguments are params, batch"
    with pytest.raises(TypeError, match=message):
        parallel(make_params(), examples=make_batch())
    works(parallel, make_params(), make_batch())


def test_a_collective_in_a_step_for_one_device() -> None:
    def averaging(params: Any, batch: Any) -> Any:
        return jax.lax.pmean(loss_fn(params, batch), "batch")

    message = "unbound axis name: batch. The step is for one device: leave out collectives"
    refused(TraceError, message, minialpa.parallelize(averaging), make_params(), make_batch())


def test_a_pipeline_of_marked_layers_without_a_mark() -> None:
    def unmarked(params: Any, batch: Any) -> Any:
        return jax.tree.map(jnp.subtract, params, jax.grad(lambda p: jnp.mean((batch["x"] @ p["w"]) ** 2))(params))

    parallel = minialpa.parallelize(unmarked, method=PipeshardParallel(layer_option="manual"))
    with pytest.warns(UserWarning, match="end at `mark_pipeline_boundary.*it is one stage"):
        assert len(parallel.plan(make_params(), make_batch()).stages) == 1


def test_an_error_of_the_step_itself_is_passed_on() -> None:
    parallel = minialpa.parallelize(train_step)
    refused(KeyError, "'v'", parallel, {"w": jnp.eye(WIDTH)}, make_batch())
    works(parallel, make_params(), make_batch())


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
    for value in (1, 1.0, np.float32(1), jnp.ones(())):
        refused(TraceError, "static, with `static_argnums`", parallel, params, batch, value)
    works(minialpa.parallelize(step, static_argnums=2), params, batch, 1)
    indexed = minialpa.parallelize(lambda p, b, mask: b["x"][mask])
    refused(TraceError, "static_argnums", indexed, params, batch, jnp.ones(N_EXAMPLES, bool))


def test_argument_numbers_that_are_no_numbers() -> None:
    for option in ("static_argnums", "donate_argnums", "batch_argnums"):
        for value in (("batch",), "batch", (0.5,)):
            with pytest.raises(TraceError, match=f"`{option}` takes argument numbers; got "):
                minialpa.parallelize(train_step, **{option: value})
        for number in (2, -3):
            with pytest.raises(
                TraceError, match=f"`{option}` has {number}, and the step has 2 arguments.*params, batch"
            ):
                minialpa.parallelize(train_step, **{option: number})


# ---- devices --------------------------------------------------------------------------------------------------------


def manual(*submeshes: tuple[int, int], layers: Any = ((0,), (1,))) -> PipeshardParallel:
    option = ManualStageOption(layers, submeshes, [(a * b,) for a, b in submeshes], [{}] * len(submeshes))
    return PipeshardParallel(layer_option="manual", stage_option=option)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (ShardParallel(devices=LogicalMesh((4, 4))), "needs 16 devices and there are 8"),
        (ShardParallel(submesh=(2, 8)), "stages need 16 devices and the cluster has 8"),
        (manual((1, 8), (1, 8)), "stages need 16 devices and the cluster has 8"),
        (manual((1, 4)), "one submesh, logical shape and option dict for each of its 2 stages; got 1, 1 and 1"),
        (manual((1, 4), (1, 4), layers=((0,), (0,))), r"must list the layers 0 to 1 once and in order"),
        (ShardParallel(devices=[]), r"`devices` takes a list of jax devices.*got \[\]"),
        (ShardParallel(devices=["gpu:0"]), r"`devices` takes a list of jax devices.*got \['gpu:0'\]"),
        (PipeshardParallel(layer_option=AutoLayerOption(10_000)), "cannot make 10000 layers of a pipeline. Ask for"),
        (PipeshardParallel(stage_option=UniformStageOption(5)), "`num_stages=5` stages cannot be made of 2 layers"),
        (PipeshardParallel(pipeline_schedule="inference"), "`inference` has no backward pass.*Use `1f1b`"),
    ],
)
def test_methods_that_ask_for_what_is_not_there(method: Any, message: str) -> None:
    parallel = minialpa.parallelize(train_step, method=method)
    refused((ShardingError, TraceError), message, parallel, make_params(), make_batch())


def test_a_pipeline_of_a_step_whose_results_need_no_operation() -> None:
    def nothing(params: Any, batch: Any) -> None:
        jax.grad(loss_fn)(params, batch)

    message = "no result of the step needs an operation. Return what the step computes.*or use .*`ShardParallel`"
    refused(TraceError, message, minialpa.parallelize(nothing, method=PipeshardParallel()), make_params(), make_batch())


def test_degrees_of_parallelism_that_do_not_fit() -> None:
    get = minialpa.get_3d_parallel_method
    refused(ShardingError, "4 x 2 x 2 needs 16 devices and there are 8", get, 1, 4, 2, 2)
    refused(ShardingError, "1 x 16 x 1 needs 16 devices and there are 8", get, 1, -1, 16, 1)
    refused(ShardingError, "`operator_parallel` is an integer >= 1; got 0", get, 1, 1, 0, 1)
    refused(ShardingError, "`data_parallel` is -1 or an integer >= 1; got '2'", get, 1, "2", 1, 1)
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
    works(minialpa.parallelize(train_step), make_params(), make_batch())
    minialpa.shutdown()
    minialpa.shutdown()
    minialpa.init(cluster="local", devices_per_host=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cluster": "slurm"}, '`cluster` is "local" or "ray"; got \'slurm\''),
        ({"num_hosts": 2, "devices_per_host": 8}, "2 x 8 devices were asked for and this process has 8"),
        ({"num_hosts": 0}, "0 x 8 devices were asked for"),
        ({"num_hosts": -1}, "-1 x 8 devices were asked for"),
        ({"devices_per_host": 0}, "1 x 0 devices were asked for"),
        ({"num_nodes": 9}, "9 x 0 devices were asked for"),
    ],
)
def test_init_with_what_is_not_there(arguments: dict[str, Any], message: str) -> None:
    refused(MinialpaError, message, lambda: minialpa.init(**arguments))
    minialpa.init()
    works(minialpa.parallelize(train_step), make_params(), make_batch())


# ---- values of traced arrays, and arguments of functions ------------------------------------------------------------


def _chooses(params: Any, batch: Any) -> Any:
    return params if loss_fn(params, batch) > 0 else batch


def _converts(params: Any, batch: Any) -> Any:
    return float(params["w"][0, 0])


def _counts(params: Any, batch: Any, k: Any) -> Any:
    return [params for _ in range(k)]


@pytest.mark.parametrize(
    "step, extra, names, advice",
    [
        (_chooses, (), ("`params['w']`", "`batch['x']`"), "Choose with `jnp.where` or `jax.lax.cond`"),
        (_converts, (), ("`params['w']`",), "Return the value and use it outside"),
        (_counts, (3,), ("`k`",), "static, with `static_argnums`"),
    ],
)
def test_code_that_needs_a_value_is_told_by_the_names_of_the_user(
    step: Any, extra: tuple[Any, ...], names: tuple[str, ...], advice: str
) -> None:
    with pytest.raises(TraceError) as raised:
        minialpa.parallelize(step)(make_params(), make_batch(), *extra)
    text = str(raised.value)
    assert f"{step.__name__} at {__file__}:" in text
    assert all(name in text for name in (*names, advice))
    assert "leaves" not in text and "flat_fun" not in text


def test_arguments_of_functions_in_each_others_places() -> None:
    parallel, params, batch = minialpa.parallelize(train_step), make_params(), make_batch()
    refused(MinialpaError, "`create_state` is a function", minialpa.train, parallel, params, [batch])
    refused(MinialpaError, "looks like a single batch", minialpa.train, parallel, make_params, batch)
    save = functools.partial(minialpa.save_checkpoint, step=1)
    refused(CheckpointError, "is a path, the first argument; got a dict", save, params, "checkpoints")
    plan = functools.partial(minialpa.plan, cluster=minialpa.ClusterSpec.preset("cpu"))
    refused(TraceError, r"is a tuple of all arguments of the step; got a dict", plan, train_step, params)
    message = r'`cluster` is a ClusterSpec, such as `ClusterSpec.preset\("h100"\)`'
    refused(ShardingError, message, lambda: minialpa.plan(train_step, (params, batch), cluster="h100"))  # type: ignore[arg-type]


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_tracebacks_show_the_users_frames_alone_unless_jax_is_asked_for_all(mode: str) -> None:
    package = Path(minialpa.__file__).parent

    def step(params: Any, batch: Any) -> Any:
        return float(jnp.sum(batch["x"] @ params["w"]))

    jax.config.update("jax_traceback_filtering", mode)
    try:
        with pytest.raises(TraceError) as raised:
            minialpa.parallelize(step, method=METHODS["shard"])({"w": np.ones(8)}, {"x": np.ones((16, 8))})
    finally:
        jax.config.update("jax_traceback_filtering", "off")
    for error in (raised.value, raised.value.__cause__):
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        inner = [file for file in files if Path(file).is_relative_to(package)]
        assert __file__ in files
        assert bool(inner) == (mode == "off")


def test_a_device_that_is_listed_twice_is_refused() -> None:
    device = jax.devices()[0]
    parallel = minialpa.parallelize(train_step, method=ShardParallel(devices=[device, device]))
    with pytest.raises(ShardingError, match="more than once"):
        parallel.plan(make_params(), make_batch())
