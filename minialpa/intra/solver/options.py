"""Numbers that limit the effort of the solver; solutions and bounds are right at any values.

A *pair* is one pass of messages forward and one back (trws.py). An *entry* is one number in the cost table of an edge.
Numbers without a reason come from trials; benchmarks/iopddl.py shows the effect of a change.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """By the part of the solver that reads them.

    `max_x` limits the number of x, and `x_pairs` the pairs of x. A search ends after `idle_x` without a gain.

    Phases (solve.py):
        small_program_entries: up to this size, the integer program is as quick as messages and replaces phase 3.
        small_relaxation_entries: largest size for phase 2.
        program_entries_per_s: largest integer program, per second left. PuLP takes a few seconds of a minute to write
            this size.
        max_rounds: of phases 1 and 3.
        worthwhile: part of the entries that a round must remove for the next round to run.
        reserved: part of the time for local search after the integer program, if there is no solution yet.
        enough: within this many allowed gaps, only small integer programs run.
        reductions_s: least seconds of reductions, without which most attempts have a forbidden pair.

    Bound without usage rows (`_settle_messages`):
        rounding_pairs: pairs between two roundings.
        progress_pairs: pairs between two checks of progress.
        least_progress: the passes end if the gap shrinks by less than this part between two checks.

    Bound with usage rows (`_raise_with_columns`):
        most_price_pairs, least_price_pairs: pairs per price vector, until the messages settle.
        little: smallest gain that counts, as a part of the allowed gap.
        nearness: weight of the best prices so far in the next prices: few choices suggest extreme prices.
        prices_per_search: price vectors per local search.
        searched_part: trees of this local search per node.

    Rounding (`Passes.improve`, `bracket`, `_round_under_high_prices`):
        noise: on costs, as a part of the mean cost of a node: small beside real differences, and large enough to make
            one of many equal optima the cheapest.
        last_pairs: pairs at the best prices, with two roundings each.
        price_levels: prices tried while no choices keep to the limit, each ten times the price before. At the middle
            price, the largest usage in all rows costs as much as a forbidden pair.

    Local search (`_improve_choices`), in rounds of one tree per node:
        price_weights: factors on the prices, in turn.
        idle_searches: three per weight.
        trees_per_look: trees between two checks of the deadline.

    Probes (`_probe`):
        max_probe_entries: probes times entries of the core, which bounds the time.
        forced: nodes per probe with random strategies.
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
