"""The equivalence engine: an example in, what becomes of it out; and a smaller example with the same fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from minialpa.calls import Parameters
from minialpa.errors import ShardingError
from tests.attention_calls import blocks_of
from tests.equivalence.comparison import MANY_RUNS, N_RUNS, Reference, reference
from tests.equivalence.drawing import Example
from tests.equivalence.losses import Loss
from tests.equivalence.model import Model
from tests.equivalence.outcomes import Outcome, outcome_of
from tests.equivalence.steps import Training, batch_argnums, make_args, make_step
from tests.equivalence.ways import FLAGS, Way, make_method, spread_specs


def run(example: Example) -> Outcome:
    """Runs the step of `example` as it says, and compares it with the serial run.

    What differs by little more than a few serial runs do is compared with many. Raises what the serial run raises: then
    the grammar is at fault.
    """
    with blocks_of(2):
        found = _run(example, N_RUNS)
        return _run(example, MANY_RUNS) if found.kind == "wrong" else found


def _run(example: Example, n_runs: int) -> Outcome:
    training = example.training

    before = make_args(dataclasses.replace(training, batch_size=example.way.first)) if example.way.first else None

    def reference_for(ghosts: int, args: Sequence[Any]) -> Reference:
        ghosts = ghosts if training.model.has_batch_norm else 1
        return reference(make_step(training, ghosts), args, n_runs=n_runs)

    try:
        method = make_method(example.way, _spread(example))
    except ShardingError as error:
        return Outcome("rejected", f"ShardingError: {error}")
    found = outcome_of(
        make_step(training),
        make_args(training),
        method,
        batch_argnums(training),
        reference_for,
        before,
        (example.way.flag, FLAGS[example.way.flag]) if example.way.flag else None,
    )
    if found.kind == "crash":
        reference_for(1, make_args(training))
    return found


def _spread(example: Example) -> tuple[tuple[str, PartitionSpec], ...]:
    """Shardings of arguments that the example asks for."""
    training, way = example.training, example.way
    if not way.spread:
        return ()
    parameters = Parameters(make_step(training), static=((), ()), donate=((), ()), batch=batch_argnums(training))
    call = parameters.bind(make_args(training), {})
    paths, _ = parameters.paths(call)
    pairs = list(zip(paths, call.leaves, strict=True))
    return spread_specs(pairs, way.mesh, way.n, training.batch_size, way.spread)


def smaller(example: Example, outcome: Outcome) -> Example:
    """A smallest example with the same outcome, as far as one change at a time leads."""
    wanted = (outcome.kind, "" if outcome.kind == "wrong" else outcome.reason)
    while True:
        for candidate in _simpler(example):
            try:
                found = run(candidate)
            except Exception:
                continue  # the grammar's own fault
            if (found.kind, "" if found.kind == "wrong" else found.reason) == wanted:
                example = candidate
                break
        else:
            return example


def _simpler(example: Example) -> Iterator[Example]:
    for way in _simpler_ways(example.way):
        yield Example(example.training, way)
    for training in _simpler_trainings(example.training):
        yield Example(training, example.way)


def _simpler_ways(way: Way) -> Iterator[Way]:
    names = ("attention", "first", "gpus", "casts_once", "flag", "spread")
    kept: dict[str, Any] = {name: getattr(way, name) for name in names}
    for candidate in (
        Way("shard", (1,), way.n, **kept),
        Way("shard", (2,), way.n, **kept),
        Way("pipeline", (2,), way.n, **kept),
    ):
        if way.kind != candidate.kind or len(way.mesh) > 1 or way.mesh > candidate.mesh or way.remat != candidate.remat:
            yield candidate
    if way.first:
        yield dataclasses.replace(way, first=0)
    if way.attention != "auto":
        yield dataclasses.replace(way, attention="auto")
    if way.flag:
        yield dataclasses.replace(way, flag="")
    if way.spread:
        yield dataclasses.replace(way, spread=0)
    if way.n > 2:
        yield dataclasses.replace(way, n=2)
    for name in ("gpus", "casts_once"):
        if getattr(way, name):
            yield dataclasses.replace(way, **{name: False})
    if way.remat != "none":
        yield dataclasses.replace(way, remat="none")


def _simpler_trainings(training: Training) -> Iterator[Training]:
    plain = Training(training.model, training.loss)
    for field in dataclasses.fields(Training):
        if field.name in ("model", "loss") or getattr(training, field.name) == getattr(plain, field.name):
            continue
        yield dataclasses.replace(training, **{field.name: getattr(plain, field.name)})
    for i in range(len(training.counted) if len(training.counted) > 1 else 0):
        yield dataclasses.replace(training, counted=training.counted[:i] + training.counted[i + 1 :])
    for loss in _simpler_losses(training.loss):
        yield dataclasses.replace(training, loss=loss)
    for model in _simpler_models(training.model):
        yield dataclasses.replace(training, model=model)


def _simpler_losses(loss: Loss) -> Iterator[Loss]:
    for i in range(len(loss.terms)):
        if len(loss.terms) > 1:
            yield dataclasses.replace(loss, terms=loss.terms[:i] + loss.terms[i + 1 :])
    if loss.decay:
        yield dataclasses.replace(loss, decay=0.0)
    for i, term in enumerate(loss.terms):
        for change in ({"reduction": "mean"}, {"per_example": "squared"}, {"weight": 1.0}):
            if dataclasses.replace(term, **change) != term:
                changed = (*loss.terms[:i], dataclasses.replace(term, **change), *loss.terms[i + 1 :])
                yield dataclasses.replace(loss, terms=changed)


def _simpler_models(model: Model) -> Iterator[Model]:
    for i, layer in enumerate(model.layers):
        boundary = None if model.boundary is None else min(model.boundary, len(model.layers) - 1)
        yield dataclasses.replace(model, layers=model.layers[:i] + model.layers[i + 1 :], boundary=boundary)
        if getattr(layer, "wrap", "plain") != "plain":
            changed = (*model.layers[:i], dataclasses.replace(layer, wrap="plain"), *model.layers[i + 1 :])
            yield dataclasses.replace(model, layers=changed)
    for change in (
        {"checkpoint": False},
        {"narrows": False},
        {"tied": False},
        {"from_tokens": False},
        {"data": "as it is"},
        {"pool": "mean"},
        {"boundary": None},
    ):
        if dataclasses.replace(model, **change) != model:
            yield dataclasses.replace(model, **change)
    if model.kind != "vector":
        yield dataclasses.replace(model, kind="vector", from_tokens=False)
