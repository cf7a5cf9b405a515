"""The joint search for the fastest pipeline, over lower bounds on the costs of its stages.

Stages, their submeshes and logical shapes, the number of micro-batches and rematerialisation are chosen together. The
stage DP runs on lower bounds (`stage_bounds`). The search solves the costs that the best pipeline under these bounds
uses, which raises the bounds, until the best pipeline uses solved costs only. Then, by the sums of pieces, no pipeline
is cheaper that has the logical shapes and numbers of micro-batches that the search has opened, and the search has
computed few of thousands of costs. It opens a few of them first, then the neighbours of good ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from minialpa.errors import InfeasibleError
from minialpa.inter.search.stage_bounds import StageBounds
from minialpa.inter.search.stage_dp import PipelineTooLargeError, StageAssignment, StageChoice
from minialpa.inter.search.stage_tables import place_of
from minialpa.inter.search.submeshes import Candidate
from minialpa.options import Remat
from minialpa.plan import Certificate

#: Costs that are solved before the search returns its best pipeline.
_MOST_SOLVED = 400
#: If at most this share of a pipeline's time is unsolved, the search trusts its promise: it looks at near numbers of
#: micro-batches before it solves the rest. GPT and Llama of 8 layers on 16 devices take 45 and 42 costs at 0.05, 46 and
#: 42 at 0.3, 48 and 51 at 1, for the same pipelines.
_SMALL_SHARE = 0.3
#: If the smallest pipeline needs at most this many times the memory of the devices, other views of submeshes may fit.
_NEARLY_FITS = 2.0
#: The search first looks at numbers of micro-batches that differ by this factor.
_FAR = 4


@dataclass(frozen=True, slots=True)
class FoundStage:
    """A stage of a found pipeline. choice: its layers and its column in the tables. candidate: the submesh of that
    column.
    """

    choice: StageChoice
    candidate: Candidate
    remat: Remat

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self.choice.first_layer, self.choice.last_layer + 1))


@dataclass(frozen=True, slots=True)
class FoundPipeline:
    """A pipeline that a search found. seconds: of a step, by the sums of pieces."""

    stages: tuple[FoundStage, ...]
    n_micro_batches: int
    seconds: float


#: Seconds, number of micro-batches and stages of a pipeline.
_Best = tuple[float, int, StageAssignment]


class StageSearch:
    """The search over one space. `best` may be called more than once, after `learn` and `exclude`."""

    def __init__(self, bounds: StageBounds, report: Callable[[str, int, int], None]) -> None:
        self.bounds, self.space, self.report = bounds, bounds.space, report
        # Lower bound on the seconds of every pipeline, by its number of micro-batches.
        self._least = dict.fromkeys(bounds.numbers, 0.0)
        # Numbers of micro-batches under search: some far apart, then numbers near the best.
        self._open = _far_apart(bounds.numbers)

    def best(self) -> FoundPipeline:
        """A pipeline at most `tolerance` slower than any in the space, if `_MOST_SOLVED` costs show that.

        Raises InfeasibleError if no pipeline fits, with the message of the smallest micro-batches.
        """
        failures: dict[int, InfeasibleError] = {}
        best: _Best | None = None
        while (n := self._most_promising(best)) is not None:
            if math.isinf(self._least[n]):
                raise failures[max(failures)] if failures else InfeasibleError("No pipeline fits.")
            found = self._under_bounds(n, failures)
            if found is None or self._solve_more(n, found):
                continue

            # All of its costs are solved, so its bounds are its costs.
            seconds = self.bounds.seconds_of(n, found)
            if best is None or seconds < best[0]:
                best = seconds, n, found
        assert best is not None, "the search ends without a pipeline"
        return self._found(*best)

    def _most_promising(self, best: _Best | None) -> int | None:
        """The number of micro-batches that promises most; None if `best` is the answer.

        It is if no promise beats it, or after `_MOST_SOLVED` costs.
        """
        while True:
            n = min(self._open, key=lambda n: (self._least[n], n))
            if best is None:
                return n
            enough = self._least[n] >= best[0] * (1 - self.space.tolerance)
            if not (enough and self._open_near(best[1], best[2])):
                return None if enough or self.bounds.sublayers.n_solved > _MOST_SOLVED else n

    def _under_bounds(self, n: int, failures: dict[int, InfeasibleError]) -> StageAssignment | None:
        """The best pipeline with `n` micro-batches under the bounds; None if none fits, with the error in `failures`.

        Also None if it promises less than the known bound of `n`, since another number may be the most promising now.
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
        """Solve costs of a pipeline, or look at more numbers of micro-batches; False if all is solved.

        The search goes on with other columns of the same submeshes as long as a pipeline of these takes no longer than
        `found` promises, because one run of the DP takes as long as several pieces.
        """
        allowed_s = found.seconds * (1 + self.space.tolerance / 4)
        current: StageAssignment | None = found
        while current is not None and current.seconds <= allowed_s:
            unsolved = self.bounds.unsolved(n, current)
            n_solved = self.bounds.sublayers.n_solved
            self.report("Costs of stages", n_solved, n_solved + len(unsolved))

            # Numbers near a good one may be better still: they come before its last costs.
            is_small = sum(one.share for one in unsolved) <= _SMALL_SHARE
            if not unsolved or (is_small and self._open_near(n, current)):
                return bool(unsolved) or current is not found
            self.bounds.raise_bound(n, unsolved[0].sublayer, unsolved[0].column)
            current = self.bounds.on_same_submeshes(n, found)
        return True

    def _open_near(self, n: int, found: StageAssignment) -> bool:
        """Look at the numbers of micro-batches near `n`, and at views near the views of `found`, too; whether any of
        them is new.
        """
        near = {m for m in self.bounds.numbers if n / _FAR < m < n * _FAR} - self._open
        self._open |= near
        has_new_views = self.bounds.open_near_views(n, found)
        if has_new_views:
            self._least[n] = 0.0
        return bool(near) or has_new_views

    @property
    def certificate(self) -> Certificate:
        """The bounds after `best`, without numbers of micro-batches that the search did not look at."""
        looked_at = tuple(sorted(self._open))
        return Certificate(min(self._least[n] for n in looked_at), looked_at, self.bounds.sublayers.n_solved)

    def learn(self, found: FoundPipeline, seconds: Sequence[tuple[float, float]]) -> None:
        """seconds: of stages that were solved as a whole, per micro-batch and once per step."""
        n = found.n_micro_batches
        for stage, (t, step) in zip(found.stages, seconds, strict=True):
            self.bounds.tables[n].learn(place_of(stage.choice), t, step)
        # A whole stage may cost less than its pieces, each of which saves memory and starts collectives separately.
        self._least[n] = 0.0

    def exclude(self, found: FoundPipeline, stage: int, n_live: int) -> None:
        self.bounds.tables[found.n_micro_batches].exclude(place_of(found.stages[stage].choice), n_live)

    def alike(self, found: FoundPipeline) -> Iterator[FoundPipeline]:
        """`found` with one logical shape for all of its stages, if these have the same submesh.

        For each shape that may be as fast up to the tolerance: sums of pieces are not exact.
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
    """The largest number, and smaller ones, each at most a `_FAR`-th of the one before; and 1 if it is there."""
    out: list[int] = []
    for n in sorted(numbers, reverse=True):
        if not out or n * _FAR <= out[-1] or n == 1:
            out.append(n)
    return set(out)
