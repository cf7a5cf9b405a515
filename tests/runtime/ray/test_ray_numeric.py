"""Meshes over the hosts of a Ray cluster: models train as on one device, and arrays arrive in all layouts.

A pipeline of two meshes, one of them over two hosts, is the short relative: test_ray_failures.py trains it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa import ShardParallel
from minialpa.inter.lower.exported_functions import array_type
from minialpa.programs.program import MeshShape
from minialpa.runtime.cluster.cluster_executable import ClusterExecutable
from minialpa.session import current_session
from minialpa.sharding import specs_of
from minialpa.testing import assert_allclose
from tests.runtime.move_programs import moving
from tests.runtime.ray.ray_cluster import N_NODES, resize, start_session
from tests.test_numeric_matrix import SIZES, pipeline, serial_run

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.xdist_group("ray")]

#: (meshes, hosts of each, devices of each host) -> schedule.
SCHEDULES = {
    (2, 2, 2): "1f1b",
    (1, 1, 3): "",
    (1, 2, 4): "",
    (4, 1, 2): "gpipe",
    (2, 1, 3): "zb-v",
    (4, 2, 1): "zb-h1",
}


@pytest.fixture(scope="module")
def arrangement(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[tuple[int, int, int]]:
    """An arrangement, with a session on as many hosts and devices as it uses."""
    n_meshes, n_hosts, n_devices = request.param
    resize(cluster, max(n_meshes * n_hosts, N_NODES))
    start_session(cluster.address, n_meshes * n_hosts, n_devices)
    yield request.param
    minialpa.shutdown()


@pytest.mark.parametrize("arrangement", SCHEDULES, indirect=True, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_three_steps_equal_the_serial_run(arrangement: tuple[int, int, int], name: str) -> None:
    n_meshes, n_hosts, n_devices = arrangement
    case, state, expected_metrics, final = serial_run(name)
    schedule, n_micro_batches = SCHEDULES[arrangement], 1 if name == "resnet" else 4
    method: Any = pipeline(n_meshes, schedule, n_micro_batches) if schedule else ShardParallel()
    step = minialpa.parallelize(case.train_step(minialpa.value_and_grad), method=method)
    for i, expected in enumerate(expected_metrics):
        state, metrics = step(state, case.make_batch(i, case.batch_size))
        assert_allclose(metrics, expected, rtol=2e-4, atol=1e-6)
    assert_allclose(state.params, final.params, rtol=2e-4, atol=1e-5)
    stages = step.get_last_executable().get_parallel_plan().stages
    assert [stage.n_devices for stage in stages] == [n_hosts * n_devices] * n_meshes


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


@pytest.mark.parametrize("arrangement", [(4, 1, 2)], indirect=True)
@pytest.mark.usefixtures("arrangement")
def test_all_pairs_of_specs_both_ways() -> None:
    meshes = MeshShape(0, (2,)), MeshShape(2, (3, 2))  # one host, and the three after it
    specs = [[spec.partition_spec() for spec in specs_of(SHAPE, mesh.logical_shape)] for mesh in meshes]
    ways = [(a, s, b, t) for a, b in ((0, 1), (1, 0)) for s, t in itertools.product(specs[a], specs[b])]
    arrays = [array_of(i) for i in range(len(ways))]
    types = {i: array_type(x) for i, x in enumerate(arrays)}
    move = ClusterExecutable(current_session().runtime, moving(meshes, ways), types)
    for _ in range(2):
        for way, given, result in zip(ways, arrays, move(arrays), strict=True):
            np.testing.assert_array_equal(plain(result), plain(given), err_msg=str(way))
            assert result.specs == (way[3],) and result.dtype == given.dtype
