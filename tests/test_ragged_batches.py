"""A batch that `num_micro_batches` does not divide runs in fewer micro-batches, with the numbers of the serial run."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import minialpa
from minialpa import (
    AutoLayerOption,
    DataParallel,
    InfeasibleError,
    PipeshardParallel,
    ShardParallel,
    Zero3Parallel,
)
from minialpa.data import MeshDriverDataLoader
from minialpa.inter import searched_plan
from minialpa.testing import assert_allclose
from tests.helpers import descent_step
from tests.plans import loss_of, make_batch, make_params, train_step
from tests.runtime.cluster.in_process_session import in_process_session

LAYERS = AutoLayerOption(layer_num=2)
METHODS: dict[str, Any] = {
    "shard": ShardParallel(num_micro_batches=4),
    "pipeline": PipeshardParallel(num_micro_batches=4, layer_option=LAYERS),
}


def runs_as_alone(step: Any, sizes: dict[int, int]) -> list[str]:
    """The warnings of batches of some sizes, each run twice, against the serial run. sizes: their micro-batches."""
    params = expected = make_params()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (*sizes, *sizes):
            params, found = step(params, make_batch(n))
            expected, wanted = train_step(expected, make_batch(n))
            assert_allclose((params, found), (expected, wanted), rtol=1e-5, atol=1e-6)
            assert step.get_last_executable().get_parallel_plan().n_micro_batches == sizes[n]
    return [str(warning.message) for warning in caught]


def test_a_ragged_batch_runs_in_the_most_micro_batches_that_divide_it() -> None:
    step = minialpa.parallelize(train_step, method=METHODS["shard"])
    # More examples than the first batch, and a prime number of them.
    said = runs_as_alone(step, {16: 4, 18: 3, 7: 1})
    assert [message.split(". ")[0] for message in said] == [
        f"A batch of {n} examples cannot be split into 4 equal micro-batches (`num_micro_batches`)" for n in (18, 7)
    ]
    assert "It runs in 3 micro-batches of 6 examples each. Memory" in said[0]


def test_the_first_batch_may_be_ragged() -> None:
    step = minialpa.parallelize(train_step, method=METHODS["shard"])
    assert len(runs_as_alone(step, {6: 3, 16: 4})) == 1
    with pytest.warns(UserWarning, match="10 examples .* runs in 2 micro-batches of 5 examples"):
        plan = minialpa.plan(
            train_step,
            (make_params(), make_batch(10)),
            cluster=minialpa.ClusterSpec.preset("cpu"),
            method=METHODS["shard"],
        )
    assert plan.n_micro_batches == 2


def test_micro_batches_are_those_that_the_devices_divide() -> None:
    """12 examples could be in 4 parts of 3 or 3 parts of 4, which six devices do not divide."""
    step = minialpa.parallelize(train_step, method=DataParallel(jax.local_devices()[:6], num_micro_batches=5))
    (said,) = runs_as_alone(step, {30: 5, 12: 2})
    assert "12 examples cannot be split into 5" in said and "2 micro-batches of 6" in said


def test_a_first_batch_of_which_the_devices_divide_no_part_is_refused() -> None:
    step = minialpa.parallelize(train_step, method=Zero3Parallel(num_micro_batches=4))
    with pytest.raises(InfeasibleError, match="splits the examples over 8 devices") as caught:
        step(make_params(), make_batch(10))
    assert "cannot be split into 4 equal micro-batches" in caught.value.__notes__[0]

    # A later one is split in another way.
    fewer, otherwise = runs_as_alone(step, {32: 4, 10: 2})
    assert "runs in 2 micro-batches of 5 examples" in fewer and "planned without this split" in otherwise


def test_exactness_may_be_asked_for() -> None:
    step = minialpa.parallelize(train_step, method=METHODS["shard"], on_ragged="error")
    for one in (step, pickle.loads(pickle.dumps(step))):
        with pytest.raises(
            minialpa.TraceError, match=r"10 examples cannot be split into 4 equal.* divisors: 1, 2, 5, 10"
        ):
            one(make_params(), make_batch(10))
    with pytest.raises(minialpa.ShardingError, match="`on_ragged` must be 'fewer' or 'error'; got 'drop'"):
        minialpa.parallelize(train_step, on_ragged="drop")


def test_a_step_that_micro_batches_would_change_is_refused_in_fewer_ones_too() -> None:
    def step(params: Any, batch: Any) -> Any:
        jax.debug.print("{}", batch["x"][:, 0])
        return train_step(params, batch)

    parallel = minialpa.parallelize(step, method=METHODS["shard"])
    with pytest.raises(minialpa.TraceError, match="debug"):
        parallel(make_params(), make_batch(10))


def _deep_loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def test_the_stages_of_the_other_batches_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for stages runs once; a ragged batch has its stages and rematerialisation."""
    searches = []
    search = searched_plan.plan_on_searched_stages
    monkeypatch.setattr(
        searched_plan, "plan_on_searched_stages", lambda *args: (searches.append(args), search(*args))[1]
    )
    # Large weights, and links between hosts that are slower than the transfers between stages.
    cluster = minialpa.ClusterSpec.preset("v100-p3.16xlarge", num_hosts=2, devices_per_host=1)
    params = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 4
    batches = [{name: jax.ShapeDtypeStruct((n, 4096), jnp.float32) for name in "xy"} for n in (1024, 1023)]
    layers = AutoLayerOption(layer_num=4, remat="full")
    method = PipeshardParallel(cluster, num_micro_batches=4, layer_option=layers, stage_option="auto")
    step = minialpa.parallelize(descent_step(_deep_loss, minialpa.value_and_grad), method=method)
    first = step.plan(params, batches[0])
    with pytest.warns(UserWarning, match="3 micro-batches of 341"):
        last = step.plan(params, batches[1])
    assert len(searches) == 1
    places = [[(stage.layers, stage.submesh, stage.logical_shape) for stage in plan.stages] for plan in (first, last)]
    assert places[0] == places[1] and len(places[0]) == 2
    assert (first.layer_of_group, first.remat) == (last.layer_of_group, last.remat)


