"""Carries messages from one core to a smaller one of the same residual, where they are a start that is nearly settled.

In: messages of a core, by its links. Out: messages of another core, whose nodes have some of the strategies that they
had. A bound holds for any messages (trws.py), so what cannot be carried is 0: messages of links that are new.

Example: a node had strategies 0, 1 and 4 left, with the message (0, 2, 5) from a neighbour. With 0 and 4 left, it
starts from (0, 5).
"""

from __future__ import annotations

import numpy as np

from minialpa.intra.solver.cost_graph import Floats, Ints
from minialpa.intra.solver.csr_graph import Core
from minialpa.intra.solver.residual import Residual


class CarriedMessages:
    """Messages by nodes of the residual: under (v, w), the one from w to v, with the strategies that v had."""

    def __init__(self, residual: Residual, nodes: list[int], core: Core, messages: Floats) -> None:
        """`core` is that of `nodes`, and `residual` has not changed since it was flattened."""
        self._messages: dict[tuple[int, int], tuple[Ints, Floats]] = {}
        ends = core.message_at.tolist()
        for link, (v, w) in enumerate(_links(nodes, core)):
            self._messages[v, w] = residual.kept[v], messages[ends[link] : ends[link + 1]]

    def of(self, residual: Residual, nodes: list[int], core: Core) -> Floats:
        """The messages of `core`, that of `nodes` of `residual` as it is now."""
        messages, ends = np.zeros(int(core.message_at[-1])), core.message_at.tolist()
        for link, (v, w) in enumerate(_links(nodes, core)):
            if (v, w) in self._messages:
                kept, message = self._messages[v, w]
                messages[ends[link] : ends[link + 1]] = message[np.searchsorted(kept, residual.kept[v])]
        return messages


def _links(nodes: list[int], core: Core) -> list[tuple[int, int]]:
    """For each link, its node and the one that it leads to, in the numbers of the residual."""
    owners = np.repeat(np.arange(core.n_nodes), np.diff(core.links)).tolist()
    return [(nodes[here], nodes[there]) for here, there in zip(owners, core.other.tolist(), strict=True)]
