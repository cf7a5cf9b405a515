"""Steps of several loops over their micro-batches equal the serial run, and their memory falls with the micro-batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from benchmarks.several_loops import descent, sharpness_aware
from minialpa import PipeshardParallel, ShardParallel
from minialpa.methods import Method
from minialpa.testing import assert_allclose


def _deep(params: Any, x: Any) -> Any:
    for k, w in enumerate(params):
        if k == len(params) // 2:
            minialpa.mark_pipeline_boundary()
        x = jnp.tanh(x @ w)
    return x


def _arguments(n_examples: int) -> tuple[Any, Any]:
    """Parameters and a batch of a model whose activations take most of the memory."""
    rng = np.random.default_rng(0)
    params = [0.2 * rng.standard_normal((32, 32)).astype(np.float32) for _ in range(16)]
    return params, rng.standard_normal((n_examples, 32)).astype(np.float32)


def _contrastive_loss(params: Any, x: Any) -> Any:
    z = _deep(params, x)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T)))


def wide_contrastive() -> tuple[Any, Any]:
    return descent(_contrastive_loss), _arguments(256)


def _bytes_beside_parameters(step: Any, args: Any, n: int) -> int:
    """Of the largest compiled program; checks the prediction, too."""
    parallel = minialpa.parallelize(step, method=ShardParallel(jax.devices()[:1], num_micro_batches=n))
    executable = parallel.get_executable(*args)
    found = executable.get_total_allocation_size()
    assert max(executable.get_parallel_plan().cost.peak_bytes) >= 0.9 * found
    return found - sum(w.nbytes for w in args[0])


def _limited(n_bytes: float | None) -> Method:
    option = minialpa.AutoShardingOption(memory_limit_bytes=n_bytes)
    return ShardParallel(num_micro_batches=4, auto_sharding_option=option)


@pytest.mark.slow  # test_a_plan_says_how_many_loops_it_has is the short relative
def test_rows_are_kept_where_there_is_memory_for_them() -> None:
    """A loop back through the model reads per-example values of the first loop; without memory, it recomputes them."""
    step, args = wide_contrastive()
    cluster = minialpa.ClusterSpec.preset("cpu", num_hosts=1, devices_per_host=2)
    kept = minialpa.plan(step, args, cluster=cluster, method=_limited(None))
    n_bytes = 0.8 * max(kept.cost.peak_bytes)
    again = minialpa.plan(step, args, cluster=cluster, method=_limited(n_bytes))
    assert kept.keeps_activations and not again.keeps_activations
    assert max(again.cost.peak_bytes) < n_bytes
    assert kept.cost.compute_s < again.cost.compute_s
    assert "per-example values of earlier loops: kept -> recomputed in later loops" in kept.diff(again)
    for plan in (kept, again):
        assert_allclose(minialpa.parallelize(step, method=plan)(*args), jax.jit(step)(*args), rtol=2e-4, atol=1e-5)


def test_memory_of_a_contrastive_step_falls_with_the_micro_batch() -> None:
    """No program has the activations of the whole batch."""
    step, args = wide_contrastive()
    whole, parts = (_bytes_beside_parameters(step, args, n) for n in (1, 4))
    assert parts < 0.6 * whole


def test_a_plan_says_how_many_loops_it_has() -> None:
    step, args = wide_contrastive()
    cluster = minialpa.ClusterSpec.preset("cpu", num_hosts=1, devices_per_host=2)
    plans = [minialpa.plan(step, args, cluster=cluster, method=ShardParallel(num_micro_batches=n)) for n in (1, 4)]
    assert [plan.n_loops for plan in plans] == [1, 2]
    assert "4 micro-batches in 2 loops that keep per-example values" in plans[1].summary()
    assert minialpa.Plan.from_json(plans[1].to_json()) == plans[1]
    timeline = minialpa.simulate(plans[1])
    assert [one.kind for one in timeline.stages[0].passes] == [*["step"] * 4, "update"] * 2
    assert timeline.total_s == pytest.approx(plans[1].cost.total_s)


def test_with_one_micro_batch_a_second_gradient_passes_all_stages_once_more() -> None:
    step, args = sharpness_aware(lambda params, x: jnp.mean(_deep(params, x) ** 2)), _arguments(4096)
    cluster = minialpa.ClusterSpec.preset("cpu", num_hosts=1, devices_per_host=2)
    method = PipeshardParallel(num_micro_batches=1, layer_option="manual")
    plan = minialpa.plan(step, args, cluster=cluster, method=method)

    passes = [("forward", 1), ("backward", 1), ("forward", 2), ("backward", 2)]
    assert [[(one.kind, one.loop) for one in stage.passes] for stage in plan.stages] == [passes, passes]
    first, second = (sum(one.compute_s for one in stage.passes) for stage in plan.stages)
    assert first == pytest.approx(second, rel=0.1)

    parallel = minialpa.parallelize(step, method=plan)
    assert_allclose(parallel(*args), jax.jit(step)(*args), rtol=2e-4, atol=1e-5)
    assert max(plan.cost.peak_bytes) >= 0.9 * parallel.get_executable(*args).get_total_allocation_size()
