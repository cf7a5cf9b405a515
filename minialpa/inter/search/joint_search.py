"""Lower bounds on the costs of stages in (`stage_bounds`), the fastest pipeline out.

The search chooses stages, submeshes, logical shapes, rematerialisation and the number n of micro-batches together:

    repeat
        n     = the number with the least lower bound on the seconds of a step
        found = the best pipeline with n micro-batches under the bounds (`stage_dp`)
        solve the largest unsolved cost of a sublayer in `found`, which raises bounds
    until all costs of `found` are solved, and no other n has a smaller bound

Then no pipeline with the opened logical shapes and numbers of micro-batches is faster by more than `tolerance`, by the
sums of sublayers. Few of thousands of costs are solved. Neighbours of good shapes and numbers open later.

A *candidate* is a submesh with a logical shape (a *view*). A *column* of the cost tables is a candidate with a
rematerialisation and a price of memory: a higher price favours shardings that keep fewer bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minialpa.errors import InfeasibleError
from minialpa.inter.search.stage_bounds import StageBounds
from minialpa.inter.search.stage_dp import PipelineTooLargeError, StageAssignment, StageChoice
from minialpa.inter.search.stage_tables import place_of
from minialpa.inter.search.submeshes import Candidate
from minialpa.options import Remat
from minialpa.plan import Certificate
from minialpa.support.progress import Report

#: Solved costs after which a search ends with its best pipeline. Before the first pipeline, a search with more than
#: `_MOST_BEFORE_FIRST` opens no further shapes and numbers.
_MOST_SOLVED, _MOST_BEFORE_FIRST = 400, 200
#: Near numbers of micro-batches open before the rest is solved, if at most this share of a pipeline's time is unsolved.
#: GPT and Llama of 8 layers on 16 devices solve 42 to 51 costs, for any share from 0.05 to 1.
_SMALL_SHARE = 0.3
#: If the smallest pipeline needs at most this many times the memory of the devices, other logical shapes may fit.
_NEARLY_FITS = 2.0
#: Factor between the first open numbers of micro-batches.
_FAR = 4


@dataclass(frozen=True, slots=True)
class FoundStage:
    choice: StageChoice
    candidate: Candidate
    remat: Remat

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self.choice.first_layer, self.choice.last_layer + 1))


@dataclass(frozen=True, slots=True)
class FoundPipeline:
    """seconds: of a step, by the sums of sublayers."""

    stages: tuple[FoundStage, ...]
    n_micro_batches: int
    seconds: float


_Best = tuple[float, int, StageAssignment]


class StageSearch:
    """The caller solves the stages of `best()` as wholes, reports costs with `learn` or `exclude`, and repeats."""

    def __init__(self, bounds: StageBounds, report: Report) -> None:
        self.bounds, self.space, self.report = bounds, bounds.space, report
        # For each number of micro-batches, a lower bound on the seconds of a step.
        self._least = dict.fromkeys(bounds.numbers, 0.0)
        self._open = _far_apart(bounds.numbers)

    def best(self) -> FoundPipeline:
        """A pipeline at most `tolerance` slower than any in the open space, or the best after `_MOST_SOLVED` costs.

        Raises InfeasibleError if no pipeline fits.
        """
        failures: dict[int, InfeasibleError] = {}
        best: _Best | None = None
        while (n := self._most_promising(best)) is not None:
            if math.isinf(self._least[n]):
                raise (
                    failures[max(failures)]
                    if failures
                    else InfeasibleError(
                        "No pipeline fits on these devices. Use more devices or micro-batches, raise "
                        "`memory_limit_bytes`, or remove options that forbid shardings."
                    )
                )
            found = self._under_bounds(n, failures)
            if found is None or self._solve_more(n, found):
                continue

            # All costs of `found` are solved, so its bounds are costs.
            seconds = self.bounds.seconds_of(n, found)
            if best is None or seconds < best[0]:
                best = seconds, n, found
        assert best is not None, "the search ends without a pipeline"
        return self._found(*best)

    def _most_promising(self, best: _Best | None) -> int | None:
        """The number with the least lower bound; `None` if `best` is the answer."""
        while True:
            n = min(self._open, key=lambda n: (self._least[n], n))
            if best is None:
                return n
            enough = self._least[n] >= best[0] * (1 - self.space.tolerance)
            if self.is_long:
                return None
            if not (enough and self._open_near(best[1], best[2])):
                return None if enough else n

    @property
    def is_long(self) -> bool:
        """Whether the search has solved its most costs."""
        return self.bounds.sublayers.n_solved > _MOST_SOLVED

    def _under_bounds(self, n: int, failures: dict[int, InfeasibleError]) -> StageAssignment | None:
        """The best pipeline with `n` micro-batches under the bounds.

        `None` if no pipeline fits, with the error in `failures`, or if the bound of `n` rises, since another number may
        then have the least.
        """
        least = self._least[n]
        try:
            found = self.bounds.choose(n)
        except InfeasibleError as error:
            is_near = isinstance(error, PipelineTooLargeError) and error.lacks <= _NEARLY_FITS
            if not (is_near and self.bounds.open_all_views(n)):
                self._least[n], failures[n] = math.inf, error
            return None
        self._least[n] = max(least, found.seconds * (1 - self.space.tolerance / 4))
        return None if self._least[n] > least else found

    def _solve_more(self, n: int, found: StageAssignment) -> bool:
        """Solve costs of `found`, or open numbers of micro-batches. False if all costs of `found` are solved.

        A run of the DP takes as long as several solves. So other columns of the same submeshes follow first, while such
        a pipeline takes no longer than `found`.
        """
        allowed_s = found.seconds * (1 + self.space.tolerance / 4)
        current: StageAssignment | None = found
        while current is not None and current.seconds <= allowed_s:
            unsolved = self.bounds.unsolved(n, current)
            n_solved = self.bounds.sublayers.n_solved
            self.report("stage costs", n_solved, n_solved + len(unsolved))

            is_small = sum(one.share for one in unsolved) <= _SMALL_SHARE
            may_open = is_small and n_solved <= _MOST_BEFORE_FIRST
            if not unsolved or (may_open and self._open_near(n, current)):
                return bool(unsolved) or current is not found
            self.bounds.raise_bound(n, unsolved[0].sublayer, unsolved[0].column)
            current = self.bounds.on_same_submeshes(n, found)
        return True

    def _open_near(self, n: int, found: StageAssignment) -> bool:
        """Open numbers near `n` and logical shapes near `found`; whether any is new."""
        near = {m for m in self.bounds.numbers if n / _FAR < m < n * _FAR} - self._open
        self._open |= near
        has_new_views = self.bounds.open_near_views(n, found)
        if has_new_views:
            self._least[n] = 0.0
        return bool(near) or has_new_views

    @property
    def certificate(self) -> Certificate:
        looked_at = tuple(sorted(self._open))
        return Certificate(min(self._least[n] for n in looked_at), looked_at, self.bounds.sublayers.n_solved)

    def learn(self, found: FoundPipeline, seconds: Sequence[tuple[float, float]]) -> None:
        """seconds: of each stage, solved as a whole: (per micro-batch, once per step)."""
        n = found.n_micro_batches
        for stage, (t, step) in zip(found.stages, seconds, strict=True):
            self.bounds.tables[n].learn(place_of(stage.choice), t, step)
        # A whole stage may cost less than its sublayers, each of which saves memory and starts collectives separately.
        self._least[n] = 0.0

    def exclude(self, found: FoundPipeline, stage: int, n_live: int) -> None:
        """The stage, solved as a whole, does not fit in memory with `n_live` micro-batches in flight."""
        self.bounds.tables[found.n_micro_batches].exclude(place_of(found.stages[stage].choice), n_live)

    def alike(self, found: FoundPipeline) -> Iterator[FoundPipeline]:
        """`found` with one logical shape in all stages, for each shape with which it is as fast within the tolerance.

        Sums of sublayers are not exact, so a variant may be faster. Empty if submeshes differ.
        """
        bounds, n = self.bounds, found.n_micro_batches
        submeshes = {(stage.candidate.submesh, stage.candidate.device) for stage in found.stages}
        columns = [bounds.columns[stage.choice.candidate] for stage in found.stages]
        for m, candidate in enumerate(self.space.candidates if len(submeshes) == 1 else ()):
            if (candidate.submesh, candidate.device) not in submeshes or {c.candidate for c in columns} == {m}:
                continue

            places = [bounds.columns.number[dataclasses.replace(column, candidate=m)] for column in columns]
            stages = [dataclasses.replace(s.choice, candidate=c) for s, c in zip(found.stages, places, strict=True)]
            other = StageAssignment(tuple(stages), 0.0)
            if bounds.seconds_of(n, other) <= found.seconds * (1 + self.space.tolerance):
                yield self._found(found.seconds, n, other)

    def _found(self, seconds: float, n: int, found: StageAssignment) -> FoundPipeline:
        columns = [self.bounds.columns[choice.candidate] for choice in found.stages]
        stages = tuple(
            FoundStage(choice, self.space.candidates[column.candidate], column.remat)
            for choice, column in zip(found.stages, columns, strict=True)
        )
        return FoundPipeline(stages, n, seconds)


def _far_apart(numbers: Sequence[int]) -> set[int]:
    """The largest number, then numbers at most 1/`_FAR` of the last one, and 1 if it is there: 32, 8, 2, 1."""
    out: list[int] = []
    for n in sorted(numbers, reverse=True):
        if not out or n * _FAR <= out[-1] or n == 1:
            out.append(n)
    return set(out)
