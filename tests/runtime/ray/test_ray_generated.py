"""Generated models, stages and schedules on a Ray cluster: trained, evaluated by other meshes, and trained on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from ray.cluster_utils import Cluster

import minialpa
from minialpa import ManualLayerOption, ManualStageOption, PipeshardParallel, ShardParallel
from minialpa.testing import assert_allclose
from tests.runtime.ray.ray_cluster import WORKER_ENV

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.slow]

N_HOSTS, DEVICES_PER_HOST = 3, 3
WIDTH = 12


@pytest.fixture(scope="module")
def session(cluster: Cluster) -> Iterator[None]:
    part = {"num_hosts": N_HOSTS, "devices_per_host": DEVICES_PER_HOST}
    minialpa.init(cluster="ray", address=cluster.address, worker_env=WORKER_ENV, **part)
    with jax.numpy_dtype_promotion("standard"):  # for optax
        yield


@dataclass(frozen=True)
class Model:
    """Layers of a network, and what surrounds them.

    skip: the first layer's result is also read by the last layer. tied: the first layer's weight is used again at the
    end. dropout: masks from a key in the state. clip: gradients are clipped by their global norm.
    """

    n_layers: int
    skip: bool
    tied: bool
    dropout: bool
    clip: bool
    optimizer: str

    def init(self) -> Any:
        rng = np.random.default_rng(0)
        ws = [0.3 * rng.standard_normal((WIDTH, WIDTH), np.float32) for _ in range(self.n_layers)]
        params = {"w": ws, "b": [np.zeros((1, WIDTH), np.float32) for _ in ws]}
        return jax.tree.map(
            np.asarray, (params, self._transform().init(params), jax.random.key_data(jax.random.key(5)))
        )

    def _transform(self) -> optax.GradientTransformation:
        chain = {"sgd": optax.sgd(0.1), "momentum": optax.sgd(0.1, 0.9), "adam": optax.adam(1e-2, eps=1e-3)}
        return optax.chain(*[optax.clip_by_global_norm(0.5)] * self.clip, chain[self.optimizer])

    def _outputs(self, params: Any, x: Any, key: Any) -> Any:
        first = x
        for i, (w, b) in enumerate(zip(params["w"], params["b"], strict=True)):
            h = jnp.tanh(x @ w + b)
            if self.dropout:
                h = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, h.shape), h, jnp.zeros_like(h))
            x = h + 0.5 * x
            if i == 0:
                first = x
            if i + 1 < self.n_layers:
                minialpa.mark_pipeline_boundary()
        x = x + first if self.skip else x
        return x @ params["w"][0].T if self.tied else x

    def train_step(self, value_and_grad: Any) -> Callable[[Any, Any], Any]:
        def step(state: Any, batch: Any) -> Any:
            params, moments, data = state
            key = jax.random.wrap_key_data(data)

            def loss_fn(params: Any) -> Any:
                out = self._outputs(params, batch["x"], key)
                return jnp.mean((out - batch["y"]) ** 2), {"rows": jnp.sum(out, axis=1), "largest": jnp.max(out)}

            (loss, metrics), grads = value_and_grad(loss_fn, has_aux=True)(params)
            updates, moments = self._transform().update(grads, moments, params)
            next_data = jax.random.key_data(jax.random.split(key)[0])
            return (optax.apply_updates(params, updates), moments, next_data), {"loss": loss, **metrics}

        return step

    def evaluate(self, state: Any, batch: Any) -> Any:
        out = self._outputs(state[0], batch["x"], jax.random.wrap_key_data(state[2]))
        return {"outputs": out, "loss": jnp.mean((out - batch["y"]) ** 2)}


def batch_of(size: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((size, WIDTH), np.float32) for name in ("x", "y")}


@st.composite
def submeshes(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Submeshes in the order of the devices: runs of whole hosts, and hosts that are cut."""
    out: list[tuple[int, int]] = []
    hosts = draw(st.integers(1, N_HOSTS))
    while hosts:
        if hosts > 1 and draw(st.booleans()):
            n = draw(st.integers(2, hosts))
            out.append((n, DEVICES_PER_HOST))
        else:
            n = 1
            left = DEVICES_PER_HOST
            while left:
                out.append((1, draw(st.integers(1, left))))
                left -= out[-1][1]
        hosts -= n
    return out


@st.composite
def layouts(draw: st.DrawFn, n_layers: int, schedules: tuple[str, ...]) -> PipeshardParallel:
    """Stages for `n_layers` layers; where they are interleaved, runs of layers go round the stages several times."""
    shapes = draw(submeshes().filter(lambda found: len(found) <= n_layers))
    p = len(shapes)
    may_interleave = p == 1 or n_layers // p > 1
    schedule = draw(st.sampled_from([s for s in schedules if may_interleave or s != "1f1b-interleaved"]))
    n_runs = p * (draw(st.integers(1 if p == 1 else 2, n_layers // p)) if schedule == "1f1b-interleaved" else 1)
    ends = [0, *sorted(draw(st.permutations(range(1, n_layers)))[: n_runs - 1]), n_layers]
    runs = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
    layers = [list(itertools.chain(*runs[k::p])) for k in range(p)]
    sizes = [math.prod(shape) for shape in shapes]
    logical = [draw(st.sampled_from([(n // k, k) for k in range(1, n + 1) if n % k == 0])) for n in sizes]
    return PipeshardParallel(
        num_micro_batches=draw(st.sampled_from([1, 2, 3, 4, 6])),
        pipeline_schedule=schedule,
        layer_option=ManualLayerOption(remat=draw(st.booleans())),
        stage_option=ManualStageOption(layers, shapes, logical),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Model, PipeshardParallel, Any]:
    model = draw(
        st.builds(
            Model, st.integers(2, 6), *[st.booleans()] * 4, optimizer=st.sampled_from(["sgd", "momentum", "adam"])
        )
    )
    train = draw(layouts(model.n_layers, ("gpipe", "1f1b", "1f1b-interleaved")))
    evaluate = draw(st.one_of(st.just(ShardParallel()), layouts(model.n_layers, ("inference",))))
    return model, train, evaluate


@pytest.mark.usefixtures("session")
@hypothesis.settings(max_examples=20, phases=[hypothesis.Phase.generate])  # looking for a smaller case takes minutes
@hypothesis.given(cases())
def test_generated_pipelines_equal_the_serial_run(case: tuple[Model, PipeshardParallel, Any]) -> None:
    model, train_method, evaluate_method = case
    train = minialpa.parallelize(model.train_step(minialpa.value_and_grad), method=train_method)
    evaluate = minialpa.parallelize(model.evaluate, method=evaluate_method)
    serial_train, serial_evaluate = jax.jit(model.train_step(jax.value_and_grad)), jax.jit(model.evaluate)
    state = expected = model.init()
    for i, size in enumerate((24, 24, 12)):
        batch = batch_of(size, i)
        state, metrics = train(state, batch)
        expected, expected_metrics = serial_train(expected, batch)
        assert_allclose(metrics, expected_metrics, rtol=1e-4, atol=1e-5)
        if i:
            found = evaluate(state, batch_of(12, 10 + i))
            assert_allclose(found, serial_evaluate(expected, batch_of(12, 10 + i)), rtol=1e-4, atol=1e-5)
    assert_allclose(state, expected, rtol=1e-4, atol=1e-5)
