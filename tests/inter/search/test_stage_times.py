"""Seconds of collectives that the work of a program hides, by their operands and readers."""

from __future__ import annotations

import pytest

from minialpa import ClusterSpec
from minialpa.cost import GPU_COMBINED_BYTES, Collective, is_gpu
from minialpa.inter.search.stage_times import _communication_s
from minialpa.intra.spmd import Communication
from minialpa.intra.strategies.combining import WITH_GRADIENTS

MESH = ClusterSpec.preset("h100", devices_per_host=8).logical_mesh((1, 8), (8,))
#: Seconds of work, enough to hide all collectives.
WORK_S = 10.0


def _sum(n_bytes: float, *, can_hide: bool) -> Communication:
    return Communication(Collective("all-reduce", n_bytes, (0,)), 1, WITH_GRADIENTS, can_hide=can_hide)


def _gather(n_bytes: float, *, after: int) -> Communication:
    return Communication(Collective("all-gather", n_bytes, (0,)), 1, None, can_hide=True, after=1 << after)


def test_a_gradient_that_is_summed_with_the_last_one_is_not_hidden_nor_what_waits_for_it() -> None:
    assert MESH.device is not None and is_gpu(MESH.device)
    small, large = GPU_COMBINED_BYTES / 4, GPU_COMBINED_BYTES * 3 / 4
    together = [_sum(small, can_hide=True), _sum(small, can_hide=False), _gather(small, after=0)]
    exposed_s, hidden_s = _communication_s(together, MESH, WORK_S, {})
    whole = Collective("all-reduce", 2 * small, (0,)).seconds(MESH)
    assert hidden_s == 0 and exposed_s == pytest.approx(whole + together[2].collective.seconds(MESH))

    apart = [_sum(large, can_hide=True), _sum(large, can_hide=False), _gather(small, after=0), _gather(small, after=1)]
    first, last, hidden, waiting = (one.collective.seconds(MESH) for one in apart)
    slowed = MESH.device.contention * (first + hidden)  # the work beside them
    expected = last + waiting + slowed, first + hidden - slowed
    assert _communication_s(apart, MESH, WORK_S, {}) == pytest.approx(expected)


@pytest.mark.parametrize("work_s", [0.0, 1e-4, 1.0])
def test_collectives_beside_work_slow_it_or_outlast_it(work_s: float) -> None:
    assert MESH.device is not None
    one = _sum(GPU_COMBINED_BYTES / 2, can_hide=True)
    seconds, contention = one.collective.seconds(MESH), MESH.device.contention
    exposed_s, hidden_s = _communication_s([one], MESH, work_s, {})
    assert exposed_s == pytest.approx(max(contention * seconds, seconds - work_s))
    assert exposed_s + hidden_s == pytest.approx(seconds)
