"""The equivalence engine: an example in, its outcome out; and a smaller example with the same fault."""

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
from tests.equivalence.losses import Term
from tests.equivalence.model import Model
from tests.equivalence.outcomes import Outcome, outcome_of
from tests.equivalence.steps import batch_argnums, make_args, make_step
from tests.equivalence.ways import FLAGS, make_method, spread_specs


def run(example: Example) -> Outcome:
    """Runs the step of `example` under its method, and compares it with the serial run.

    If the difference is little more than the noise of a few serial runs, many serial runs measure the noise. Raises
    errors of the serial run, which are faults of the grammar.
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
    """Shardings of the arguments of the example."""
    training, way = example.training, example.way
    if not way.spread:
        return ()
    parameters = Parameters(make_step(training), static=((), ()), donate=((), ()), batch=batch_argnums(training))
    call = parameters.bind(make_args(training), {})
    paths, _ = parameters.paths(call)
    pairs = list(zip(paths, call.leaves, strict=True))
    return spread_specs(pairs, way.mesh, way.n, training.batch_size, way.spread)


def smaller(example: Example, outcome: Outcome) -> Example:
    """A smallest example with the same outcome, reached by one change at a time."""
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


#: The simplest values of fields that have no default.
_SIMPLEST: dict[tuple[type, str], Any] = {
    (Term, "per_example"): "squared",
    (Term, "reduction"): "mean",
    (Model, "kind"): "vector",
}


def _simpler(value: Any) -> Iterator[Any]:
    """`value` with one change: a field at its simplest, or a tuple without one element."""
    # A mesh keeps its axes: its simplest value is the default.
    if isinstance(value, tuple) and not any(isinstance(element, int) for element in value):
        for i, element in enumerate(value):
            yield value[:i] + value[i + 1 :]
            for simpler in _simpler(element):
                yield (*value[:i], simpler, *value[i + 1 :])
    if not dataclasses.is_dataclass(value):
        return
    for field in dataclasses.fields(value):
        now = getattr(value, field.name)
        simplest = _SIMPLEST.get((type(value), field.name), field.default)
        if simplest not in (now, dataclasses.MISSING):
            yield dataclasses.replace(value, **{field.name: simplest})  # type: ignore[type-var]
        for simpler in _simpler(now):
            yield dataclasses.replace(value, **{field.name: simpler})  # type: ignore[type-var]
