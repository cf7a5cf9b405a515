"""Reshardings between meshes move every element to its place, with few bytes, and evenly."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from minialpa import ClusterSpec
from minialpa.cluster import LinkSpec
from minialpa.errors import ShardingError
from minialpa.inter.lower.cross_mesh import (
    Crossing,
    ReshardingCandidate,
    plan_resharding,
    resharding_candidates,
    resharding_s,
)
from minialpa.programs.program import MeshShape
from minialpa.programs.resharding import Box, Resharding, n_elements
from minialpa.sharding import AXIS_NAMES, Spec

ITEM = 4
INTER = LinkSpec(1e-5, 1e-9)


def cluster(num_hosts: int, devices_per_host: int) -> ClusterSpec:
    like = ClusterSpec.preset("a100-80gb")
    return ClusterSpec(num_hosts, devices_per_host, like.device, like.intra_host, INTER)


def all_specs(ndim: int, n_axes: int) -> Iterator[P]:
    """Each mesh axis on one dimension or replicated, in either order if both are on the same dimension."""
    for dims in itertools.product([None, *range(ndim)], repeat=n_axes):
        for order in itertools.permutations(range(n_axes)):
            names = [tuple(AXIS_NAMES[axis] for axis in order if dims[axis] == d) for d in range(ndim)]
            if order == tuple(range(n_axes)) or any(len(dim) > 1 for dim in names):
                yield P(*names)


def shards(shape: tuple[int, ...], mesh: MeshShape, spec: P) -> dict[int, tuple[slice, ...]]:
    """The slices that jax puts on each device of a mesh, by device number."""
    n = math.prod(mesh.logical_shape)
    grid = np.array(jax.devices()[:n]).reshape(mesh.logical_shape)
    sharding = NamedSharding(Mesh(grid, AXIS_NAMES[: grid.ndim]), spec)
    indices = sharding.devices_indices_map(shape)
    return {mesh.first_device + i: indices[device] for i, device in enumerate(grid.flat)}


def bytes_per_link(resharding: Resharding, devices_per_host: int) -> dict[tuple[int, int], int]:
    """(sending host, receiving host) -> bytes."""
    n_bytes: dict[tuple[int, int], int] = defaultdict(int)
    for move in resharding.moves:
        link = move.source // devices_per_host, move.targets[0] // devices_per_host
        n_bytes[link] += n_elements(move.box) * resharding.item_bytes
    return n_bytes


def index(box: Box, outer: Box | None = None) -> tuple[slice, ...]:
    bases = [0] * len(box) if outer is None else [start for start, _ in outer]
    return tuple(slice(start - base, stop - base) for (start, stop), base in zip(box, bases, strict=True))


def crossing(
    shape: tuple[int, ...],
    source: MeshShape,
    source_spec: P,
    target: MeshShape,
    target_spec: P,
    cluster: ClusterSpec,
) -> Crossing:
    return Crossing(
        shape=shape,
        item_bytes=ITEM,
        source=source,
        source_spec=source_spec,
        target=target,
        target_spec=target_spec,
        cluster=cluster,
    )


def candidates_of(case: Crossing) -> list[ReshardingCandidate]:
    return list(resharding_candidates(case))


def elements_of_hosts(case: Crossing, parts: dict[int, tuple[slice, ...]]) -> dict[int, set[int]]:
    """The elements, by number, that the devices of each host have together. parts: of each device."""
    numbers = np.arange(math.prod(case.shape)).reshape(case.shape)
    out: dict[int, set[int]] = defaultdict(set)
    for device, part in parts.items():
        out[device // case.cluster.devices_per_host].update(numbers[part].ravel().tolist())
    return out


def check(case: Crossing, candidate: ReshardingCandidate) -> None:
    """The moves put the right values everywhere, with the least bytes."""
    resharding = candidate.resharding
    check_order(resharding, case.cluster.devices_per_host)
    check_values(case, resharding)
    check_bytes(case, resharding)
    check_seconds(case, candidate)
    tiles = shards(case.shape, case.target, case.target_spec)
    for device, box in resharding.landing_boxes:
        for (start, stop), wanted, size in zip(box, tiles[device], case.shape, strict=True):
            first, last, _ = wanted.indices(size)
            assert first <= start <= stop <= last  # gathering then adds slices and exchanges no others
    if candidate.way != "gather":
        assert resharding.landing == case.target_spec


def check_order(resharding: Resharding, devices_per_host: int) -> None:
    """A move has one receiving host, which has not begun to relay, so no two hosts wait for each other."""
    relaying: set[int] = set()
    for move in resharding.moves:
        (host,) = {device // devices_per_host for device in move.targets}
        assert host not in relaying and len(set(move.targets)) == len(move.targets)
        if move.relayed:
            relaying.add(move.source // devices_per_host)


def check_values(case: Crossing, resharding: Resharding) -> None:
    x = np.random.default_rng(0).permutation(math.prod(case.shape)).reshape(case.shape) + 1
    held = {device: x[part] for device, part in shards(case.shape, case.source, case.source_spec).items()}
    wanted = {device: x[part] for device, part in shards(case.shape, case.target, resharding.landing).items()}
    landed = {device: np.zeros(part.shape, int) for device, part in wanted.items()}
    sources, landing = dict(resharding.source_boxes), dict(resharding.landing_boxes)
    assert sources.keys() == held.keys() and landing.keys() == landed.keys()
    for move in resharding.moves:
        boxes, values = (landing, landed) if move.relayed else (sources, held)
        part = values[move.source][index(move.box, boxes[move.source])]
        assert part.shape == tuple(stop - start for start, stop in move.box) and part.all()
        for device in move.targets:
            place = landed[device][(*index(move.box, landing[device]), ...)]
            assert not place.any()
            place[...] = part
    for device, part in wanted.items():
        np.testing.assert_array_equal(landed[device], part)


def check_bytes(case: Crossing, resharding: Resharding) -> None:
    """Each host gets each needed element once, and no element that it already has."""
    received: dict[tuple[int, bool], int] = defaultdict(int)
    for (sender, host), n_bytes in bytes_per_link(resharding, case.cluster.devices_per_host).items():
        received[host, sender == host] += n_bytes
    has = elements_of_hosts(case, shards(case.shape, case.source, case.source_spec))
    needed = elements_of_hosts(case, shards(case.shape, case.target, resharding.landing))
    for host, needs in needed.items():
        assert received.pop((host, True), 0) == ITEM * len(needs & has.get(host, set()))
        assert received.pop((host, False), 0) == ITEM * len(needs - has.get(host, set()))
    assert not received


def check_seconds(case: Crossing, candidate: ReshardingCandidate) -> None:
    """At least the time of each host to send and to receive its bytes."""
    ports: dict[tuple[bool, int], int] = defaultdict(int)
    for (sender, host), n_bytes in bytes_per_link(candidate.resharding, case.cluster.devices_per_host).items():
        if sender != host:
            ports[True, sender] += n_bytes
            ports[False, host] += n_bytes
    assert candidate.seconds >= max(ports.values(), default=0) * INTER.beta_s_per_byte * (1 - 1e-12)


def check_choice(case: Crossing, candidates: list[ReshardingCandidate]) -> None:
    chosen, best = resharding_s(plan_resharding(case), case), min(c.seconds for c in candidates)
    assert best == pytest.approx(chosen, rel=1e-8)
    if candidates[0].seconds == pytest.approx(best, rel=1e-12):
        assert plan_resharding(case) == candidates[0].resharding


@st.composite
def cases(draw: st.DrawFn) -> Crossing:
    """Meshes of up to 8 devices that may begin inside a host, and may overlap."""
    lengths = [(n,) for n in range(1, 9)] + [(a, b) for a in range(1, 5) for b in range(1, 5) if a * b <= 8]
    source = MeshShape(draw(st.integers(0, 8)), draw(st.sampled_from(lengths)))
    target = MeshShape(draw(st.integers(0, 8)), draw(st.sampled_from(lengths)))
    ndim = draw(st.integers(0, 3))
    specs = [draw(st.sampled_from(list(all_specs(ndim, len(m.logical_shape))))) for m in (source, target)]
    parts = [Spec.of(spec, ndim).dims for spec in specs]
    shape = tuple(
        draw(st.integers(0, 3))
        * math.lcm(*(math.prod(m.logical_shape[a] for a in p[d]) for m, p in zip((source, target), parts, strict=True)))
        for d in range(ndim)
    )
    stop = max(mesh.first_device + math.prod(mesh.logical_shape) for mesh in (source, target))
    devices_per_host = draw(st.sampled_from([1, 2, 3, 4, 8]))
    hosts = cluster(-(-stop // devices_per_host), devices_per_host)
    return crossing(shape, source, specs[0], target, specs[1], hosts)


@given(cases())
def test_any_array_crosses_between_any_meshes(case: Crossing) -> None:
    candidates = candidates_of(case)
    for candidate in candidates:
        check(case, candidate)
    check_choice(case, candidates)
    assert candidates_of(case) == candidates


# ---- senders and turns -----------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_hosts_with_copies_share_the_sending(n_sources: int, n_targets: int, devices: int, cut: bool) -> None:
    """Each of `n_sources` hosts sends to `ceil(n_targets / n_sources)` others at most; each gets all from one."""
    source = MeshShape(0, (n_sources, devices))
    target = MeshShape(n_sources * devices, (n_targets, devices))
    spec = P("y") if cut else P()
    case = crossing((6,), source, spec, target, spec, cluster(n_sources + n_targets, devices))
    links = bytes_per_link(candidates_of(case)[0].resharding, devices)
    assert sorted(host for _, host in links) == list(range(n_sources, n_sources + n_targets))
    assert set(links.values()) == {6 * ITEM}
    assert max(Counter(sender for sender, _ in links).values()) == -(-n_targets // n_sources)


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 8))
def test_devices_with_copies_share_the_sending(n_copies: int, n_parts: int, n_targets: int) -> None:
    source, target = MeshShape(0, (n_copies,)), MeshShape(n_copies, (n_targets, n_parts))
    case = crossing((n_parts,), source, P(), target, P("y"), cluster(2, 64))
    assert target.first_device + n_targets * n_parts <= 128
    direct = candidates_of(case)[0].resharding
    sent: dict[int, int] = defaultdict(int)
    for move in direct.moves:
        sent[move.source] += n_elements(move.box)
    assert max(sent.values()) == -(-sum(sent.values()) // n_copies)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3))
def test_hosts_that_all_send_to_all_do_not_wait_for_each_other(n_sources: int, n_targets: int, devices: int) -> None:
    source = MeshShape(0, (n_sources * devices,))
    target = MeshShape(n_sources * devices, (n_targets * devices,))
    shape = (n_sources * devices, n_targets * devices)
    case = crossing(shape, source, P("x"), target, P(None, "x"), cluster(n_sources + n_targets, devices))
    message_s = INTER.transfer_s(ITEM * devices * devices)
    assert resharding_s(plan_resharding(case), case) == pytest.approx(max(n_sources, n_targets) * message_s)


def test_a_copy_on_the_host_itself_is_taken_and_from_the_device_itself_if_it_can() -> None:
    case = crossing((4,), MeshShape(0, (8,)), P(), MeshShape(3, (2,)), P("x"), cluster(4, 2))
    assert [(move.source, move.targets) for move in plan_resharding(case).moves] == [(3, (3,)), (4, (4,))]


# ---- ways ------------------------------------------------------------------------------------------------------------


def replicated(n_hosts: int, shape: tuple[int, ...]) -> Crossing:
    """From one host of two devices to `n_hosts` hosts, each with the whole array."""
    return crossing(shape, MeshShape(0, (2,)), P(), MeshShape(2, (n_hosts, 2)), P(), cluster(1 + n_hosts, 2))


def way(case: Crossing) -> str:
    return next(c.way for c in candidates_of(case) if c.resharding == plan_resharding(case))


@pytest.mark.parametrize("n_hosts", [2, 7])
def test_hosts_that_have_the_array_relay_it_so_that_twice_as_many_have_it(n_hosts: int) -> None:
    case = replicated(n_hosts, (10**6 + 1,))  # odd, so a gather does not apply
    message_s = INTER.transfer_s(ITEM * (10**6 + 1))
    resharding = plan_resharding(case)
    assert resharding_s(resharding, case) == pytest.approx(rounds(1, n_hosts) * message_s)
    assert candidates_of(case)[0].seconds == pytest.approx(n_hosts * message_s)
    assert any(move.relayed for move in resharding.moves) == (n_hosts > 2)


def rounds(n_sources: int, n_targets: int) -> int:
    """The number of rounds, if each host with the array sends it to one host per round."""
    served = number = 0
    while served < n_targets:
        served, number = served + n_sources + served, number + 1
    return number


@given(st.integers(1, 4), st.integers(1, 24), st.sampled_from([P(), P("x"), P("y")]), st.sampled_from([P(), P("y")]))
def test_hosts_relay_without_waiting(n_sources: int, n_targets: int, spec: P, wanted: P) -> None:
    """The hosts of the source count as one copy of the array, whether each has it whole or a part."""
    source, target = MeshShape(0, (n_sources, 2)), MeshShape(2 * n_sources, (n_targets, 2))
    case = crossing((12 * 24,), source, spec, target, wanted, cluster(n_sources + n_targets, 2))
    for candidate in candidates_of(case):
        check_order(candidate.resharding, 2)
        if candidate.way == "broadcast":
            a_round_s = n_sources * INTER.alpha_s + 12 * 24 * ITEM * INTER.beta_s_per_byte
            assert candidate.seconds <= rounds(n_sources, n_targets) * a_round_s * (1 + 1e-9)


def test_large_arrays_are_gathered_and_small_ones_sent() -> None:
    assert way(replicated(2, (8 * 10**6,))) == "gather"
    assert way(replicated(2, (8,))) == "direct"
    assert way(replicated(2, (10**6 + 1,))) == "direct"  # relayed by one host, it would take as long
    assert way(replicated(4, (8,))) == "broadcast"


def test_a_tile_is_gathered_inside_itself() -> None:
    case = crossing((4096, 4096), MeshShape(0, (4,)), P("x"), MeshShape(4, (4, 2)), P(None, "y"), cluster(6, 2))
    assert plan_resharding(case).landing == P("x", "y")


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shape": (3, 4)}, r"splits a dimension of length 3, of an array of shape \(3, 4\), into 2 parts"),
        ({"source_spec": P("x", "x")}, "has an axis twice"),
        ({"target_spec": P("w")}, "does not fit an array of 2 dimensions.*axes from x, y, z"),
        ({"target": MeshShape(3, (2,))}, "devices 3 to 4, but the cluster has 4 devices"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    case = crossing((4, 4), MeshShape(0, (2,)), P("x"), MeshShape(2, (2,)), P("x"), cluster(2, 2))
    with pytest.raises(ShardingError, match=message):
        plan_resharding(dataclasses.replace(case, **change))
