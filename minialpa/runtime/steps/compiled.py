"""Compiles the functions of a program for a mesh; both runtimes do it here.

`jax.jit` lowers a function with the shardings that the program gives; XLA compiles several lowered functions at once,
and those that are equal once.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from minialpa.runtime.steps.step_trace import flagged

#: Elements of less than a byte. The function that `lower(...).compile()` gives takes no arrays of these on CPU: it asks
#: for a packed layout, which such arrays never have there. Calls of the jitted function pack and unpack them.
_NARROW = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")

#: One in so many calls of functions for several CPU devices waits, see `PacedCall`. At most twice as many are
#: unfinished: half of what XLA runs at a time.
_PERIOD = 8


@dataclass(frozen=True, eq=False)
class LoweredFunction:
    """A function that XLA is to compile.

    Attributes:
        jitted: the function under `jax.jit`.
        lowered: what that lowers to.
        n_inputs: the number of its arguments.
        outside: what its text leaves out or is long to say: types, shardings, devices, arguments that are used up.
    """

    jitted: Any
    lowered: Any
    n_inputs: int
    outside: Hashable

    @functools.cached_property
    def text(self) -> str | None:
        """StableHLO with all constants; None if it does not say all that the function computes: for calls back into
        Python, which it names by their numbers, and constants that jax passes beside the arguments."""
        text: str = self.lowered.as_text()
        parameters = text[text.index("@main(") :].partition("->")[0]
        is_whole = parameters.count("%arg") == self.n_inputs and "callback" not in text
        return text if is_whole else None

    def equals(self, other: LoweredFunction) -> bool:
        """Whether both compute the same, where `outside` is the same."""
        return self.text is not None and self.text == other.text


def lower(
    function: Callable[..., Any],
    avals: Sequence[Any],
    *,
    mesh: Mesh,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    donated: Sequence[int],
    compiler_options: Sequence[tuple[str, bool]] = (),
    with_flag: bool = False,
) -> LoweredFunction:
    """The function jitted for a mesh, and lowered.

    Args:
        function: of all inputs; returns a sequence of outputs.
        avals: shape and dtype of each input.
        mesh: the devices.
        in_specs: sharding of each input.
        out_specs: sharding of each output.
        donated: positions of the inputs whose buffers the outputs may reuse.
        compiler_options: names and values of options of XLA.
        with_flag: add the output by which traced steps see the end of a call (`step_trace.flagged`).
    """
    specs = (*out_specs, PartitionSpec()) if with_flag else out_specs
    jitted = jax.jit(
        flagged(function) if with_flag else function,
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in in_specs),
        out_shardings=tuple(NamedSharding(mesh, spec) for spec in specs),
        donate_argnums=tuple(donated),
        keep_unused=True,
        compiler_options=dict(compiler_options),
    )
    traced = jitted.trace(*avals)
    types = tuple((x.shape, x.dtype, x.weak_type) for x in (*avals, *jax.tree.leaves(traced.out_info)))
    outside = (types, mesh, tuple(in_specs), tuple(specs), tuple(donated), tuple(compiler_options))
    return LoweredFunction(jitted, traced.lower(), len(avals), outside)


def compile_all(lowered: Iterable[LoweredFunction]) -> list[Any]:
    """Compile what `lower` gives, equal functions once. An iterable that lowers as it goes overlaps with the compiler,
    which runs in other threads: lowering holds Python's interpreter lock, compiling does not."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        known: dict[Hashable, list[tuple[LoweredFunction, Future[Any]]]] = defaultdict(list)
        pending = []
        for function in lowered:
            alike = known[function.outside]
            found = next((future for other, future in alike if function.equals(other)), None)
            if found is None:
                found = pool.submit(_compile, function.jitted, function.lowered)
                alike.append((function, found))
            pending.append(found)
        return [future.result() for future in pending]


