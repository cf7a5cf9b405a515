"""The text of a compiled program in; out, its seconds on a GPU by XLA's estimates, and how much communication it hides.

Kernels run one after the other, in the order of the text. Collectives run beside them, from `-start` to `-done`, one
after the other:

    begins(c)  = max(now at its start, end of the collective before)
    exposed(c) = max(0, begins(c) + seconds(c) - now at its done)
    waits(c)   = max(exposed(c), contention * seconds(c)), since collectives take a part of the rate of kernels

An all-gather of 3 ms that starts before two kernels of 1 ms, and ends after them, is exposed for 1 ms.

Copies between the memories of device and host run beside kernels in the same way, one after the other in each
direction.

An attention by cuDNN has the price of its kernel, whether or not the machine that compiled the program has cuDNN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minialpa.attention.cudnn import KERNEL_SCOPE
from minialpa.cluster import DeviceSpec
from minialpa.hlo import HloCollective, collective_of
from minialpa.hlo.text import Computation, Instruction, array_sizes, parse_module, split_tuple
from minialpa.xla_gpu.kernels import Kernels

_OP_NAME = re.compile(r'op_name="([^"]*)"')
#: In the shape of an array in the memory of the host.
_IN_HOST = "S(5)"
#: In the names of operations in the gradient of an attention.
_GRADIENT_SCOPE = "jit(differentiate)"
#: The call of cuDNN's kernel, and its rate: all are for 16 bits.
_KERNEL_CALL, _KERNEL_RATE = "__cudnn$fmha", "float16"


@dataclass(frozen=True, slots=True)
class ExposedCollective:
    """One collective of a program.

    exposed_s: seconds of one run in which no kernel runs beside it.
    has_work: any kernel runs beside it.
    """

    collective: HloCollective
    seconds: float
    exposed_s: float
    has_work: bool

    @property
    def n_bytes(self) -> float:
        """In all runs."""
        return self.collective.times * self.collective.n_bytes


@dataclass(frozen=True, slots=True)
class DeviceTimeline:
    """The times of a program on a device.

    total_s: seconds of all kernels and waits.
    exposed: all collectives, in the order of their ends.
    """

    kernels_s: float
    total_s: float
    exposed: tuple[ExposedCollective, ...]

    @property
    def exposed_bytes(self) -> float:
        """In proportion to exposed seconds."""
        return sum(a.n_bytes * a.exposed_s / a.seconds for a in self.exposed if a.seconds)

    @property
    def hidden_bytes(self) -> float:
        return sum(a.n_bytes for a in self.exposed) - self.exposed_bytes


def timeline(
    text: str, seconds_of: Callable[[HloCollective], float], device: DeviceSpec | None = None
) -> DeviceTimeline:
    """Of the program that XLA printed as `text`.

    seconds_of: one run of a collective. XLA's estimates are at least 0.1 ms, and are missing for some kinds.
    device: corrects XLA's estimates of kernels.
    """
    module = parse_module(text)
    exposed: list[ExposedCollective] = []
    kernels_s, total_s = _ModuleWalk(Kernels(module, device), seconds_of, exposed).run(module.entry, 1)
    return DeviceTimeline(kernels_s, total_s, tuple(exposed))


@dataclass(slots=True)
class _Clock:
    """Times of a computation since its start.

    now: end of the last kernel.
    kernels_s: so far.
    links_free: end of the last collective.
    host_free: ends of the last copies to and from the memory of the host.
    started: for each running collective or copy, its end, and `kernels_s` at its start.
    """

    now: float = 0.0
    kernels_s: float = 0.0
    links_free: float = 0.0
    host_free: list[float] = field(default_factory=lambda: [0.0, 0.0])
    started: dict[str, tuple[float, float]] = field(default_factory=dict)

    def run(self, kernels_s: float, total_s: float) -> None:
        self.now += total_s
        self.kernels_s += kernels_s

    def start(self, name: str, seconds: float) -> None:
        self.links_free = max(self.now, self.links_free) + seconds
        self.started[name] = (self.links_free, self.kernels_s)

    def start_copy(self, name: str, seconds: float, *, to_host: bool) -> None:
        self.host_free[to_host] = max(self.now, self.host_free[to_host]) + seconds
        self.started[name] = (self.host_free[to_host], self.kernels_s)

    def wait(self, name: str, seconds: float, contention: float = 0.0) -> tuple[float, bool]:
        """Exposed seconds of the collective, and whether kernels ran beside it."""
        ends, kernels_s = self.started.pop(name)
        exposed_s = max(0.0, ends - self.now)
        self.now += max(exposed_s, contention * seconds if contention else 0.0)
        return min(exposed_s, seconds), self.kernels_s > kernels_s


class _ModuleWalk:
    """Appends each collective to `exposed`."""

    def __init__(
        self, kernels: Kernels, seconds_of: Callable[[HloCollective], float], exposed: list[ExposedCollective]
    ) -> None:
        self._kernels, self._module = kernels, kernels.module
        self._seconds_of, self._exposed = seconds_of, exposed

    def run(self, name: str, times: int, *, in_loop: bool = False) -> tuple[float, float]:
        """(kernels, all) in one of `times` runs."""
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
            elif opcode == "copy-start" and _IN_HOST in instruction.shape:
                self._start_copy(clock, instruction)
            elif opcode == "copy-done" and instruction.operands[0] in clock.started:
                clock.wait(instruction.operands[0], math.inf)
            else:
                clock.run(*self._instruction_s(instruction, computation, times, in_loop))
        return clock.kernels_s, clock.now

    def _wait(self, clock: _Clock, name: str, pending: dict[str, HloCollective]) -> None:
        one = pending.pop(name)
        seconds = self._seconds_of(one)
        device = self._kernels.device
        contention = 0.0 if device is None else device.contention
        self._exposed.append(ExposedCollective(one, seconds, *clock.wait(name, seconds, contention)))

    def _start_copy(self, clock: _Clock, instruction: Instruction) -> None:
        target, *_ = split_tuple(instruction.shape)
        n_bytes = sum(size for _, size in array_sizes(target))
        device = self._kernels.device
        seconds = n_bytes / device.host_bandwidth if device is not None else 0.0
        clock.start_copy(instruction.name, seconds, to_host=_IN_HOST in target)

    def _instruction_s(
        self, instruction: Instruction, around: Computation, times: int, in_loop: bool
    ) -> tuple[float, float]:
        """(kernels, all)."""
        device = self._kernels.device
        if device is not None and KERNEL_SCOPE in _op_name(instruction):
            flops = self._attention_flops(instruction, around, in_loop)
            seconds = device.attention_s(flops, 0.0, _KERNEL_RATE)
            return seconds, seconds
        if instruction.opcode == "while":
            n_trips, names = instruction.expected_trips, instruction.called("body", "condition")
            each = [self.run(name, times * instruction.n_trips, in_loop=True) for name in names]
            return n_trips * sum(k for k, _ in each), n_trips * sum(t for _, t in each)
        if instruction.opcode == "conditional":
            names = instruction.called("branch_computations", "true_computation", "false_computation")
            return _branch(instruction, [self.run(name, times, in_loop=in_loop) for name in names], in_loop)
        if instruction.opcode in ("call", "async-start"):
            called = [n for n in instruction.called("to_apply", "calls") if n in self._module.computations]
            each = [self.run(name, times, in_loop=in_loop) for name in called]
            return sum(k for k, _ in each), sum(t for _, t in each)
        seconds = self._kernels.seconds(instruction, around)
        return seconds, seconds

    def _attention_flops(self, instruction: Instruction, around: Computation, in_loop: bool) -> float:
        """Counted in one of its programs."""
        if instruction.opcode == "while":
            n_trips = instruction.n_trips
            return n_trips * sum(self._flops_inside(name, in_loop=True) for name in instruction.called("body"))
        if instruction.opcode == "conditional":
            names = instruction.called("branch_computations", "true_computation", "false_computation")
            each = [self._flops_inside(name, in_loop=in_loop) for name in names]
            # The plain program counts: the operations of cuDNN's kernel are not in the text.
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


def _branch(instruction: Instruction, each: Sequence[tuple[float, float]], in_loop: bool) -> tuple[float, float]:
    """The longest branch, since the text does not name the branch that runs.

    In a loop, the mean counts, since iterations take different branches: a causal mask hides half of the pairs of
    blocks. In the gradient of an attention the shortest counts: it rarely recomputes its first pass.
    """
    if in_loop:
        kernels_s, total_s = (sum(column) / len(each) for column in zip(*each, strict=True))
        return kernels_s, total_s
    choose = min if _GRADIENT_SCOPE in _op_name(instruction) else max
    return choose(each, key=lambda seconds: seconds[1])
