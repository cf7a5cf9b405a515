"""Predictions in, their quality out: errors of seconds, order of designs, and runs out of memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.published_runs.fit import Split, baseline, fitted, measured, seconds_of
from benchmarks.published_runs.predict import Prediction

#: The order of fewer runs does not count.
_LEAST_RUNS = 3
#: Systems whose runs set the constants; the other systems are a test of them. llm-foundry: rates of products, attention
#: in Triton and other kernels. torchtitan: rates of operators in separate kernels, and the exposed fraction of
#: collectives that products hide.
FITTED = ("llm-foundry", "torchtitan")


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of the seconds of `n` runs, as fractions of the measured seconds."""

    n: int
    median: float
    p90: float
    bias: float


def errors(found: Sequence[Prediction]) -> Errors | None:
    """Errors of all runs that ran and have a plan; None without such runs."""
    return _errors([one.error for one in found if one.error is not None])


def _errors(signed: Sequence[float]) -> Errors | None:
    """bias: the signed median error."""
    if not signed:
        return None
    sizes = np.abs(signed)
    return Errors(len(signed), float(np.median(sizes)), float(np.quantile(sizes, 0.9)), float(np.median(signed)))


def tested(tests: Sequence[Split]) -> Iterator[tuple[str, Errors, Errors]]:
    """(name, errors of fitted constants, errors of the baseline) of each split, and of all systems together."""
    ours_of_systems: list[float] = []
    theirs_of_systems: list[float] = []
    systems = {run.system for one in tests for run, _ in one.tested}
    for one in tests:
        constants, constant = fitted(one.training), baseline(one.training)
        ours = [seconds_of(run, parts, constants) / measured(run) - 1 for run, parts in one.tested]
        theirs = [constant(run) / measured(run) - 1 for run, _ in one.tested]
        if one.name in systems:
            ours_of_systems += ours
            theirs_of_systems += theirs
        yield from _named(one.name, ours, theirs)
    yield from _named("each system", ours_of_systems, theirs_of_systems)


def _named(name: str, ours: Sequence[float], theirs: Sequence[float]) -> Iterator[tuple[str, Errors, Errors]]:
    errors_of_ours, errors_of_theirs = _errors(ours), _errors(theirs)
    if errors_of_ours is not None and errors_of_theirs is not None:
        yield name, errors_of_ours, errors_of_theirs


def by_system(found: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    groups = defaultdict[str, list[Prediction]](list)
    for one in found:
        groups[f"{one.run.system}, {one.run.gpu[:4]}"].append(one)
    return dict(sorted(groups.items()))


def halves(found: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    """The runs that set constants, and the others."""
    is_fitted = [one.run.system.startswith(FITTED) for one in found]
    return {
        "systems that set the constants": [one for one, is_one in zip(found, is_fitted, strict=True) if is_one],
        "other systems": [one for one, is_one in zip(found, is_fitted, strict=True) if not is_one],
    }


def kendall(found: Sequence[Prediction]) -> tuple[float, int] | None:
    """Kendall's tau over all pairs of runs that were compared with each other, and the number of pairs.

    A pair has runs of one group, with different degrees or micro-batches and different measured seconds. A tie of the
    prediction counts as half right.
    """
    score = n_pairs = 0
    for group in _groups(found):
        for a, b in itertools.combinations(group, 2):
            assert a.step_s is not None and b.step_s is not None and a.run.step_s and b.run.step_s, (a, b)
            if a.run.step_s == b.run.step_s or a.run.degrees == b.run.degrees:
                continue
            n_pairs += 1
            score += int(np.sign(a.step_s - b.step_s) * np.sign(a.run.step_s - b.run.step_s))
    return (score / n_pairs, n_pairs) if n_pairs else None


def _groups(found: Sequence[Prediction]) -> list[list[Prediction]]:
    groups = defaultdict[object, list[Prediction]](list)
    for one in found:
        if one.error is not None:
            groups[one.run.group].append(one)
    return [group for group in groups.values() if len(group) >= _LEAST_RUNS]


@dataclass(frozen=True, slots=True)
class MemoryScore:
    """Runs out of memory, and how many of them were predicted; the same for the runs that ran.

    error: median error of the `n` published peak bytes.
    """

    n_out: int
    n_out_predicted: int
    n_ran: int
    n_ran_predicted: int
    error: float
    n: int


def memory(found: Sequence[Prediction]) -> MemoryScore:
    planned = [one for one in found if one.step_s is not None or one.run.out_of_memory]
    out = [one for one in planned if one.run.out_of_memory]
    ran = [one for one in planned if not one.run.out_of_memory]
    measured = [one.peak_bytes / one.run.peak_bytes - 1 for one in ran if one.run.peak_bytes]
    return MemoryScore(
        n_out=len(out),
        n_out_predicted=sum(not one.fits for one in out),
        n_ran=len(ran),
        n_ran_predicted=sum(one.fits for one in ran),
        error=float(np.median(np.abs(measured))) if measured else 0.0,
        n=len(measured),
    )