def test_a_plan_from_a_file_gives_its_stages_to_ragged_batches() -> None:
    saved = minialpa.parallelize(train_step, method=METHODS["pipeline"]).plan(make_params(), make_batch(16))
    step = minialpa.parallelize(train_step, method=METHODS["pipeline"])
    step.use_plan(saved)
    assert len(runs_as_alone(step, {16: 4, 6: 3})) == 1
    assert step.plan(make_params(), make_batch(6)).layer_of_group == saved.layer_of_group

    stale = minialpa.parallelize(train_step, method=saved, on_stale="replan")
    fewer, replanned = runs_as_alone(stale, {16: 4, 6: 3})
    assert "runs in 3 micro-batches of 2" in fewer and "The plan was made for another call" in replanned


def test_an_evaluation_on_a_ragged_batch_runs_where_the_state_is() -> None:
    step = minialpa.parallelize(train_step, method=METHODS["pipeline"])
    params, _ = step(make_params(), make_batch(16))
    evaluate = minialpa.parallelize(loss_of, method=PipeshardParallel(num_micro_batches=4))
    with pytest.warns(UserWarning, match="runs in 2 micro-batches of 5 examples"):
        found = evaluate(params, make_batch(10))
    assert_allclose(found, loss_of(jax.device_get(params), make_batch(10)), rtol=1e-5, atol=1e-6)
    meshes = [
        [(s.first_device, s.n_devices) for s in f.get_last_executable().get_parallel_plan().stages]
        for f in (step, evaluate)
    ]
    assert meshes[0] == meshes[1]


def samples(start: int, end: int, batch_size: int) -> Iterator[Any]:
    every = make_batch(42)
    for i in range(start, end, batch_size):
        yield {name: values[i : min(i + batch_size, end)] for name, values in every.items()}


def test_two_epochs_with_ragged_ends_on_workers() -> None:
    """Two and a half batches of 16: workers read the full ones, and the last ones are laid out in fewer parts."""
    step = minialpa.parallelize(train_step, method=METHODS["pipeline"])
    params = expected = make_params()
    with in_process_session(2, 2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.get_executable(params, make_batch(16))
        for _ in range(2):
            with MeshDriverDataLoader(16, 42, samples, step) as loader:
                for batch in loader:
                    params, _ = step(params, batch)
        assert step.get_last_executable().get_parallel_plan().n_micro_batches == 2
        for _ in range(2):
            for batch in samples(0, 42, 16):
                expected, _ = train_step(expected, batch)
        assert_allclose(params, expected, rtol=1e-5, atol=1e-6)
    assert sum("cannot be split" in str(warning.message) for warning in caught) == 1
