"""Compiles the functions of a program for a mesh, for both runtimes.

`jax.jit` lowers a function with the shardings that the program gives; XLA compiles several lowered functions at once,
and equal ones only once.
"""

from __future__ import annotations

import functools
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
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
    """A function that XLA compiles. `jitted` is the function under `jax.jit`.

    `outside` has types, shardings, devices and donated arguments, which are not in its text or make it long.
    """

    jitted: Any
    lowered: Any
    n_inputs: int
    outside: Hashable

    @functools.cached_property
    def text(self) -> str | None:
        """StableHLO with all constants; None if the text does not determine the function: it names calls back into
        Python by number, and has no constants that jax passes beside the arguments.
        """
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
    """The function of `avals` jitted for a mesh, and lowered. It returns a sequence of outputs.

    Args:
        in_specs, out_specs: shardings of inputs and outputs.
        donated: positions of the inputs whose buffers the outputs may reuse.
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
    """Compile lowered functions, equal ones once. An iterable that lowers as it goes overlaps with the compiler, which
    runs in other threads: lowering holds Python's interpreter lock, compiling does not.
    """
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


def function_seconds(compiled: Any, repeats: int) -> float:
    """Median seconds of a call on zeros, from ready arguments to ready results, after one call to warm up.

    This includes the cost of starting a call and of noticing its end. In a runtime of several processes, all of them
    have to measure the same function at the same time.
    """
    avals, shardings = jax.tree.leaves(compiled.in_avals), jax.tree.leaves(compiled.input_shardings)
    # jitted, so that each process makes its own part
    make = jax.jit(lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in avals], out_shardings=shardings)
    seconds = []
    for _ in range(repeats + 1):
        args = jax.block_until_ready(make())  # anew: the call may take over their memory
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _compile(jitted: Any, lowered: Any) -> Any:
    avals = jax.tree.leaves(lowered.in_avals)
    if any(str(aval.dtype) in _NARROW for aval in avals):
        return NarrowCall(jitted, lowered)
    compiled = lowered.compile()
    devices = {device for sharding in jax.tree.leaves(compiled.output_shardings) for device in sharding.device_set}
    return paced(compiled, devices) if devices else compiled


def paced(function: Any, devices: Collection[jax.Device]) -> Any:
    """A function for these devices, as a `PacedCall` if they need it."""
    if len(devices) < 2 or any(device.platform != "cpu" for device in devices):
        return function
    return PacedCall(function)


class PacedCall:
    """A compiled function for several CPU devices. When a call returns, only the last few calls are unfinished.

    XLA runs all devices of a process on one pool of threads, and runs at most 32 calls on a device at a time. A further
    call keeps a thread while it waits for its turn. If all threads wait, some for their turn and others in a collective
    for a device without a thread, they wait for ever.

    Waiting takes as long as a short call, even for a finished one, so only every `_PERIOD`-th call waits, for the one
    that waited before it. XLA begins a call for several devices when the one before it, in the order of issue, has
    ended on all of its devices: if a call is finished, all earlier ones are. So after a call with number n * _PERIOD,
    at most _PERIOD calls are unfinished, and before the next such call has waited, at most 2 * _PERIOD. Threads that
    issue calls meanwhile wait for the lock, each with one call.
    """

    _lock = threading.Lock()
    #: Calls of all such functions of the process, which share the pool.
    _n_calls: ClassVar[int] = 0
    #: The last result of the last call that waited: mostly the loss, which later calls do not take over.
    _marker: ClassVar[Any] = None

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __call__(self, *args: Any) -> Any:
        results = self._compiled(*args)
        with PacedCall._lock:
            PacedCall._n_calls += 1
            if PacedCall._n_calls % _PERIOD:
                return results
            earlier, PacedCall._marker = PacedCall._marker, results[-1]
            # A later call may have taken over the earlier result. No call has the new one yet.
            if earlier is not None and not _await(earlier):
                _await(PacedCall._marker)
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def _await(result: Any) -> bool:
    """Wait until a result is computed; False if another call has taken it over, so that this call may be unfinished.

    An error of the call is raised where its results are read.
    """
    # Not `is_ready`, which crashes for a buffer that was taken over.
    try:
        result.block_until_ready()
    except RuntimeError:
        return not result.is_deleted()
    return True


class NarrowCall:
    """A compiled function that takes arrays of narrow elements.

    Its first call compiles it. The methods of `jax.stages.Compiled` compile it a second time, for inspection.
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
