"""The numbers that limit the solver's effort. None of them changes which solutions or bounds are right.

A *pair* is one pass of messages forward and one back (trws.py), and an *entry* one number in the cost table of an edge.
Numbers without a reason beside them come from trials; benchmarks/iopddl.py shows the effect of a change.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """All numbers, by the part of the solver that reads them.

    Phases (solve.py):
        small_program_entries: up to so many entries, the integer program is as quick as messages, and phase 3 is left
            out.
        small_relaxation_entries: most entries for phase 2.
        program_entries_per_s: most entries of the integer program for each second left; PuLP takes a few seconds of a
            minute to write these.
        max_rounds: rounds of phases 1 and 3.
        worthwhile: part of the entries that a round has to remove for another one to follow.
        reserved: part of the time that the program leaves to local search if there is no solution yet.
        enough: within so many allowed gaps, only small programs are tried.
        reductions_s: least seconds of reductions: without them, hardly an attempt avoids all forbidden pairs.

    The bound without usage rows (lagrange.py):
        max_pairs: pairs in all.
        rounding_pairs: pairs between two roundings.
        progress_pairs: pairs between two looks at progress.
        least_progress: it ends when the gap shrinks by less than this part between two looks.

    The bound with usage rows (lagrange.py):
        max_prices: prices in all.
        most_price_pairs, least_price_pairs: pairs for each of them, in which messages settle.
        little: a gain of this part of the allowed gap counts as none.
        idle_prices: prices without a gain after which the ascent ends.
        nearness: weight of the best prices so far in the next ones, as prices of few choices go to extremes.
        prices_per_search: local search follows each of so many prices.
        searched_part: trees of such a local search, as a part of the nodes.

    Rounding (lagrange.py):
        noise: on costs, as a part of the mean cost of a node: little beside costs that differ, enough to make one of
            many equal optima the cheapest.
        noisy_pairs: pairs under noise.
        last_pairs: pairs at the best prices, each with two roundings.
        price_levels: prices for rounding if no choices keep to the limit yet, each ten times the one before; the middle
            one makes the largest usage of all rows cost as much as a forbidden pair.

    Local search, in rounds of as many trees as nodes (lagrange.py):
        price_weights: factors on the prices, in turn.
        max_searches: rounds in all.
        idle_searches: rounds without gain after which it ends: each weight has had three.
        trees_per_look: trees between two looks at the deadline.

    Probes: rounding and local search with a few nodes forced (lagrange.py):
        max_probes: probes in all.
        max_probe_entries: probes times the entries of the core, in all, which bounds their time.
        idle_probes: probes without gain after which probing ends.
        forced: nodes forced in a probe.
        probe_pairs: pairs in a probe, by which messages respond.
    """

    small_program_entries: int = 2_000
    small_relaxation_entries: int = 500_000
    program_entries_per_s: int = 2_000
    max_rounds: int = 4
    worthwhile: float = 0.7
    reserved: float = 0.25
    enough: float = 20.0
    reductions_s: float = 10.0

    max_pairs: int = 1200
    rounding_pairs: int = 20
    progress_pairs: int = 100
    least_progress: float = 0.03

    max_prices: int = 60
    most_price_pairs: int = 20
    least_price_pairs: int = 3
    little: float = 0.05
    idle_prices: int = 5
    nearness: float = 0.5
    prices_per_search: int = 4
    searched_part: float = 0.25

    noise: float = 1e-3
    noisy_pairs: int = 20
    last_pairs: int = 20
    price_levels: int = 6

    price_weights: tuple[float, ...] = (1.0, 0.5, 0.0)
    max_searches: int = 60
    idle_searches: int = 9
    trees_per_look: int = 2000

    max_probes: int = 200
    max_probe_entries: int = 10_000_000
    idle_probes: int = 40
    forced: int = 3
    probe_pairs: int = 2
