"""Prices of collectives along an axis are the bytes that the group of each device sends over the links of hosts."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minialpa import ClusterSpec, LinkSpec
from minialpa.cluster import LogicalMesh


def groups_along(shape: tuple[int, ...], axis: int) -> list[list[int]]:
    """Devices, in row-major order, that differ in this axis alone."""
    places = list(itertools.product(*map(range, shape)))
    found: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(places):
        found.setdefault((*place[:axis], *place[axis + 1 :]), []).append(device)
    return list(found.values())


def sent(groups: list[list[int]], per_host: int, *, to_all: bool) -> float:
    """Most bytes that leave a host, for one byte of each device, in a ring or in an all-to-all."""
    leaving: Counter[int] = Counter()
    for group in groups:
        k = len(group)
        for i, j in itertools.product(range(k), repeat=2):
            if i != j and (to_all or j == (i + 1) % k) and group[i] // per_host != group[j] // per_host:
                leaving[group[i] // per_host] += 1 if to_all else k - 1
    return max(leaving.values(), default=0) / len(groups[0])


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Logical shape, hosts, devices of a host."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)))
    n = LogicalMesh(shape).n_devices
    per_host = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    return shape, n // per_host, per_host


@given(meshes())
def test_prices_of_an_axis_are_the_bytes_over_the_busiest_link(mesh: tuple[tuple[int, ...], int, int]) -> None:
    shape, hosts, per_host = mesh
    inside, between = LinkSpec(1.0, 1e-9), LinkSpec(100.0, 1.0)
    cluster = ClusterSpec(hosts, per_host, ClusterSpec.preset("cpu").device, inside, between)
    view = cluster.logical_mesh((hosts, per_host), shape)
    for axis, k in enumerate(shape):
        groups = groups_along(shape, axis)
        for seconds, bytes_over in (
            (view.all_gather_s(1.0, (axis,)), sent(groups, per_host, to_all=False)),
            (view.all_reduce_s(0.5, (axis,)), sent(groups, per_host, to_all=False)),
            (view.all_to_all_s(1.0, (axis,)), sent(groups, per_host, to_all=True)),
        ):
            expected = 0.0 if k == 1 else 100 + bytes_over if bytes_over else 1.0
            assert seconds == pytest.approx(expected, rel=1e-6)
