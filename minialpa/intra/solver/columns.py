"""Prices of usage rows from the solutions that they lead to: a linear program over the choices found so far.

Under prices p >= 0, choices x cost c(x) + p . e(x), with their excess e(x) = usage(x) - room. The best bound is that of
the prices under which the cheapest choices cost most. With a few choices in place of all, this is

    max theta   subject to   theta <= c(x_k) + p . e(x_k) for each k,   p >= 0

which is never below the best bound (Kelley's cutting planes, 1960; the dual of Dantzig and Wolfe's columns, 1960).
Messages under its prices, or prices between these and the best so far, prove a bound and give further choices, until
bound and choices meet, or nothing changes. A limit binds in few rows, so that few choices are needed: ten or twenty
prices do what hundreds of steps along a slope do.

Example: 10 equal nodes have a low-cost strategy (cost 0, usage 2) and a low-usage one (cost 1, usage 1), with room for
15. Choices of cost 0 with excess 5 and of cost 10 with excess -5 cost the same at price 1: theta = 5, the best bound.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.intra.solver.local_search import cost_of, usage_of

#: Largest price in the linear program, in spreads of cost for the largest excess of any choice. Only where nothing that
#: was found keeps to the limit would prices grow without end.
_HIGHEST_PRICE = 1000.0


class Columns:
    """Choices of a core, and the prices that they suggest."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._costs: list[float] = []
        self._excess: list[Ints] = []

    def add(self, choices: Ints) -> None:
        """Take note of choices, unless they are forbidden. They need not keep to the limit."""
        cost = cost_of(self.core, choices)
        if np.isfinite(cost):
            self._costs.append(cost)
            self._excess.append(usage_of(self.core, choices) - self.core.room)

    def best_prices(self) -> tuple[Floats, float]:
        """The prices of all rows that the choices suggest, and the bound that no prices exceed; inf without choices."""
        prices = np.zeros(len(self.core.room))
        if not self._costs:
            return prices, np.inf

        # In units of their own, as seconds and bytes are many orders apart.
        costs, excess = np.array(self._costs), np.array(self._excess, np.float64)
        rows = np.flatnonzero((excess > 0).any(axis=0))
        least, spread = float(costs.min()), float(np.ptp(costs)) or 1.0
        unit = max(1.0, float(np.abs(excess[:, rows]).max(initial=0)))

        program = linprog(
            np.concatenate(([-1.0], np.zeros(len(rows)))),
            A_ub=np.hstack([np.ones((len(costs), 1)), -excess[:, rows] / unit]),
            b_ub=(costs - least) / spread,
            bounds=[(None, None), *[(0.0, _HIGHEST_PRICE)] * len(rows)],
            method="highs",
        )
        if program.x is None:
            return prices, np.inf
        prices[rows] = np.maximum(0.0, program.x[1:]) * spread / unit
        return prices, least - program.fun * spread
