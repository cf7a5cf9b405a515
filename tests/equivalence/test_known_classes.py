"""Steps that a loop over micro-batches can get wrong: each equals the serial run, or an error names the operation."""

from __future__ import annotations

import functools

import jax
import pytest

from minialpa import ManualLayerOption, PipeshardParallel, ShardParallel
from minialpa.methods import Method
from tests.equivalence.comparison import Reference, reference
from tests.equivalence.known_steps import STEPS
from tests.equivalence.outcomes import Outcome, outcome_of
from tests.equivalence.steps import batch_argnums, make_args, make_step

METHODS = ("shard-1", "shard-2", "shard-4", "pipeline-4", "rematerialised-4", "chosen")


def _method(name: str) -> Method | None:
    kind, _, n = name.partition("-")
    devices = jax.devices()[:2]
    match kind:
        case "shard":
            return ShardParallel(devices, int(n))
        case "pipeline":
            return PipeshardParallel(devices, int(n), layer_option="manual")
        case "rematerialised":
            return PipeshardParallel(devices, int(n), layer_option=ManualLayerOption(remat=True))
    return None


@functools.cache
def _reference(name: str) -> Reference:
    return reference(make_step(STEPS[name]), make_args(STEPS[name]))


def _outcome(step: str, method: str) -> Outcome:
    training = STEPS[step]
    found = outcome_of(
        make_step(training),
        make_args(training),
        _method(method),
        batch_argnums(training),
        lambda n, args: _reference(step),
    )
    assert found.kind in ("equal", "refused"), found.detail
    return found


@pytest.mark.parametrize("step", STEPS)
def test_micro_batches_compute_the_step_or_name_what_they_cannot(step: str) -> None:
    _outcome(step, "shard-4")


#: Every fifth of them always runs.
_IN_PIPELINES = [pytest.param(step, marks=pytest.mark.slow if i % 5 else ()) for i, step in enumerate(STEPS)]


@pytest.mark.parametrize("step", _IN_PIPELINES)
def test_a_pipeline_computes_the_step_or_names_what_it_cannot(step: str) -> None:
    _outcome(step, "pipeline-4")


@pytest.mark.slow
@pytest.mark.parametrize("method", set(METHODS) - {"shard-4", "pipeline-4"})
@pytest.mark.parametrize("step", STEPS)
def test_every_method_computes_the_step_or_names_what_it_cannot(step: str, method: str) -> None:
    found = _outcome(step, method)
    assert found.kind == "equal" or method != "shard-1", found.detail


def test_every_step_is_determined_well_enough_to_see_one_percent() -> None:
    assert [name for name in STEPS if not _reference(name).is_sharp] == []
