"""The cost table of layers: each layer on each mesh, from fast to thrifty."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import minialpa
from minialpa import AutoLayerOption, AutoShardingOption, AutoStageOption, ClusterSpec, models
from minialpa.inter.forward import assign_layers
from minialpa.inter.stage_cost import candidates, layer_table
from minialpa.inter.stage_dp import StageCostTable, choose_stages
from minialpa.inter.staging import stage_step
from tests.helpers import trace

CLUSTER = ClusterSpec.preset("a100-80gb", num_hosts=1, devices_per_host=4)
N_LAYERS, N_MICRO_BATCHES = 2, 4


@pytest.fixture(scope="module")
def table() -> StageCostTable:
    case = models.build("gpt", batch_size=64)
    state = jax.eval_shape(case.init, jax.random.key(0))
    traced = trace(case.train_step(minialpa.value_and_grad), state, case.make_batch(0, case.batch_size))
    layers = assign_layers(traced, AutoLayerOption(layer_num=N_LAYERS))
    staged = stage_step(traced, N_MICRO_BATCHES, layers, range(N_LAYERS))
    choices = candidates(CLUSTER, AutoStageOption())
    made, columns = layer_table(staged, CLUSTER, choices, AutoShardingOption(), lambda done, total: None)
    assert [c.n_devices for c in columns] == made.n_devices.tolist()
    assert list(dict.fromkeys(columns)) == choices
    n_prices = len(columns) // len(choices)
    assert n_prices > 1 and columns == [choice for choice in choices for _ in range(n_prices)]
    return made


def kept(table: StageCostTable) -> np.ndarray:
    return table.fixed_bytes + N_MICRO_BATCHES * table.in_flight_bytes


def test_the_first_point_is_fastest_and_the_last_keeps_least(table: StageCostTable) -> None:
    first, last = table.n_devices == 4, table.n_devices == 4
    mesh = np.flatnonzero(first & last)[:3]  # the points of one mesh of all devices
    for layer in range(N_LAYERS):
        seconds = (N_MICRO_BATCHES * table.seconds + table.step_seconds)[layer, layer, mesh]
        bytes_kept = kept(table)[layer, layer, mesh]
        assert seconds[0] == seconds.min()
        assert bytes_kept[-1] == bytes_kept.min() < bytes_kept[0]


def test_thrifty_points_make_stages_fit(table: StageCostTable) -> None:
    def chosen(memory_bytes: float) -> tuple[float, float]:
        found = choose_stages(
            table, n_devices=4, n_micro_batches=N_MICRO_BATCHES, memory_bytes=memory_bytes, schedule="gpipe"
        )
        return found.seconds, max(kept(table)[s.first_layer, s.last_layer, s.candidate] for s in found.stages)

    fast_s, fast_bytes = chosen(1e12)
    thrifty_s, thrifty_bytes = chosen(0.9 * fast_bytes)
    assert thrifty_s > fast_s
    assert thrifty_bytes <= 0.9 * fast_bytes
