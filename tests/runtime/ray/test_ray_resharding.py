"""Arrays of all layouts arrive on another mesh, over hosts, as they are."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa.inter.lower.exported_functions import array_type
from minialpa.programs.program import InputSlot, MeshShape, OutputSlot, Program, Transfer
from minialpa.runtime.cluster.cluster_executable import ClusterExecutable
from minialpa.sharding import specs_of
from tests.runtime.ray.ray_cluster import WORKER_ENV

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

SHAPE = (12, 8)


@pytest.fixture(scope="module", autouse=True)
def _session(cluster: Cluster) -> None:
    minialpa.init(cluster="ray", address=cluster.address, devices_per_host=2, worker_env=WORKER_ENV)


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
    ways = [(a, b, s, t) for a, b in ((0, 1), (1, 0)) for s, t in itertools.product(specs[a], specs[b])]
    n = len(ways)
    program = Program(
        meshes=meshes,
        functions=(),
        inputs=tuple(InputSlot(buffer=i, leaf=i, rows=None, mesh=a, spec=s) for i, (a, _, s, _) in enumerate(ways)),
        constants=(),
        instructions=tuple(Transfer(i, n + i, b, t) for i, (_, b, _, t) in enumerate(ways)),
        outputs=tuple(OutputSlot((n + i,), (b,)) for i, (_, b, _, _) in enumerate(ways)),
        donated_leaves=frozenset(),
        n_buffers=2 * n,
    )
    arrays = [array_of(i) for i in range(n)]
    runtime = minialpa.session.current_session().runtime
    move = ClusterExecutable(runtime, program, {i: array_type(x) for i, x in enumerate(arrays)})
    for _ in range(2):
        for way, given, result in zip(ways, arrays, move(arrays), strict=True):
            np.testing.assert_array_equal(plain(result), plain(given), err_msg=str(way))
            assert result.specs == (way[3],) and result.dtype == given.dtype
