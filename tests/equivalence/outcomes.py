"""The outcome of a step under a method: equal to the serial run, refused for a reason, wrong, or a crash."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

import minialpa
from minialpa.errors import InfeasibleError, ShardingError, TraceError
from minialpa.methods import Method
from tests.equivalence.comparison import Reference, differences, host

#: `equal`: the serial run's results. `refused`: by a TraceError that names an operation and a line of source.
#: `rejected`: another deliberate error: no sharding or no stages fit.
Kind = Literal["equal", "refused", "rejected", "wrong", "crash"]

Step = Callable[..., Any]
#: The serial run, for a number of micro-batches and the arguments: BatchNorm takes its statistics over that many parts
#: of the batch.
ReferenceFor = Callable[[int, Sequence[Any]], Reference]

_NAMES_AN_OPERATION = re.compile(r"`[\w.]+`.*\.py:\d+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`detail`: the worst differences, the message, or the traceback. `is_sharp`: a factor of 1.01 is detected."""

    kind: Kind
    detail: str = ""
    is_sharp: bool = True

    @property
    def is_right(self) -> bool:
        return self.kind in ("equal", "refused", "rejected")

    @property
    def reason(self) -> str:
        """The detail without numbers and places, so that equal reasons can be counted."""
        lines = self.detail.strip().splitlines()
        text = (lines[-1] if self.kind == "crash" else lines[0]) if lines else ""
        text = re.sub(r"\S*/\S*\.py:\d+\S*( \(\S*\))?", "LINE", text)
        return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", text)[:160]


#: Errors about the request, which need not name an operation.
_ABOUT_THE_REQUEST = re.compile(r"cannot be split into|cannot make \d+ layers")


#: A batch runs in fewer micro-batches than requested.
_FEWER = re.compile(r"A batch of \d+ examples cannot be split into \d+ equal micro-batches")
#: Allowed warnings: fewer micro-batches, another split of the examples than in earlier batches, state that an update
#: gathers, and boundaries that a checkpoint around the model hides.
_MAY_WARN = (
    _FEWER.pattern,
    r"This batch has another shape than the one before|(?s:.*)so it is planned without",
    r"(?s:.*)gathers optimizer state that is stored in shards",
    r"The layers of this pipeline end at `mark_pipeline_boundary",
)


def outcome_of(
    step: Step,
    args: Sequence[Any],
    method: Method | None,
    batch_argnums: Sequence[int],
    reference_for: ReferenceFor,
    before: Sequence[Any] | None = None,
    flag: tuple[str, Any] | None = None,
) -> Outcome:
    """Runs the step under `method` (None: chosen by minialpa) and compares it with the serial run.

    before: arguments of an earlier call; this call continues from the state that it returns. flag: a setting of jax
    under which an earlier call runs, whose results are dropped. Warnings that `_MAY_WARN` does not list are errors.
    """
    parallel = minialpa.parallelize(step, method=method, batch_argnums=batch_argnums)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("error")
            for pattern in _MAY_WARN:
                warnings.filterwarnings("always", pattern)
            if before is not None:
                state, _ = parallel(*before)
                # The state stays on the devices of the first call; the serial run continues from a copy.
                args = (jax.tree.map(host, state), *args[1:])
                caught.clear()
            if flag is not None:
                with _under(*flag):
                    parallel(*args)
            found = parallel(*(args if before is None else (state, *args[1:])))
        plan = parallel.get_last_executable().get_parallel_plan()
    except TraceError as error:
        named = _NAMES_AN_OPERATION.search(str(error))
        if _ABOUT_THE_REQUEST.search(str(error)):
            return Outcome("rejected", f"TraceError: {error}")
        return Outcome("refused", str(error)) if named else Outcome("crash", f"no operation is named: {error}")
    except (ShardingError, InfeasibleError) as error:
        return Outcome("rejected", f"{type(error).__name__}: {error}")
    except Exception:
        return Outcome("crash", traceback.format_exc())

    fault = _fault_of_warnings(plan.n_micro_batches, method, [str(one.message) for one in caught])
    if fault:
        return Outcome("crash", fault)
    # `per_micro_batch` lists statistics of a micro-batch; all others are of the whole batch.
    expected = reference_for(plan.n_micro_batches if plan.per_micro_batch else 1, args)
    wrong = differences(found, expected)
    return Outcome("wrong" if wrong else "equal", "; ".join(map(str, wrong[:4])), expected.is_sharp)


@contextlib.contextmanager
def _under(name: str, value: Any) -> Iterator[None]:
    """With another value of a setting of jax."""
    old = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, old)


def _fault_of_warnings(n: int, method: Method | None, messages: Sequence[str]) -> str:
    """The fault in the warnings of a call with `n` micro-batches: one is due if there are fewer than requested."""
    asked = getattr(method, "num_micro_batches", None)
    if not isinstance(asked, int):
        return ""
    warned = any(_FEWER.match(message) for message in messages)
    if warned == (n < asked):
        return ""
    return f"{n} micro-batches in place of {asked}, " + ("without a warning" if not warned else "and a warning")
