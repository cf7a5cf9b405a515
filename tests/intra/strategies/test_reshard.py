"""Resharding: every chain of steps keeps the values, is the cheapest, and has the price of its communication."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from minialpa import LogicalMesh, ShardingError
from minialpa.intra.shard_arrays import take_step
from minialpa.intra.strategies.reshard import partial_specs_of, reshard_table, steps_from
from minialpa.sharding import AXIS_NAMES, Spec

MESHES = (LogicalMesh((8,)), LogicalMesh((2, 4)), LogicalMesh((4, 2), alpha=(1e-3, 1e-6), beta=(1e-9, 1e-10)))
THREE_AXES = LogicalMesh((2, 2, 2), alpha=(1e-3, 1e-5, 1e-6), beta=(1e-9, 3e-10, 1e-10))
SHAPE = (8, 16)


@pytest.mark.parametrize("mesh", (*MESHES[:2], THREE_AXES), ids=lambda m: str(m.shape))
def test_every_step_between_two_specs_keeps_the_values(mesh: LogicalMesh) -> None:
    """From replicated to the spec before, by the step to the spec after, and back to replicated."""
    table = reshard_table(SHAPE, 512.0, mesh)
    replicated = Spec.replicated(2)
    # Of three axes, some steps along two.
    steps = table.steps if len(mesh.shape) < 3 else [step for step in table.steps if len(step.axes) == 2][::3]

    def local(x: Any) -> list[Any]:
        out = []
        for one in steps:
            y = x
            for step in (*table.path(replicated, one.src), one, *table.path(one.dst, replicated)):
                assert y.shape == step.src.shard_shape(SHAPE, mesh.shape)
                y = take_step(y, step, mesh.shape)
            out.append(jnp.abs(y - x).max())
        return out

    names = AXIS_NAMES[: len(mesh.shape)]
    jax_mesh = jax.make_mesh(mesh.shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))
    fun = jax.shard_map(local, mesh=jax_mesh, in_specs=P(), out_specs=P(), check_vma=False)
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    wrong = [step for step, error in zip(steps, jax.jit(fun)(x), strict=True) if error > 1e-5]
    assert not wrong


sizes = st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=0, max_size=3).map(tuple)


@given(sizes, st.sampled_from((*MESHES, THREE_AXES)))
def test_no_detour_is_cheaper_than_the_path(shape: tuple[int, ...], mesh: LogicalMesh) -> None:
    table = reshard_table(shape, 4096.0, mesh)
    n = len(table.number)
    assert list(table.number) == list(partial_specs_of(shape, mesh.shape))
    for k in range(n):
        assert (table.seconds <= table.seconds[:, k, None] + table.seconds[None, k, :] + 1e-18).all()
    for src in table.number:
        for step in steps_from(src, shape, mesh.shape):
            collective = step.collective(4096.0, mesh.shape)
            direct = collective.seconds(mesh) if collective else 0.0
            assert table.cost(src, step.dst) <= direct + 2e-12


@given(sizes, st.sampled_from(MESHES))
def test_a_way_costs_what_its_steps_communicate(shape: tuple[int, ...], mesh: LogicalMesh) -> None:
    table = reshard_table(shape, 4096.0, mesh)
    for src, dst in itertools.product(table.number, repeat=2):
        path = table.path(src, dst)
        assert all(a.dst == b.src for a, b in itertools.pairwise(path))
        collectives = [c for step in path if (c := step.collective(4096.0, mesh.shape))]
        assert table.cost(src, dst) == pytest.approx(sum(c.seconds(mesh) for c in collectives), rel=1e-6, abs=1e-11)


def ways(mesh: LogicalMesh, src: str, dst: str) -> list[str]:
    table = reshard_table((64, 64), 16384.0, mesh)
    return [f"{step.kind} {step.dst}" for step in table.path(Spec.parse(src), Spec.parse(dst))]


def test_one_step_is_enough_where_links_are_alike() -> None:
    mesh = LogicalMesh((2, 4), alpha=(1e-6, 1e-6), beta=(1e-10, 1e-10))
    assert ways(mesh, "R,R", "S01,R") == ["cut S01,R"]
    assert ways(mesh, "R,R+P01", "S01,R") == ["reduce-scatter S01,R"]
    assert ways(mesh, "R,R+P0", "S0,R") == ["reduce-scatter S0,R"]
    assert ways(mesh, "S1,R", "R,S1") == ["all-to-all R,S1"]
    assert ways(mesh, "R,R", "R,R+P0") == ["mask R,R+P0"]


def test_what_is_whole_along_the_fast_axis_crosses_the_slow_one_in_parts() -> None:
    mesh = LogicalMesh((2, 4), alpha=(1e-5, 1e-6), beta=(1e-8, 1e-10))
    assert ways(mesh, "R,R+P0", "R,R") == ["cut S1,R+P0", "all-reduce S1,R", "all-gather R,R"]
    table = reshard_table((64, 64), 16384.0, mesh)
    assert table.cost(Spec.parse("R,R+P01"), Spec.parse("R,R")) == pytest.approx(mesh.all_reduce_s(16384.0, (0, 1)))


def test_forbidden_collectives_are_not_taken() -> None:
    table = reshard_table((8, 8), 256.0, MESHES[0], ("all-gather", "all-to-all"))
    with pytest.raises(ShardingError, match=r"cannot reshard `S0,R` to `R,R`. Remove `allow_all_gather=False`"):
        table.path(Spec.parse("S0,R"), Spec.parse("R,R"))
    assert not np.isfinite(table.cost(Spec.parse("S0,R"), Spec.parse("R,S0")))
    assert np.isfinite(table.cost(Spec.parse("R,R+P0"), Spec.parse("R,S0")))
