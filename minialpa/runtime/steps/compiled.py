"""Functions with types and shardings go in, callables on a mesh come out."""

from __future__ import annotations

import functools
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from minialpa.runtime.steps.step_trace import flagged

#: Dtypes with elements of less than a byte. On CPU, `lower(...).compile()` expects their arrays in a packed layout,
#: which they never have. Calls of the jitted function pack and unpack them.
_NARROW = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")

#: One in so many calls of a `PacedCall` waits.
_PERIOD = 8


@dataclass(frozen=True, eq=False)
class LoweredFunction:
    """outside: types, shardings, devices and donated arguments, which the text lacks or which make it long."""

    jitted: Any
    lowered: Any
    n_inputs: int
    outside: Hashable

    @functools.cached_property
    def text(self) -> str | None:
        """StableHLO; None if the text does not determine the function: it names callbacks into Python by number, and
        lacks constants that jax passes as arguments.
        """
        text: str = self.lowered.as_text()
        parameters = text[text.index("@main(") :].partition("->")[0]
        is_whole = parameters.count("%arg") == self.n_inputs and "callback" not in text
        return text if is_whole else None

    def equals(self, other: LoweredFunction) -> bool:
        """Whether both compute the same, if `outside` is equal."""
        return self.text is not None and self.text == other.text


def lower(
    function: Callable[..., Any],
    avals: Sequence[Any],
    *,
    mesh: Mesh,
    in_shardings: Sequence[NamedSharding],
    out_shardings: Sequence[NamedSharding],
    donated: Sequence[int],
    compiler_options: Sequence[tuple[str, bool]] = (),
    with_flag: bool = False,
) -> LoweredFunction:
    """Lower `function`, which returns a sequence of outputs, for a mesh.

    donated: positions of donated inputs.
    with_flag: add the output by which traced steps see the end of a call (`step_trace.flagged`).
    """
    flag = (NamedSharding(mesh, PartitionSpec()),) if with_flag else ()
    out_shardings = (*out_shardings, *flag)
    jitted = jax.jit(
        flagged(function) if with_flag else function,
        in_shardings=tuple(in_shardings),
        out_shardings=out_shardings,
        donate_argnums=tuple(donated),
        keep_unused=True,
        compiler_options=dict(compiler_options),
    )
    traced = jitted.trace(*avals)
    types = tuple((x.shape, x.dtype, x.weak_type) for x in (*avals, *jax.tree.leaves(traced.out_info)))
    outside = (types, mesh, tuple(in_shardings), out_shardings, tuple(donated), tuple(compiler_options))
    return LoweredFunction(jitted, traced.lower(), len(avals), outside)


def compile_all(lowered: Iterable[LoweredFunction], note: Callable[[int], object] = int) -> list[Any]:
    """Compile lowered functions, equal ones once, in other threads. `note` gets the number of compiled ones.

    Compiling does not hold Python's interpreter lock: an iterable that lowers one by one overlaps with it.
    """
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        known: dict[Hashable, list[tuple[LoweredFunction, Future[Any]]]] = defaultdict(list)
        pending: list[Future[Any]] = []
        for function in lowered:
            note(sum(future.done() for future in pending))
            candidates = known[function.outside]
            compiling = next((future for other, future in candidates if function.equals(other)), None)
            if compiling is None:
                compiling = pool.submit(_compile, function.jitted, function.lowered)
                candidates.append((function, compiling))
            pending.append(compiling)
        for _ in as_completed(pending):
            note(sum(future.done() for future in pending))
        return [future.result() for future in pending]


def allocation_size(compiled: Any) -> int:
    """Bytes per device of arguments, results and temporaries. A donated argument and its result count once."""
    stats = compiled.memory_analysis()
    used = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return int(used - stats.alias_size_in_bytes)


def function_seconds(compiled: Any, repeats: int) -> float:
    """Median seconds of a call on zeros, after one call to warm up.

    The processes of one mesh must measure the same function at the same time.
    """
    avals, shardings = jax.tree.leaves(compiled.in_avals), jax.tree.leaves(compiled.input_shardings)
    # jitted: each process makes its own part
    make = jax.jit(lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in avals], out_shardings=shardings)
    seconds = []
    for _ in range(repeats + 1):
        args = jax.block_until_ready(make())  # anew: the call may take over their memory
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _compile(jitted: Any, lowered: Any) -> Any:
    """A `NarrowCall` for narrow dtypes, a `PacedCall` on several CPU devices."""
    avals = jax.tree.leaves(lowered.in_avals)
    if any(str(aval.dtype) in _NARROW for aval in avals):
        return NarrowCall(jitted, lowered)
    compiled = lowered.compile()
    devices = {device for sharding in jax.tree.leaves(compiled.output_shardings) for device in sharding.device_set}
    return paced(compiled, devices) if devices else compiled


def paced(function: Any, devices: Collection[jax.Device]) -> Any:
    if len(devices) < 2 or any(device.platform != "cpu" for device in devices):
        return function
    return PacedCall(function)


class PacedCall:
    """A function for several CPU devices, of which only the last few calls are unfinished.

    XLA runs all devices of a process on one pool of threads, and at most 32 calls on a device at a time. A further call
    keeps a thread while it waits for its turn. If all threads wait, some for a turn and others in a collective for a
    device without a thread, they wait for ever.

    A wait takes as long as a short call, so only every `_PERIOD`-th call waits, for the previous call that waited. XLA
    finishes calls for several devices in the order of issue. So at most `2 * _PERIOD` calls are unfinished, half of
    XLA's limit, and one more for each thread at the lock.
    """

    _lock = threading.Lock()
    #: Over all functions, which share the pool.
    _n_calls: ClassVar[int] = 0
    #: Last result of the last call that waited: usually the loss, which later calls do not take over.
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
            # A later call may have taken over the earlier result.
            if earlier is not None and not _await(earlier):
                _await(PacedCall._marker)
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def _await(result: Any) -> bool:
    """False if another call has taken the result over. Errors of the call are raised where its results are read."""
    # Not `is_ready`, which crashes for a buffer that was taken over.
    try:
        result.block_until_ready()
    except RuntimeError:
        return not result.is_deleted()
    return True


class NarrowCall:
    """The first call compiles; methods of `jax.stages.Compiled` compile a second time, for inspection."""

    def __init__(self, jitted: Any, lowered: Any) -> None:
        self._jitted, self._lowered = jitted, lowered

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*args)

    @functools.cached_property
    def _compiled(self) -> Any:
        return self._lowered.compile()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)
