"""Steps in which a loop over micro-batches can be wrong: each equals the serial run, or an error names an operation."""

from __future__ import annotations

import functools

import jax
import pytest

from minialpa import ManualLayerOption, PipeshardParallel, ShardParallel
from minialpa.methods import Method
from tests.equivalence.comparison import Reference, reference
from tests.equivalence.known_steps import JOINED, STEPS
from tests.equivalence.outcomes import Outcome, outcome_of
from tests.equivalence.steps import Training, batch_argnums, make_args, make_step


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
def _reference(training: Training) -> Reference:
    return reference(make_step(training), make_args(training))


def _outcome(training: Training, method: str) -> Outcome:
    step, args = make_step(training), make_args(training)
    expected = lambda n, args: _reference(training)  # noqa: E731
    found = outcome_of(step, args, _method(method), batch_argnums(training), expected)
    assert found.kind in ("equal", "refused"), found.detail
    return found


@pytest.mark.parametrize("step", JOINED)
def test_micro_batches_compute_the_step_which_shows_one_percent(step: str) -> None:
    found = _outcome(JOINED[step], "shard-4")
    assert found.kind == "equal" and found.is_sharp, found.detail


#: Every fifth step always runs.
_IN_PIPELINES = [pytest.param(step, marks=pytest.mark.slow if i % 5 else ()) for i, step in enumerate(STEPS)]


@pytest.mark.parametrize("step", _IN_PIPELINES)
def test_a_pipeline_computes_the_step_or_names_what_it_cannot(step: str) -> None:
    _outcome(STEPS[step], "pipeline-4")


@pytest.mark.slow
@pytest.mark.parametrize("method", ("shard-1", "shard-2", "shard-4", "rematerialised-4", "chosen"))
@pytest.mark.parametrize("step", STEPS)
def test_every_method_computes_the_step_or_names_what_it_cannot(step: str, method: str) -> None:
    found = _outcome(STEPS[step], method)
    assert found.kind == "equal" or method != "shard-1", found.detail
