"""Carries messages from one core to a smaller core of the same residual, as a start that is close to convergence.

In: messages of a core, by its links. Out: messages of another core, whose nodes have a subset of these strategies. A
bound holds for any messages (trws.py), so the messages of new links are 0.

Example: a node had strategies 0, 1 and 4 left, with the message (0, 2, 5) from a neighbour. With 0 and 4 left, it
starts from (0, 5).
"""

from __future__ import annotations

import numpy as np

from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.intra.solver.residual import Residual


class CarriedMessages:
    """Messages by pairs of residual nodes: key (v, w) has the message from w to v, over the strategies that v had."""

    def __init__(self, residual: Residual, nodes: list[int], core: Core, messages: Floats) -> None:
        """`core` is the flattened form of `nodes`. `residual` must not have changed since it was flattened."""
        self._messages: dict[tuple[int, int], tuple[Ints, Floats]] = {}
        ends = core.message_at.tolist()
        for link, (v, w) in enumerate(_links(nodes, core)):
            self._messages[v, w] = residual.kept[v], messages[ends[link] : ends[link + 1]]

    def of(self, residual: Residual, nodes: list[int], core: Core) -> Floats:
        """The messages for `core`, the flattened form of `nodes` in the present `residual`."""
        messages, ends = np.zeros(int(core.message_at[-1])), core.message_at.tolist()
        for link, (v, w) in enumerate(_links(nodes, core)):
            if (v, w) in self._messages:
                kept, message = self._messages[v, w]
                messages[ends[link] : ends[link + 1]] = message[np.searchsorted(kept, residual.kept[v])]
        return messages


def _links(nodes: list[int], core: Core) -> list[tuple[int, int]]:
    """For each link, its two nodes (from, to) in the numbering of the residual."""
    owners = np.repeat(np.arange(core.n_nodes), np.diff(core.links)).tolist()
    return [(nodes[here], nodes[there]) for here, there in zip(owners, core.other.tolist(), strict=True)]
