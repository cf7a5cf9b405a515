"""Meshes over the hosts of a Ray cluster: models train as on one device, and arrays arrive in all layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa import PipeshardParallel, ShardParallel, UniformStageOption
from minialpa.inter.lower.exported_functions import array_type
from minialpa.programs.program import MeshShape
from minialpa.runtime.cluster.cluster_executable import ClusterExecutable
from minialpa.session import current_session
from minialpa.sharding import specs_of
from minialpa.testing import assert_allclose
from tests.runtime.move_programs import moving
from tests.runtime.ray.ray_cluster import N_NODES, WORKER_ENV, resize
from tests.test_numeric_matrix import SIZES, pipeline, serial_run

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

#: (meshes, hosts of each, devices of each host).
SHORT = (2, 2, 2)
ARRANGEMENTS = [SHORT, (1, 1, 3), (1, 2, 4), (4, 1, 2), (2, 1, 3), (4, 2, 1)]


@pytest.fixture(scope="module")
def arrangement(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[tuple[int, int, int]]:
    """An arrangement, with a session on as many hosts and devices as it uses."""
    n_meshes, n_hosts, n_devices = request.param
    resize(cluster, max(n_meshes * n_hosts, N_NODES))
    minialpa.init(
        cluster="ray",
        address=cluster.address,
        num_hosts=n_meshes * n_hosts,
        devices_per_host=n_devices,
        worker_env=WORKER_ENV,
    )
    yield request.param
    minialpa.shutdown()


@pytest.mark.parametrize(
    ("arrangement", "name"),
    [
        pytest.param(arrangement, name, marks=() if (arrangement, name) == (SHORT, "mlp") else pytest.mark.slow)
        for arrangement in ARRANGEMENTS
        for name in SIZES
    ],
    indirect=["arrangement"],
    ids=str,
)
def test_three_steps_equal_the_serial_run(arrangement: tuple[int, int, int], name: str, tmp_path: Path) -> None:
    n_meshes, n_hosts, n_devices = arrangement
    case, state, expected_metrics, final = serial_run(name)
    schedule, n_micro_batches = "gpipe" if n_hosts == 1 else "1f1b", 1 if name == "resnet" else 4
    method: Any = ShardParallel() if n_meshes == 1 else pipeline(n_meshes, schedule, n_micro_batches)
    step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
    for i, expected in enumerate(expected_metrics):
        state, metrics = step(state, case.make_batch(i, case.batch_size))
        assert_allclose(metrics, expected, rtol=2e-4, atol=1e-6)
    assert_allclose(state.params, final.params, rtol=2e-4, atol=1e-5)
    stages = step.get_last_executable().get_parallel_plan().stages
    assert [stage.n_devices for stage in stages] == [n_hosts * n_devices] * n_meshes
    if arrangement == SHORT:
        _check_debug_info(step.get_last_executable(), tmp_path)


def _check_debug_info(executable: Any, folder: Path) -> None:
    """Every function has its HLO, and every worker describes itself and its instructions."""
    executable.dump_debug_info(folder)
    names = {path.name for path in folder.iterdir()}
    assert {"plan.json", "summary.txt", "placements.txt", "instructions.txt"} <= names
    assert sum(name.endswith(".hlo.txt") for name in names) == len(executable.function_names)
    workers = sorted(name for name in names if name.endswith("-worker.txt"))
    assert workers == [f"stage{i // 2}-host{i}-worker.txt" for i in range(4)]
    for host, name in enumerate(workers):
        text = (folder / name).read_text()
        assert f"stage {host // 2}, host {host}" in text
        assert "Send" in text and "Receive" in text and "Run" in text


def _train_step(value_and_grad: Any) -> Any:
    def train_step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            h = jnp.tanh(batch["x"] @ p["u"])
            minialpa.mark_pipeline_boundary()
            return jnp.mean((h @ p["v"] - batch["x"]) ** 2)

        value, grads = value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g / 8, params, grads), value

    return train_step


@pytest.mark.parametrize("arrangement", [SHORT], indirect=True)
@pytest.mark.usefixtures("arrangement")
def test_large_shards_that_both_meshes_read_arrive_at_both(seed: int) -> None:
    """They go beside the arguments, once to each host, and bfloat16 goes as plain bytes."""
    method = PipeshardParallel(num_micro_batches=1, layer_option="manual", stage_option=UniformStageOption(2))
    step = minialpa.parallelize(_train_step(minialpa.value_and_grad), method=method)
    params = {name: np.eye(64, dtype=jnp.bfloat16) for name in "uv"}
    x = np.random.default_rng(seed).standard_normal((1 << 15, 64), np.float32).astype(jnp.bfloat16)
    expected = jax.jit(_train_step(jax.value_and_grad))(params, {"x": x})
    for placed in (False, True):
        args = step.preshard_dynamic_args(params, {"x": x}) if placed else (params, {"x": x})
        assert_allclose(step(*args), expected, rtol=0.05, atol=1e-6)


# ---- layouts ---------------------------------------------------------------------------------------------------------

SHAPE = (12, 8)


def array_of(i: int) -> Any:
    """Different values, in one of several dtypes; typed keys, too."""
    values = np.random.default_rng(i).integers(0, 2**31, SHAPE)
    kinds = [np.float32, np.int8, np.bool_, jnp.bfloat16, np.float64, np.uint32]
    if i % 7 == 6:
        return jax.random.wrap_key_data(jnp.asarray(np.stack([values, values + 1], -1).astype(np.uint32)))
    return (values % 3 == 0) if kinds[i % 7] is np.bool_ else (values % 251 - 120).astype(kinds[i % 7])


def plain(x: Any) -> Any:
    x = x[...] if isinstance(x, minialpa.arrays.RemoteArray) else x
    return np.asarray(jax.random.key_data(x) if isinstance(x, jax.Array) else x)


@pytest.mark.slow  # tests/inter/lower/test_cross_mesh.py and the tests of transports are the short relatives
@pytest.mark.parametrize("arrangement", [(4, 1, 2)], indirect=True)
@pytest.mark.usefixtures("arrangement")
@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param((MeshShape(0, (2, 2)), MeshShape(4, (2, 2))), id="2x2 to 2x2"),
        pytest.param((MeshShape(0, (2,)), MeshShape(2, (3, 2))), id="1 host to 3"),
        pytest.param((MeshShape(0, (1,)), MeshShape(1, (6,))), id="inside a host and over others"),
    ],
)
def test_all_pairs_of_specs_both_ways(meshes: tuple[MeshShape, MeshShape]) -> None:
    specs = [[spec.partition_spec() for spec in specs_of(SHAPE, mesh.logical_shape)] for mesh in meshes]
    ways = [(a, s, b, t) for a, b in ((0, 1), (1, 0)) for s, t in itertools.product(specs[a], specs[b])]
    arrays = [array_of(i) for i in range(len(ways))]
    types = {i: array_type(x) for i, x in enumerate(arrays)}
    move = ClusterExecutable(current_session().runtime, moving(meshes, ways), types)
    for _ in range(2):
        for way, given, result in zip(ways, arrays, move(arrays), strict=True):
            np.testing.assert_array_equal(plain(result), plain(given), err_msg=str(way))
            assert result.specs == (way[3],) and result.dtype == given.dtype
