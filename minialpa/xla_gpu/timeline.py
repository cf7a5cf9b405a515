"""How long a compiled program takes on a GPU by XLA's estimates (kernels.py), and what of its communication is hidden.

The text of a program lists its kernels in the order in which they start. Kernels run one after the other; a collective
runs beside them from its `-start` to its `-done`, and one after the other, too:

    begins(c)  = max(now at its start, end of the collective before)
    exposed(c) = max(0, begins(c) + seconds(c) - now at its done)                        -> _Clock

Example: an all-gather of 3 ms, started in front of two kernels of 1 ms and awaited behind them, is exposed for 1 ms.

An attention that cuDNN has a kernel for takes as long as that kernel, whatever computes it in the text: a machine
without cuDNN compiles a plain program for it, and one with cuDNN both, to choose while it runs. -> _attention_flops
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minialpa.attention.cudnn import KERNEL_SCOPE
from minialpa.cluster import DeviceSpec
from minialpa.hlo import HloCollective, collective_of
from minialpa.hlo.text import Computation, Instruction, parse_module
from minialpa.xla_gpu.kernels import Kernels

_OP_NAME = re.compile(r'op_name="([^"]*)"')
#: In the names of what is computed by the gradient of an attention in plain jax.
_GRADIENT_SCOPE = "jit(differentiate)"
#: The call of cuDNN's kernel, and the rate at which it computes: there are only kernels for 16 bits.
_KERNEL_CALL, _KERNEL_RATE = "__cudnn$fmha", "float16"


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


def timeline(text: str, seconds_of: Callable[[HloCollective], float], device: DeviceSpec | None = None) -> Timeline:
    """The timeline of the program that XLA printed as `text`.

    seconds_of: what one collective takes. XLA's own estimates begin with 0.1 ms, and some kinds have none.
    device: the GPU, by which estimates are corrected; without it they count as they are.
    """
    module = parse_module(text)
    awaited: list[Awaited] = []
    kernels_s, total_s = _Reader(Kernels(module, device), seconds_of, awaited).run(module.entry, 1)
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

    def __init__(self, kernels: Kernels, seconds_of: Callable[[HloCollective], float], awaited: list[Awaited]) -> None:
        self._kernels, self._module = kernels, kernels.module
        self._seconds_of, self._awaited = seconds_of, awaited

    def run(self, name: str, times: int, *, in_loop: bool = False) -> tuple[float, float]:
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
                clock.run(*self._one(instruction, computation, times, in_loop))
        return clock.kernels_s, clock.now

    def _wait(self, clock: _Clock, name: str, pending: dict[str, HloCollective]) -> None:
        one = pending.pop(name)
        seconds = self._seconds_of(one)
        self._awaited.append(Awaited(one, seconds, *clock.wait(name, seconds)))

    def _one(self, instruction: Instruction, around: Computation, times: int, in_loop: bool) -> tuple[float, float]:
        """Seconds of the kernels, and of all, that an instruction runs which is no collective."""
        device = self._kernels.device
        if device is not None and KERNEL_SCOPE in _op_name(instruction):
            flops = self._attention_flops(instruction, around, in_loop)
            seconds = device.attention_s(flops, 0.0, _KERNEL_RATE)
            return seconds, seconds
        if instruction.opcode == "while":
            n_trips = instruction.n_trips
            names = instruction.called("body", "condition")
            each = [self.run(name, times * n_trips, in_loop=True) for name in names]
            return n_trips * sum(k for k, _ in each), n_trips * sum(t for _, t in each)
        if instruction.opcode == "conditional":
            names = _branches(instruction)
            return _branch(instruction, [self.run(name, times, in_loop=in_loop) for name in names], in_loop)
        if instruction.opcode in ("call", "async-start"):
            called = [n for n in instruction.called("to_apply", "calls") if n in self._module.computations]
            each = [self.run(name, times, in_loop=in_loop) for name in called]
            return sum(k for k, _ in each), sum(t for _, t in each)
        seconds = self._kernels.seconds(instruction, around)
        return seconds, seconds

    def _attention_flops(self, instruction: Instruction, around: Computation, in_loop: bool) -> float:
        """Floating point operations of the products of an attention, without what computes them in another way."""
        if instruction.opcode == "while":
            n_trips = instruction.n_trips
            return n_trips * sum(self._flops_inside(name, in_loop=True) for name in instruction.called("body"))
        if instruction.opcode == "conditional":
            names = _branches(instruction)
            each = [self._flops_inside(name, in_loop=in_loop) for name in names]
            # The plain program beside cuDNN's kernel, whose own operations are not in the text.
            if any(self._calls_kernel(name) for name in names):
                return max(each)
            return _branch(instruction, [(flops, flops) for flops in each], in_loop)[0]
        product = self._kernels.product(instruction, around)
        return 0.0 if product is None else product.flops

    def _flops_inside(self, name: str, *, in_loop: bool) -> float:
        computation = self._module.computations[name]
        return sum(self._attention_flops(one, computation, in_loop) for one in computation.instructions)

    def _calls_kernel(self, name: str) -> bool:
        return any(_KERNEL_CALL in one.attributes for one in self._module.computations[name].instructions)


def _op_name(instruction: Instruction) -> str:
    found = _OP_NAME.search(instruction.attributes)
    return found[1] if found else ""


def _branches(instruction: Instruction) -> tuple[str, ...]:
    return instruction.called("branch_computations", "true_computation", "false_computation")


def _branch(instruction: Instruction, each: Sequence[tuple[float, float]], in_loop: bool) -> tuple[float, float]:
    """What a conditional takes, of which one branch runs that the text does not name: the longest.

    In a loop, each iteration has a branch of its own, so the mean counts: a causal mask leaves half of the pairs of
    blocks. The gradient of an attention computes its first pass again in rare cases only, so there the shortest counts.
    """
    if in_loop:
        kernels_s, total_s = (sum(column) / len(each) for column in zip(*each, strict=True))
        return kernels_s, total_s
    choose = min if _GRADIENT_SCOPE in _op_name(instruction) else max
    return choose(each, key=lambda seconds: seconds[1])
