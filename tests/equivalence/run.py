"""Runs drawn examples and prints what becomes of them: `python -m tests.equivalence.run --examples 200 --seed 3`.

--replay EXAMPLE runs one example again, as a failure prints it; --smaller also looks for a smaller one with the fault.
"""

from __future__ import annotations

import argparse
import collections
import os
import time

from tests.xla_flags import FLAGS

if __name__ == "__main__":  # before jax starts its backend
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = " ".join(("--xla_force_host_platform_device_count=8", *FLAGS))

import jax

from tests.equivalence import engine
from tests.equivalence.drawing import Example, example_of
from tests.equivalence.layers import Layer
from tests.equivalence.losses import Loss, Term
from tests.equivalence.model import BatchNorm, Model
from tests.equivalence.outcomes import Outcome
from tests.equivalence.steps import Training
from tests.equivalence.ways import Way

_NAMES = {cls.__name__: cls for cls in (BatchNorm, Example, Layer, Loss, Model, Term, Training, Way)}


def outcomes(examples: list[Example], seconds: float | None = None) -> list[tuple[Example, Outcome, float]]:
    """What becomes of the examples, with CPU seconds of each; those after `seconds` are left out."""
    found, start = [], time.monotonic()
    for i, example in enumerate(examples):
        if seconds and time.monotonic() - start > seconds:
            break
        began = time.process_time()
        try:
            outcome = engine.run(example)
        except Exception as error:
            outcome = Outcome("crash", f"SERIAL {error!r}")
        found.append((example, outcome, time.process_time() - began))
        if outcome.kind in ("wrong", "crash"):
            print(
                f"{i}: {outcome.kind}: {outcome.detail if outcome.kind == 'wrong' else outcome.reason}\n    {example}",
                flush=True,
            )
        if i % 20 == 19:
            jax.clear_caches()
    return found


def summary(found: list[tuple[Example, Outcome, float]]) -> str:
    """Counts of the outcomes, and of the reasons of those that are not equal."""
    kinds = collections.Counter(outcome.kind for _, outcome, _ in found)
    sharp = sum(outcome.is_sharp for _, outcome, _ in found if outcome.kind == "equal")
    lines = [
        f"{len(found)} examples, {sum(t for *_, t in found):.0f} s: " + ", ".join(f"{n} {k}" for k, n in kinds.items())
    ]
    lines.append(f"{sharp} of {kinds['equal']} that are equal would show a factor of 1.01")
    for kind in ("refused", "rejected", "crash"):
        reasons = collections.Counter(outcome.reason for _, outcome, _ in found if outcome.kind == kind)
        lines.extend(f"  {kind} {n}x {reason}" for reason, n in reasons.most_common())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--replay")
    parser.add_argument("--smaller", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if args.replay:
        example = eval(args.replay, _NAMES)
        outcome = engine.run(example)
        print(outcome.kind, outcome.detail)
        if args.smaller:
            print(engine.smaller(example, outcome))
        return
    first = args.seed * 1_000_000
    print(summary(outcomes([example_of(first + i) for i in range(args.examples)], args.seconds)))


if __name__ == "__main__":
    main()
