"""The numbers that decide how long the solver tries what. None of them changes which solutions or bounds are right.

A *pair* is one pass of messages forward and one back (trws.py), and an *entry* one number in the cost table of an edge.
Where a number has a source, or a reason for its size, the line of the attribute says so. The others come from trials of
which no comparison is kept; benchmarks/iopddl.py shows what a change does.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseOptions:
    """Which phases of solve.py run, and how often.

    Attributes:
        small_program_entries: entries up to which the integer program is as quick as messages; phase 3 is left out.
        small_relaxation_entries: entries up to which phase 2 is tried.
        program_entries_per_s: entries for each second left up to which the integer program is written. PuLP takes a few
            seconds of a minute for these.
        max_rounds: rounds of phases 1 and 3.
        worthwhile: part of the entries that a round has to remove to be followed by another one.
        reserved: part of the time that the program leaves to local search where nothing was found yet.
        enough: allowed gaps up to which nothing is tried any more after the rounds, unless it is a small program.
        reductions_s: seconds that reductions have whatever the time limit: without them, hardly an attempt avoids all
            forbidden pairs.
    """

    small_program_entries: int = 2_000
    small_relaxation_entries: int = 500_000
    program_entries_per_s: int = 2_000
    max_rounds: int = 4
    worthwhile: float = 0.7
    reserved: float = 0.25
    enough: float = 20.0
    reductions_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AscentOptions:
    """The ascent of the lower bound (lagrange.py).

    Attributes:
        max_pairs: pairs in all.
        unpriced_pairs: pairs before prices move, so that messages settle first.
        rounding_pairs: pairs between two roundings.
        progress_pairs: pairs between two looks at progress.
        least_progress: the ascent ends when the gap shrinks by less than this part between two looks.
        first_step: first step of the prices, as a part of |L(p)|.
        shrink: factor on the step when it has not raised the bound for `patience` pairs.
        patience: pairs without a better bound before the step shrinks.
        least_step: the ascent ends with steps below this.
        newest: weight of the newest choices in the running average of the excess.
    """

    max_pairs: int = 1200
    unpriced_pairs: int = 30
    rounding_pairs: int = 20
    progress_pairs: int = 100
    least_progress: float = 0.03
    first_step: float = 0.1
    shrink: float = 0.8
    patience: int = 15
    least_step: float = 1e-4
    newest: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOptions:
    """The ascent of the lower bound where a gap is allowed (lagrange.py, columns.py).

    Attributes:
        max_prices: prices that are tried.
        max_pairs: pairs for each of them, in which messages settle.
        least_pairs: pairs for each of them at least.
        little: a gain of this part of the allowed gap is none.
        idle_prices: prices without a gain after which the ascent ends.
        nearness: how far the next prices stay on the side of the best so far, between 0 and 1: prices of few choices
            go to extremes.
        local_searches: local search is tried for every so many prices.
        trees: trees of a local search, as a part of the nodes.
    """

    max_prices: int = 60
    max_pairs: int = 20
    least_pairs: int = 3
    little: float = 0.05
    idle_prices: int = 5
    nearness: float = 0.5
    local_searches: int = 4
    trees: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingOptions:
    """Choices from messages, during and after the ascent.

    Attributes:
        noise: noise on costs, as a part of the mean cost of a node: little beside costs that differ, enough to make one
            of many equal optima the cheapest.
        noisy_pairs: pairs under noise.
        last_pairs: pairs at the best prices, each with two roundings.
        price_levels: levels of the prices for rounding where nothing keeps to the limit yet, each ten times the one
            before; the middle one makes the largest usage of all rows cost as much as a forbidden pair.
    """

    noise: float = 1e-3
    noisy_pairs: int = 20
    last_pairs: int = 20
    price_levels: int = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSearchOptions:
    """Rounds of local search; a round tries as many trees as there are nodes.

    Attributes:
        weights: factors on the prices, in turn.
        max_rounds: rounds in all.
        idle_rounds: rounds without gain after which local search ends: each weight has had three.
        trees: trees between two looks at the clock, as compiled loops do not look at it.
    """

    weights: tuple[float, ...] = (1.0, 0.5, 0.0)
    max_rounds: int = 60
    idle_rounds: int = 9
    trees: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """Probes: rounding and local search with a few nodes forced.

    Attributes:
        max_probes: probes in all.
        max_entries: probes times the entries of the core, in all, which bounds their time.
        idle_probes: probes without gain after which probing ends.
        forced: nodes forced in a probe.
        pairs: pairs in a probe, by which messages respond.
    """

    max_probes: int = 200
    max_entries: int = 10_000_000
    idle_probes: int = 40
    forced: int = 3
    pairs: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingOptions:
    """Mixtures of two solutions (mixed_solutions.py).

    Attributes:
        band: nodes up to this distance from the cut, in edges, are decided anew.
        pairs: pairs that decide them.
        n_cuts: cuts to try from each end, from the farthest that fits.
    """

    band: int = 6
    pairs: int = 10
    n_cuts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistenceOptions:
    """What uses the time that is left when nothing above gains any more (persistence.py).

    Attributes:
        temperatures: temperatures that annealing starts from, in turn, in units of the gap per node: what is right
            depends on how costs are spread.
        cooling: the last temperature of a portion, as a part of its first.
        portion_s: seconds of the first portions.
        growth: factor on these seconds after each turn of temperatures: slower cooling ends lower.
        most_s: most seconds of a portion.
        nearly: rows of whose room at most this part is left are scarce.
        program: part of the time left that the integer program has before.
        first_share: part of the first slice that goes to the bound.
        share: part of a slice that bound and search have at least, and the bound where both are at rest.
        steps: first steps of the ascent, in turn, as in `AscentOptions.first_step`.
        slice: part of the time left that goes to a slice of bound and search.
        least_slice_s: seconds of a slice at least.
        shrinks: part of the strategies that has to be ruled out for arrays to be built anew.
    """

    temperatures: tuple[float, ...] = (10.0, 1.0, 30.0, 0.1, 3.0, 0.0)
    cooling: float = 0.01
    portion_s: float = 0.5
    growth: float = 1.5
    most_s: float = 10.0
    nearly: float = 0.02
    program: float = 0.5
    first_share: float = 0.5
    share: float = 0.15
    steps: tuple[float, ...] = (0.01, 0.003, 0.03)
    slice: float = 0.2
    least_slice_s: float = 2.0
    shrinks: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """All of the above."""

    phases: PhaseOptions = field(default_factory=PhaseOptions)
    ascent: AscentOptions = field(default_factory=AscentOptions)
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    rounding: RoundingOptions = field(default_factory=RoundingOptions)
    local_search: LocalSearchOptions = field(default_factory=LocalSearchOptions)
    probes: ProbeOptions = field(default_factory=ProbeOptions)
    mixing: MixingOptions = field(default_factory=MixingOptions)
    persistence: PersistenceOptions = field(default_factory=PersistenceOptions)
