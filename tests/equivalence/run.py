"""Runs drawn examples and prints their outcomes: `python -m tests.equivalence.run --examples 200 --seed 3`.

A long run, which a repeated command continues:
    python -m tests.equivalence.run --examples 2000 --seed 3 --processes 2 --log /tmp/drawn
--replay EXAMPLE runs one example, in the form that a failure prints; --smaller also searches for a smaller one with the
fault.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.xla_flags import FLAGS

if __name__ == "__main__":  # before jax starts its backend
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = " ".join(("--xla_force_host_platform_device_count=8", *FLAGS))

import jax

from tests.equivalence import engine
from tests.equivalence.drawing import Example, example_of, layers, pieces
from tests.equivalence.exact import Counted
from tests.equivalence.layers import Layer
from tests.equivalence.losses import Loss, Term
from tests.equivalence.model import BatchNorm, Model
from tests.equivalence.outcomes import Outcome
from tests.equivalence.steps import Training
from tests.equivalence.ways import Way

_NAMES = {cls.__name__: cls for cls in (BatchNorm, Counted, Example, Layer, Loss, Model, Term, Training, Way)}


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of the example with a number; seconds: of CPU time."""

    number: int
    outcome: Outcome
    seconds: float


def run_number(number: int) -> Found:
    """Runs the example with a number, and prints it if it is wrong or crashes."""
    example, began = example_of(number), time.process_time()
    try:
        outcome = engine.run(example)
    except Exception as error:
        outcome = Outcome("crash", f"SERIAL {error!r}")
    if not outcome.is_right:
        detail = outcome.detail if outcome.kind == "wrong" else outcome.reason
        print(f"{number}: {outcome.kind}: {detail}\n    {example}", flush=True)
    if number % 20 == 19:
        jax.clear_caches()
    return Found(number, outcome, time.process_time() - began)


def until_wrong(numbers: Iterable[int]) -> int:
    """Runs examples until one is wrong or crashes, and prints their number and the last. Returns whether one is."""
    n = 0
    for n, found in enumerate(map(run_number, numbers), 1):
        if not found.outcome.is_right:
            print(n, found.number, found.outcome.kind, found.outcome.reason.replace("\n", " ")[:200])
            return 1
    print(n, "examples are right")
    return 0


def summary(found: list[tuple[Example, Outcome, float]]) -> str:
    """Counts of the outcomes, the reasons if they are not equal, and the outcomes of each part of the grammar."""
    kinds = collections.Counter(outcome.kind for _, outcome, _ in found)
    sharp = sum(outcome.is_sharp for _, outcome, _ in found if outcome.kind == "equal")
    seconds = sum(t for *_, t in found)
    lines = [
        f"{len(found)} examples, {seconds:.0f} s ({seconds / max(1, len(found)):.1f} s for one): {_counts(kinds)}",
        f"{sharp} of {kinds['equal']} that are equal would show a factor of 1.01",
    ]
    for kind in ("refused", "rejected", "wrong", "crash"):
        reasons = collections.Counter(outcome.reason for _, outcome, _ in found if outcome.kind == kind)
        lines.extend(f"  {kind} {n}x {reason}" for reason, n in reasons.most_common())
    by_piece = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    for example, outcome, _ in found:
        for piece in pieces(example):
            by_piece[piece][outcome.kind] += 1
    lines.extend(f"  {sum(n.values())} with {piece}: {_counts(n)}" for piece, n in sorted(by_piece.items()))
    return "\n".join(lines)


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items())


# ---- a log, from which an interrupted run continues -----------------------------------------------------------------


def _read(log: Path) -> list[Found]:
    """The outcomes in a log, without a last incomplete line."""
    found = []
    for line in log.read_text().splitlines() if log.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            fields = json.loads(line)
            found.append(Found(fields["number"], Outcome(**fields["outcome"]), fields["seconds"]))
    return found


def _run(numbers: Sequence[int], n_processes: int, log: Path | None) -> list[Found]:
    """The outcomes of the examples, from the log or from a run, which adds them to the log."""
    found = {one.number: one for one in (_read(log) if log else ())}
    missing = [number for number in numbers if number not in found]
    with contextlib.ExitStack() as stack:
        if n_processes > 1:
            pool = ProcessPoolExecutor(n_processes, multiprocessing.get_context("spawn"), _be_strict)
            made = stack.enter_context(pool).map(run_number, missing)
        else:
            made = map(run_number, missing)
        file = stack.enter_context(log.open("a")) if log else None
        for one in made:
            found[one.number] = one
            if file:
                print(json.dumps(dataclasses.asdict(one)), file=file, flush=True)
    return [found[number] for number in numbers]


def _be_strict() -> None:
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_traceback_filtering", "off")  # The last line of a crash is its error.


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="examples begin with the number 1,000,000 times this")
    parser.add_argument(
        "--pieces", default="", help="only examples with one of these parts of the grammar or layers: attention,kernels"
    )
    parser.add_argument(
        "--until-wrong",
        action="store_true",
        help="end at the first example that is wrong or crashes; --examples then counts only examples with --pieces",
    )
    parser.add_argument("--log", type=Path, help="a file of outcomes; the examples in it do not run")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--replay")
    parser.add_argument("--smaller", action="store_true")
    args = parser.parse_args()
    _be_strict()
    if args.replay:
        _replay(eval(args.replay, _NAMES), args.smaller)
        return

    first, wanted = args.seed * 1_000_000, set(filter(None, args.pieces.split(",")))
    if args.until_wrong:
        drawn = (number for number in itertools.count(first) if _has_part(number, wanted))
        sys.exit(until_wrong(itertools.islice(drawn, args.examples)))
    numbers = [number for number in range(first, first + args.examples) if _has_part(number, wanted)]
    found = _run(numbers, args.processes, args.log)
    print(summary([(example_of(one.number), one.outcome, one.seconds) for one in found]))


def _has_part(number: int, wanted: AbstractSet[str]) -> bool:
    example = example_of(number)
    return not wanted or bool((pieces(example) | layers(example)) & wanted)


def _replay(example: Example, smaller: bool) -> None:
    outcome = engine.run(example)
    print(outcome.kind, outcome.detail)
    if smaller:
        print(engine.smaller(example, outcome))


if __name__ == "__main__":
    _main()