def allocation_size(compiled: Any) -> int:
    """Bytes per device that a compiled function needs: arguments, results and temporaries."""
    stats = compiled.memory_analysis()
    used = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return int(used - stats.alias_size_in_bytes)


def _compile(jitted: Any, lowered: Any) -> Any:
    avals = jax.tree.leaves(lowered.in_avals)
    if any(str(aval.dtype) in _NARROW for aval in avals):
        return NarrowCall(jitted, lowered)
    compiled = lowered.compile()
    devices = {device for sharding in jax.tree.leaves(compiled.output_shardings) for device in sharding.device_set}
    return paced(compiled, _marker_of(lowered), devices) if devices else compiled


def paced(function: Any, marker: int, devices: Collection[jax.Device]) -> Any:
    """A function for these devices, as a `PacedCall` if they need it."""
    if len(devices) < 2 or any(device.platform != "cpu" for device in devices):
        return function
    return PacedCall(function, marker)


class PacedCall:
    """A compiled function for several CPU devices. When a call returns, all but the last few calls are finished.

    XLA runs all devices of a process on one pool of threads, and runs at most 32 calls on a device at a time. A further
    call keeps a thread while it waits for its turn. If all threads wait, some for their turn and others in a collective
    for a device that has no thread left, none of them ever goes on.

    To wait takes as long as a short call, even for what is finished, so only every `_PERIOD`-th call waits, for the one
    that waited before it. XLA begins a call for several devices when the one before it, in the order of issue, has
    ended on all of its devices: if a call is finished, all earlier ones are. So after a call with number n * _PERIOD,
    at most _PERIOD calls are unfinished, and before the next such call has waited, at most 2 * _PERIOD. Threads that
    issue calls meanwhile wait for the lock, each with one call.
    """

    _lock = threading.Lock()
    #: Calls of all such functions of the process, which share the pool.
    _n_calls: ClassVar[int] = 0
    #: A result of the last call that waited.
    _marker: ClassVar[Any] = None

    def __init__(self, compiled: Any, marker: int) -> None:
        """marker: number of a result, which is kept until later calls have ended."""
        self._compiled, self._number = compiled, marker

    def __call__(self, *args: Any) -> Any:
        results = self._compiled(*args)
        with PacedCall._lock:
            PacedCall._n_calls += 1
            if PacedCall._n_calls % _PERIOD:
                return results
            earlier, PacedCall._marker = PacedCall._marker, results[self._number]
            # A later call may have taken over the earlier result. Nobody has the new one yet.
            if earlier is not None and not _await(earlier):
                _await(PacedCall._marker)
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def _await(result: Any) -> bool:
    """Wait until a result is computed; False if another call has taken it over, of which it says nothing.

    An error of the call is raised where its results are read.
    """
    # Not `is_ready`: XLA crashes if it is asked that of a buffer that was taken over.
    try:
        result.block_until_ready()
    except RuntimeError:
        return not result.is_deleted()
    return True


def _marker_of(lowered: Any) -> int:
    """The result by which a call is found to be finished: one that is likely to be there when later calls run, and is
    small.

    A training step takes over its state, so results like a donated input are mostly gone after the next call. Its loss
    is mostly behind the state.
    """
    taken_over = {(arg.shape, arg.dtype) for arg in jax.tree.leaves(lowered.args_info) if arg.donated}
    results = jax.tree.leaves(lowered.out_info)

    def rank(number: int) -> tuple[bool, int, int]:
        result = results[number]
        return (result.shape, result.dtype) in taken_over, math.prod(result.shape), -number

    return min(range(len(results)), key=rank)


class NarrowCall:
    """A compiled function that takes arrays of narrow elements.

    Its first call compiles it. The methods of `jax.stages.Compiled` compile it once more, to look into it.
    """

    def __init__(self, jitted: Any, lowered: Any) -> None:
        self._jitted, self._lowered = jitted, lowered

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*args)

    @functools.cached_property
    def _compiled(self) -> Any:
        return self._lowered.compile()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)
