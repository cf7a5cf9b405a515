"""How long a compiled program takes on a GPU by XLA's estimates, and what of its communication is hidden.

The text of a program lists its kernels in the order in which they start. Kernels run one after the other; a collective
runs beside them from its `-start` to its `-done`, and one after the other, too:

    begins(c)  = max(now at its start, end of the collective before)
    exposed(c) = max(0, begins(c) + seconds(c) - now at its done)                        -> _Clock

Example: an all-gather of 3 ms, started in front of two kernels of 1 ms and awaited behind them, is exposed for 1 ms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from minialpa.hlo import HloCollective, collective_of
from minialpa.hlo.text import Computation, Instruction, Module, parse_module
from minialpa.hlo.trip_counts import trip_count

#: What XLA takes a kernel to cost, in the order in which its estimates are believed: `sol` comes from tables of
#: measured matrix products, and is the roofline, "", where there is none.
_ESTIMATES = ("sol", "")
_COSTS = re.compile(r'"reification_cost":(\[[^\]]*\])')


@dataclass(frozen=True, slots=True)
class Awaited:
    """One collective of a program.

    Attributes:
        collective: what it does, and how often.
        seconds: of one.
        exposed_s: seconds of one in which no kernel runs beside it.
        has_work: whether any kernel runs beside it.
    """

    collective: HloCollective
    seconds: float
    exposed_s: float
    has_work: bool

    @property
    def n_bytes(self) -> float:
        """Of all runs of it."""
        return self.collective.times * self.collective.n_bytes


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a program does on a device.

    Attributes:
        kernels_s: seconds of all kernels.
        total_s: seconds from the first kernel to the last, with what is exposed of collectives.
        awaited: the collectives, as they end.
    """

    kernels_s: float
    total_s: float
    awaited: tuple[Awaited, ...]

    @property
    def exposed_bytes(self) -> float:
        """Bytes of collectives that no kernel runs beside; parts of collectives count by their seconds."""
        return sum(a.n_bytes * a.exposed_s / a.seconds for a in self.awaited if a.seconds)

    @property
    def hidden_bytes(self) -> float:
        return sum(a.n_bytes for a in self.awaited) - self.exposed_bytes


def timeline(text: str, seconds_of: Callable[[HloCollective], float]) -> Timeline:
    """The timeline of the program that XLA printed as `text`.

    seconds_of: what one collective takes. XLA's own estimates begin with 0.1 ms, and some kinds have none.
    """
    module = parse_module(text)
    awaited: list[Awaited] = []
    kernels_s, total_s = _Reader(module, seconds_of, awaited).run(module.entry, 1)
    return Timeline(kernels_s, total_s, tuple(awaited))


@dataclass(slots=True)
class _Clock:
    """Times of a computation since its start: of the kernels, and of the links.

    Attributes:
        now: when the last kernel so far ends.
        kernels_s: seconds of kernels so far.
        links_free: when the last collective so far ends.
        started: for each collective that is under way, by name: when it ends, and the kernel seconds at its start.
    """

    now: float = 0.0
    kernels_s: float = 0.0
    links_free: float = 0.0
    started: dict[str, tuple[float, float]] = field(default_factory=dict)

    def run(self, kernels_s: float, total_s: float) -> None:
        self.now += total_s
        self.kernels_s += kernels_s

    def start(self, name: str, seconds: float) -> None:
        self.links_free = max(self.now, self.links_free) + seconds
        self.started[name] = (self.links_free, self.kernels_s)

    def wait(self, name: str, seconds: float) -> tuple[float, bool]:
        """Seconds of the collective that are exposed, and whether there were kernels beside it."""
        ends, kernels_s = self.started.pop(name)
        exposed_s = max(0.0, ends - self.now)
        self.now += exposed_s
        return min(exposed_s, seconds), self.kernels_s > kernels_s


class _Reader:
    """Walks the computations of a module."""

    def __init__(self, module: Module, seconds_of: Callable[[HloCollective], float], awaited: list[Awaited]) -> None:
        self._module, self._seconds_of, self._awaited = module, seconds_of, awaited

    def run(self, name: str, times: int) -> tuple[float, float]:
        """Seconds of kernels, and from beginning to end, of one run of a computation that runs `times` times."""
        computation, clock = self._module.computations[name], _Clock()
        pending: dict[str, HloCollective] = {}
        for instruction in computation.instructions:
            opcode = instruction.opcode
            if (one := collective_of(instruction, times, self._module.n_devices)) is not None:
                pending[instruction.name] = one
                clock.start(instruction.name, self._seconds_of(one))
                if not opcode.endswith("-start"):
                    self._wait(clock, instruction.name, pending)
            elif opcode.endswith("-done") and instruction.operands[0] in pending:
                self._wait(clock, instruction.operands[0], pending)
            else:
                clock.run(*self._one(instruction, computation, times))
        return clock.kernels_s, clock.now

    def _wait(self, clock: _Clock, name: str, pending: dict[str, HloCollective]) -> None:
        one = pending.pop(name)
        seconds = self._seconds_of(one)
        self._awaited.append(Awaited(one, seconds, *clock.wait(name, seconds)))

    def _one(self, instruction: Instruction, around: Computation, times: int) -> tuple[float, float]:
        """Seconds of the kernels, and of all, that an instruction runs which is no collective."""
        if instruction.opcode == "while":
            n_trips = trip_count(instruction, around, self._module) or 1
            each = [self.run(name, times * n_trips) for name in instruction.called("body", "condition")]
            return n_trips * sum(k for k, _ in each), n_trips * sum(t for _, t in each)
        # A conditional runs one of its branches: here, the longest.
        if instruction.opcode == "conditional":
            branches = instruction.called("branch_computations", "true_computation", "false_computation")
            return max((self.run(name, times) for name in branches), key=lambda seconds: seconds[1])
        if instruction.opcode in ("call", "async-start"):
            called = [n for n in instruction.called("to_apply", "calls") if n in self._module.computations]
            each = [self.run(name, times) for name in called]
            return sum(k for k, _ in each), sum(t for _, t in each)
        seconds = _kernel_s(instruction)
        return seconds, seconds


def _kernel_s(instruction: Instruction) -> float:
    """What XLA takes a kernel to take; 0 for what is none."""
    found = _COSTS.search(instruction.attributes)
    if found is None:
        return 0.0
    estimates = {cost["name"]: cost["exec_time_us"] for cost in json.loads(found[1])}
    return next((float(estimates[name]) for name in _ESTIMATES if name in estimates), 0.0) * 1e-6
