"""What a user sees first: tracebacks with her frames, messages with her names, and options that are checked at once."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import (
    AutoLayerOption,
    AutoParallel,
    AutoShardingOption,
    AutoStageOption,
    ClusterSpec,
    DataParallel,
    DeviceSpec,
    FollowParallel,
    InfeasibleError,
    LinkSpec,
    LogicalMesh,
    ManualLayerOption,
    ManualStageOption,
    MinialpaError,
    PipeshardParallel,
    ShardingError,
    ShardParallel,
    TraceError,
    UniformStageOption,
    Zero2Parallel,
    Zero3Parallel,
)
from minialpa.cluster import KernelRates
from minialpa.models import build
from tests.plans import make_batch, make_params, train_step

pytestmark = pytest.mark.usefixtures("fresh_session")

PACKAGE = Path(minialpa.__file__).parent
CLUSTER = ClusterSpec.preset("cpu")


@pytest.fixture
def filtered() -> Iterator[None]:
    """The default of jax, which the other tests turn off."""
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", "off")


def parallelized(**options: Any) -> Any:
    return minialpa.parallelize(train_step, **options)


def inner_frames(error: BaseException) -> list[str]:
    """The functions of minialpa and jax in the traceback of an error and its causes."""
    found = []
    for line in traceback.TracebackException.from_exception(error).format():
        found += [one for one in line.splitlines() if str(PACKAGE) in one or "/jax/" in one]
    return found


# ---- tracebacks -----------------------------------------------------------------------------------------------------


def wrong_step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> Any:
        raise ValueError("the user's own")

    return minialpa.value_and_grad(loss)(params)


@functools.cache
def a_plan() -> minialpa.Plan:
    return minialpa.plan(train_step, (make_params(), make_batch()), cluster=CLUSTER)


METHODS_OF_FUNCTION = (
    *("__call__", "plan", "get_executable", "lower", "trace", "eval_shape", "phases", "export_specs"),
    "preshard_dynamic_args",
)


@pytest.mark.parametrize("name", METHODS_OF_FUNCTION)
def test_an_error_of_the_step_shows_the_frames_of_the_user_alone(name: str, filtered: None) -> None:
    parallel = minialpa.parallelize(wrong_step, method=ShardParallel())
    with pytest.raises(ValueError, match="the user's own") as raised:
        getattr(parallel, name)(make_params(), make_batch())
    assert not inner_frames(raised.value)
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names[-2:] == ["wrong_step", "loss"]


def call_of_another_shape() -> None:
    executable = minialpa.parallelize(train_step, method=ShardParallel()).get_executable(make_params(), make_batch())
    executable(make_params())


REFUSED: dict[str, Callable[[], Any]] = {
    "option": lambda: AutoShardingOption(memory_limit_bytes="16GB"),  # type: ignore[arg-type]
    "method": lambda: ShardParallel(num_micro_batches="4"),  # type: ignore[arg-type]
    "cluster": lambda: ClusterSpec.preset("a100"),  # type: ignore[arg-type]
    "parallelize": lambda: parallelized(method="pipeshard"),
    "call": lambda: minialpa.parallelize(train_step)(make_params(), {"x": np.array(["a"])}),
    "executable": call_of_another_shape,
    "plan": lambda: minialpa.plan(train_step, make_params(), cluster=CLUSTER),
    "explain": lambda: minialpa.explain(train_step, (), 3, cluster=CLUSTER),  # type: ignore[arg-type]
    "simulate": lambda: minialpa.simulate("plan.json"),  # type: ignore[arg-type]
    "json": lambda: minialpa.Plan.from_json("{}"),
    "train": lambda: minialpa.train(train_step, make_params, []),  # type: ignore[arg-type]
    "loader": lambda: minialpa.DataLoader([], train_step),  # type: ignore[arg-type]
    "checkpoints": lambda: minialpa.CheckpointManager("no such folder", read_only=True),
    "rule": lambda: minialpa.register_sharding_rule("tanhh", "b -> b"),
    "init": lambda: minialpa.init("slurm"),  # type: ignore[arg-type]
    "restart": minialpa.restart,
    "memory": lambda: minialpa.plan(
        train_step,
        (make_params(), make_batch()),
        cluster=CLUSTER,
        method=ShardParallel(auto_sharding_option=AutoShardingOption(memory_limit_bytes=100)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_have_public_types_and_no_frame_of_minialpa(name: str, filtered: None) -> None:
    with pytest.raises(MinialpaError) as raised:
        REFUSED[name]()
    assert not inner_frames(raised.value)
    assert type(raised.value).__name__ in minialpa.__all__
    # Causes inside of minialpa would repeat the message.
    assert not isinstance(raised.value.__cause__ or raised.value.__context__, MinialpaError)


def test_all_frames_are_there_if_jax_is_asked_for_them() -> None:
    with pytest.raises(ShardingError) as raised:
        REFUSED["method"]()
    assert inner_frames(raised.value)


def test_the_cause_of_an_error_shows_the_frames_of_the_user(filtered: None) -> None:
    def converts(params: Any, batch: Any) -> Any:
        return float(jnp.sum(batch["x"] @ params["w"]))

    with pytest.raises(TraceError) as raised:
        minialpa.parallelize(converts)(make_params(), make_batch())
    assert not inner_frames(raised.value)
    cause = raised.value.__cause__
    assert cause is not None and [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["converts"]


def test_a_warning_has_the_line_of_the_user() -> None:
    method = PipeshardParallel(num_micro_batches=3, layer_option=AutoLayerOption(2))
    with pytest.warns(UserWarning, match="cannot be split into 3 equal micro-batches") as warned:
        minialpa.parallelize(train_step, method=method).plan(make_params(), make_batch())
    assert {one.filename for one in warned} == {__file__}


# ---- names in messages of jax ---------------------------------------------------------------------------------------


def step_that_chooses(params: Any, batch: Any) -> Any:
    def chosen_loss(p: Any, x: Any) -> Any:
        return jnp.sum(p["w"]) if jnp.sum(x @ p["w"]) > 0 else jnp.sum(p["v"])

    return minialpa.value_and_grad(chosen_loss)(params, batch["x"])


class _Step:
    def __call__(self, params: Any, batch: Any) -> Any:
        return float(params["w"][0, 0])


def with_mode(scale: float, params: Any, mode: str, *rest: Any) -> Any:
    return float(rest[0]["x"][0, 0]) * scale


@pytest.mark.parametrize(
    ("step", "args", "names"),
    [
        (step_that_chooses, (make_params(), make_batch()), ("function chosen_loss at", "arguments p['w'] and x.")),
        (_Step(), (make_params(), make_batch()), ("function __call__ at", "argument params['w'].")),
        (
            functools.partial(with_mode, 2.0),
            (make_params(), "a", make_batch()),
            ("function with_mode at", "argument rest[0]['x']."),
        ),
    ],
    ids=["loss", "object", "partial"],
)
def test_messages_of_jax_name_functions_and_arguments_of_the_user(step: Any, args: Any, names: Any) -> None:
    parallel = minialpa.parallelize(step)
    for call in (parallel, parallel.trace):
        with pytest.raises((TraceError, jax.errors.ConcretizationTypeError)) as raised:
            call(*args)
        text = str(raised.value)
        assert __file__ in text and "flat_fun" not in text and "leaves" not in text
        # `trace` differentiates as jax does, without a trace of the loss.
        assert all(name in text for name in names) or (call != parallel and step is step_that_chooses), text


def test_a_result_that_is_no_array_is_named() -> None:
    parallel = minialpa.parallelize(lambda params, batch: (params, {"name": "a"}))
    with pytest.raises(TraceError, match=r"The step returns a str as `result\[1\]\['name'\]`\. Return arrays"):
        parallel(make_params(), make_batch())


def test_values_of_other_traces_are_named() -> None:
    kept: list[Any] = []

    def keeping(x: Any) -> Any:
        kept.append(jnp.sum(x))
        return x + kept[0]

    parallel = minialpa.parallelize(keeping)
    parallel(jnp.ones(4))
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"leaked was keeping at .*test_first_contact"):
        parallel(jnp.ones(8))
    with pytest.raises(TraceError, match=r"reads a traced value of type float32\[4\] from an enclosing function"):
        jax.jit(lambda x: minialpa.parallelize(lambda y: y + x)(np.ones(4, np.float32)))(jnp.ones(4))


# ---- steps without results ------------------------------------------------------------------------------------------


def test_a_step_without_a_result_returns_none() -> None:
    for method in (None, ShardParallel(), PipeshardParallel(stage_option="auto")):
        parallel = minialpa.parallelize(lambda x: None, method=method)
        assert parallel(jnp.ones(8)) is None and parallel.plan(jnp.ones(8)).stages


def test_functions_of_parts_of_a_pipelined_state_run_where_it_is() -> None:
    """Also a function that needs no operation, or reads the first stage only."""
    train = minialpa.parallelize(train_step, method=PipeshardParallel(layer_option="manual"))
    state, batch = train.preshard_dynamic_args(make_params(), make_batch())
    train.get_executable(state, batch)
    for method in (None, FollowParallel(train)):
        for fun in (
            lambda params: None,
            lambda params: params,
            lambda params: jnp.sum(params["w"]),
            lambda params: jnp.sum(params["v"]),
        ):
            result = minialpa.parallelize(fun, method=method, donate_argnums=())(state)
            jax.tree.map(np.testing.assert_array_equal, result, fun(make_params()))


# ---- options --------------------------------------------------------------------------------------------------------

DEVICE, LINK = CLUSTER.device, CLUSTER.intra_host
OPTIONS: dict[type, dict[str, Any]] = {
    AutoLayerOption: {},
    AutoParallel: {},
    AutoShardingOption: {},
    AutoStageOption: {},
    ClusterSpec: {
        "num_hosts": 1, "devices_per_host": 8, "device": DEVICE, "intra_host": LINK, "inter_host": LINK,
    },
    DataParallel: {},
    DeviceSpec: {"name": "x", "peak_flops": [("float32", 1e12)], "memory_bytes": 1e9, "memory_bandwidth": 1e9},
    KernelRates: {"product_efficiency": 1.0, "exposed_bytes": 1.0, "memory_efficiency": 1.0, "launch_s": 0.0},
    LinkSpec: {"alpha_s": 1e-6, "beta_s_per_byte": 1e-9},
    LogicalMesh: {"shape": (2, 4)},
    ManualLayerOption: {},
    ManualStageOption: {
        "forward_stage_layer_ids": [[0]], "submesh_physical_shapes": [(1, 8)], "submesh_logical_shapes": [(8,)],
    },
    PipeshardParallel: {},
    ShardParallel: {},
    UniformStageOption: {},
    Zero2Parallel: {},
    Zero3Parallel: {},
}  # fmt: skip
#: No field may have one of these values, except the paths and the name.
WRONG: tuple[Any, ...] = (-1, float("nan"), object, "no such value", [["a"]], (-1, 2), np.ones(3))
TEXTS = {(AutoStageOption, "cached_costs"), (DeviceSpec, "name")}


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_each_field_of_options_is_checked_when_they_are_made(kind: Any) -> None:
    given = OPTIONS[kind]
    kind(**given)
    for field in dataclasses.fields(kind):
        for wrong in WRONG:
            if (kind, field.name) in TEXTS and isinstance(wrong, str):
                continue
            with pytest.raises(ShardingError, match=field.name):
                kind(**{**given, field.name: wrong})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PipeshardParallel(pipeline_schedule="1F1B"), r"got '1F1B'\. Do you mean `1f1b`\?"),
        (lambda: ClusterSpec.preset("a100"), r"`a100`\. Do you mean `a100-40gb` or `a100-80gb`\?"),  # type: ignore[arg-type]
        (lambda: ClusterSpec.preset([]), r"no cluster preset `\[\]`\. Choose"),  # type: ignore[arg-type]
        (lambda: build("gtp"), r"no model `gtp`\. Do you mean `gpt`"),
        (lambda: build("gpt", optimizer="adamm"), r"no optimizer `adamm`\. Do you mean `adam`"),
        (lambda: parallelized(method="zero"), r"Use `Zero2Parallel\(\)` or `Zero3Parallel\(\)`\."),
        (lambda: parallelized(on_stale="replann"), r"got 'replann'\. Do you mean `replan`\?"),
        (lambda: parallelized(metod=None), r"'metod'\. Do you mean `method`\?"),
        (lambda: AutoShardingOption(attention="fuse"), r"got 'fuse'\. Do you mean `fused`\?"),  # type: ignore[arg-type]
        (lambda: ShardParallel(devices=4), r"got 4\. Write `jax\.devices\(\)\[:4\]`\."),  # type: ignore[arg-type]
        (lambda: ShardParallel(devices="h100"), r'Write `ClusterSpec\.preset\("h100"\)`\.'),
        (lambda: ShardParallel(devices=jax.devices()[:1] * 2), "more than once"),
        (lambda: ShardParallel(logical_shape=(2,) * 4), r"a tuple of 1 to 3 integers >= 1 or None; got \(2, 2, 2, 2\)"),
        (
            lambda: DataParallel(auto_sharding_option=AutoShardingOption(allow_replicated_parameters=False)),
            "`DataParallel` replicates parameters, which contradicts `allow_replicated_parameters=False`",
        ),
    ],
)
def test_misspelt_names_and_wrong_devices_are_corrected(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((MinialpaError, TypeError), match=message):
        make()


# ---- advice ---------------------------------------------------------------------------------------------------------


def unmarked(params: Any, batch: Any) -> Any:
    return minialpa.value_and_grad(lambda p: jnp.mean((batch["x"] @ p["w"]) ** 2))(params)


@pytest.mark.parametrize(
    "stages", [UniformStageOption(2), ManualStageOption([[0], [1]], [(1, 4)] * 2, [(4,)] * 2)], ids=["equal", "manual"]
)
def test_stages_of_marked_layers_need_marks(stages: Any) -> None:
    method = PipeshardParallel(layer_option="manual", stage_option=stages)
    with pytest.raises(TraceError, match=r"end at `mark_pipeline_boundary\(\)`, but the step has no such call"):
        minialpa.parallelize(unmarked, method=method).plan(make_params(), make_batch())


@pytest.mark.parametrize(
    ("method", "note"),
    [
        (ShardParallel(num_micro_batches=16), "each of the 16 has one example"),
        (ShardParallel(num_micro_batches=8), None),
        (AutoParallel(), "the search has tried all numbers"),
    ],
    ids=["most", "fewer", "search"],
)
def test_advice_that_is_impossible_has_a_note(method: Any, note: str | None) -> None:
    little = dataclasses.replace(method, auto_sharding_option=AutoShardingOption(memory_limit_bytes=100))
    with pytest.raises(InfeasibleError) as raised:
        minialpa.parallelize(train_step, method=little).plan(make_params(), make_batch())
    notes = " ".join(getattr(raised.value, "__notes__", ()))
    assert ("More micro-batches are impossible" in notes) == (note is not None)
    assert note is None or note in notes
