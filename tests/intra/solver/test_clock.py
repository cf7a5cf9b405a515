"""Limits count work: a solve that one cuts short gives the same answer every time."""

from __future__ import annotations

import math

from benchmarks.iopddl import random_instance
from minialpa.intra.solver.clock import OPERATIONS_PER_S, Deadline
from minialpa.intra.solver.ilp_model import solve_program
from minialpa.intra.solver.residual import residual_of
from minialpa.intra.solver.solve import solve_graph


def test_counted_work_ends_where_it_ended_before() -> None:
    """However long the processor took: the answers and the count are equal, also where the limit cut them short."""
    graph = random_instance(2, n_nodes=80)
    for limit_s in (0.02, 0.3):
        deadlines = [Deadline(limit_s) for _ in range(2)]
        first, second = [solve_graph(graph, deadline) for deadline in deadlines]
        assert first == second
        assert deadlines[0].left_s == deadlines[1].left_s


def test_a_part_of_a_deadline_counts_the_same_work() -> None:
    whole = Deadline(10.0)
    whole.spend(2 * OPERATIONS_PER_S)
    part = whole.part(0.5)
    assert (whole.left_s, part.left_s) == (8.0, 4.0)
    part.spend(4 * OPERATIONS_PER_S)
    assert part.is_over and not whole.is_over and whole.left_s == 4.0
    assert Deadline(math.inf).left_s == math.inf


def test_an_integer_program_that_counted_work_cuts_short_stops_at_the_same_point() -> None:
    bounds = []
    for _ in range(2):
        residual, deadline = residual_of(random_instance(3, n_nodes=40)), Deadline(0.1)
        bounds.append((solve_program(residual, deadline), deadline.left_s))
        assert deadline.is_over
    assert bounds[0] == bounds[1]
