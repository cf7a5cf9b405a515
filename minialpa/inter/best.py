"""Plans compared: the best of the plans that several attempts make."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from minialpa.errors import InfeasibleError, MinialpaError
from minialpa.inter.search.submeshes import preferred_seconds
from minialpa.plan import Plan


def best_of(
    attempts: Iterable[Callable[[], Plan]], excused: tuple[type[MinialpaError], ...] = (InfeasibleError,)
) -> Plan:
    """The best of the plans that attempts make; of equals, the first.

    Raises the last of the `excused` errors where no attempt makes a plan.
    """
    plans: list[Plan] = []
    failure: MinialpaError = InfeasibleError("There is nothing to choose from.")
    for attempt in attempts:
        try:
            plans.append(attempt())
        except excused as error:
            failure = error

    if not plans:
        raise failure
    return min(plans, key=preference)


def preference(plan: Plan) -> float:
    """What plans are compared by, the less the better: seconds, and of what hardly differs, the fewer devices."""
    n_devices = sum(stage.n_devices for stage in plan.stages)
    return preferred_seconds(plan.cost.total_s, n_devices / plan.cluster.n_devices)
