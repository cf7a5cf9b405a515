"""Bounds of costs hold, and updated tables equal tables that are computed from scratch."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from minialpa import ClusterSpec
from minialpa.inter.search.stage_bounds import StageBounds
from minialpa.inter.search.stage_tables import place_of
from tests.inter.search.test_joint_search import V100, bounds_of, mlp, traced_model

HOSTS = dataclasses.replace(V100, num_hosts=2)


def check_bounds(bounds: StageBounds, seed: int, n_columns: int) -> None:
    """Solve columns in some order. Each cost is at least its lower bound before."""
    rng = random.Random(seed)
    all_columns = [(n, c) for n in bounds.numbers for c in range(len(bounds.columns))]
    for n, c in rng.sample(all_columns, min(n_columns, len(all_columns))):
        tables = bounds.tables[n]
        for sublayer in range(bounds.sublayers.n_sublayers):
            before = {name: values[sublayer, c] for name, values in tables.by_name.items()}
            while not tables.solved[sublayer, c]:
                before = {name: values[sublayer, c] for name, values in tables.by_name.items()}
                bounds.raise_bound(n, sublayer, c)
            for name, value in before.items():
                assert value <= tables.by_name[name][sublayer, c] * (1 + 1e-9), (name, n, sublayer, bounds.columns[c])


def test_bounds_are_at_most_the_costs() -> None:
    check_bounds(bounds_of(mlp(2, 4096, 1024), V100, (1, 2, 8), ("none", "full")), 0, 60)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cluster"), [("gpt", HOSTS), ("moe", V100), ("llama", V100)])
def test_bounds_are_at_most_the_costs_of_models(name: str, cluster: ClusterSpec) -> None:
    """Tiny models: latency, which a few collectives share, takes most of the time."""
    sizes = {} if name == "moe" else {"n_layers": 1, "hidden": 128, "seq_len": 64}
    traced = traced_model(name, batch_size=32, **sizes)
    check_bounds(bounds_of(traced, cluster, (1, 2, 4, 16), ("none", "dots", "full")), 1, 60)


def test_tables_that_are_kept_are_those_that_are_made_anew() -> None:
    bounds = bounds_of(mlp(3, 512), V100, (2, 8), ("none", "full"))
    rng = random.Random(0)
    for _ in range(6):
        c = rng.randrange(len(bounds.columns))
        sublayer = rng.randrange(bounds.sublayers.n_sublayers)
        bounds.raise_bound(8, sublayer, c)
        found = bounds.choose(8)
        bounds.tables[8].learn(place_of(found.stages[0]), 1e-3 * rng.random(), 1e-4)
        bounds.tables[8].exclude(place_of(found.stages[-1]), 1)
        for n in bounds.numbers:
            tables = bounds.tables[n]
            kept = {f.name: np.array(getattr(tables.table(), f.name)) for f in dataclasses.fields(tables.table())}
            tables.change(np.arange(len(bounds.columns)))
            for name, values in kept.items():
                np.testing.assert_array_equal(values, getattr(tables.table(), name))


def test_a_stage_that_does_not_fit_rules_out_larger_ones_with_no_more_rematerialisation() -> None:
    bounds = bounds_of(mlp(4, 512), V100, (8,), ("none", "full"))
    tables, n_live = bounds.tables[8], 2
    c = next(c for c in range(len(bounds.columns)) if bounds.columns[c].remat == "none")
    tables.exclude((1, 2, c), n_live)
    table, memory = tables.table(), bounds.columns.memory_bytes
    needed = np.array(table.fixed_bytes) + n_live * np.array(table.in_flight_bytes)
    for other, column in enumerate(bounds.columns.columns):
        excluded = column.candidate == bounds.columns[c].candidate and column.remat == "none"
        for i, j in [(1, 2), (0, 2), (1, 3), (0, 3), (1, 1), (2, 2)]:
            is_larger = i <= 1 and j >= 2
            assert (needed[i, j, other] > memory[other]) == (excluded and is_larger), (i, j, column)


def test_a_search_that_starts_from_a_pipeline_finds_no_worse_one_than_another() -> None:
    """Bounds rise, so the last pipeline and its slowest stage limit the next search."""
    bounds, anew = (bounds_of(mlp(4, 512), V100, (8,), ("none", "full")) for _ in range(2))
    rng = random.Random(1)
    for _ in range(12):
        found = bounds.choose(8)
        for one in bounds.unsolved(8, found)[:1] or []:
            for each in (bounds, anew):
                each.raise_bound(8, one.sublayer, one.column)
        anew.tables[8].chosen = None
        bounds.tables[8].changed |= rng.random() < 0.5
        first, second = bounds.choose(8).seconds, anew.choose(8).seconds
        assert math.isclose(first, second, rel_tol=bounds.space.tolerance)
