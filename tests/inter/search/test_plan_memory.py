"""A search keeps a bounded number of its solutions, and finds the same plan for every bound."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest

import minialpa
from benchmarks.planning import planned, traced_step
from benchmarks.recurrent import recogniser_step
from minialpa import AutoLayerOption, AutoParallel, AutoStageOption, ClusterSpec
from minialpa.inter.search import stage_solve, sublayer_solver
from minialpa.inter.search.stage_cost import SublayerCosts
from minialpa.intra.graph.builder import GraphBuilder
from minialpa.tracing.trace import TracedStep

CPUS = ClusterSpec.preset("cpu", num_hosts=1, devices_per_host=4)
METHOD = AutoParallel(
    devices=CPUS,
    layer_option=AutoLayerOption(layer_num=2, remat="auto"),
    stage_option=AutoStageOption(planned_steps=math.inf),
)


def recogniser() -> TracedStep:
    sizes: dict[str, Any] = {"n_frames": 2, "n_features": 8, "hidden": 32, "n_layers": 1, "n_labels": 2}
    return traced_step(*recogniser_step(minialpa.value_and_grad, unrolled=True, **sizes))


class Alive:
    """Counts live objects of a class. None of them may wait for a garbage collector."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: type) -> None:
        self.there: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = self.made = 0
        init = kind.__init__  # type: ignore[misc]

        def counted(one: Any, *args: Any, **kwargs: Any) -> None:
            self.there.add(one)
            self.made += 1
            self.most = max(self.most, len(self.there))
            init(one, *args, **kwargs)

        patch.setattr(kind, "__init__", counted)


@pytest.mark.slow  # other tests of the search have less to keep
def test_with_a_tiny_cache_a_search_keeps_one_solver_and_one_staged_step_and_finds_the_same_plan() -> None:
    traced = recogniser()
    expected = planned(traced, CPUS, METHOD)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (sublayer_solver, "_MOST_STAGED_BYTES"),
            (sublayer_solver, "_MOST_SOLVER_BYTES"),
            (stage_solve, "_MOST_SOLVER_BYTES"),
        ):
            patch.setattr(module, name, 0)
        builders, staged = Alive(patch, GraphBuilder), Alive(patch, SublayerCosts)
        found = planned(traced, CPUS, METHOD)
    assert found == expected
    assert builders.made > 12 and staged.made > 1, (builders.made, staged.made)
    # A kept one and one in the making, for a sublayer and for a whole stage, each folded and unfolded.
    assert builders.most <= 8 and staged.most <= 2, (builders.most, staged.most)
