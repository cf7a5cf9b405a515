"""Makes docs/reductions.md by running each reduction under each method: `python -m tests.reductions_doc` writes it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.xla_flags import FLAGS

if __name__ == "__main__":  # before jax starts its backend
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = " ".join(("--xla_force_host_platform_device_count=8", *FLAGS))

import jax

from minialpa import DataParallel, PipeshardParallel, ShardParallel, Zero3Parallel
from minialpa.methods import Method
from tests.reductions import DTYPES, REDUCTIONS, Case, N, taken, verdicts

PATH = Path(__file__).parents[1] / "docs" / "reductions.md"
METHODS = ("micro-batches", "devices", "ZeRO-3", "stages")

_HEAD = f"""\
# Reductions

A reduction over the examples of a batch is computed in parts, by micro-batches, devices or stages, and the parts are
combined. The result has the dtype and the value of `jax.jit` of the same step. `tests/reductions_doc.py` made the table
below with jax {jax.__version__}, and the tests check it.

- Integers wrap around in their dtype, and bitwise reductions stay bitwise.
- A maximum or minimum with a NaN is NaN, and infinities stay.
- Floats are added in another order. Sums of 16-bit floats over micro-batches are accumulated in float32 and rounded
  once, as `jnp.sum` does with a whole batch. Devices add in the dtype of the partial results.
- The sign of zero may be lost where devices add: -0 becomes 0 in a sum over devices, and in a lookup in a table whose
  rows are on several devices.
- Operations without parts along the examples run once, on all rows: sort, cumsum, argmax, a function of the user in
  `lax.reduce`, the maximum of complex numbers.

Each reduction runs over {N} examples under four methods: `ShardParallel(num_micro_batches=4)` on one device,
`DataParallel` on four devices, `Zero3Parallel` on two, and `PipeshardParallel` with two stages and two micro-batches.
The dtypes are all that `jax.jit` accepts, with `jax_enable_x64`; *equal* holds for all of them.

"""


def make_method(name: str) -> Method:
    devices = jax.devices()
    return {
        "micro-batches": lambda: ShardParallel(devices[:1], 4),
        "devices": lambda: DataParallel(devices[:4]),
        "ZeRO-3": lambda: Zero3Parallel(devices[:2]),
        "stages": lambda: PipeshardParallel(devices[:2], 2, layer_option="manual"),
    }[name]()


@contextmanager
def doubles() -> Iterator[None]:
    """Integers and floats of 64 bits, promoted as jax does by default."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def cells(names: Sequence[str], dtypes: Sequence[str], method: str) -> dict[str, dict[str, str]]:
    """By reduction and dtype, the verdict on the reduction over the examples of a batch."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    with doubles():
        for dtype in dtypes:
            cases = taken([Case(name, dtype, "activation") for name in names])
            for case, verdict in verdicts(cases, make_method(method)).items():
                found[case.name][case.dtype] = verdict
            jax.clear_caches()
    return found


def cell(by_dtype: dict[str, str]) -> str:
    """The text of a cell: how many dtypes are equal, if all are, and the first line of each other verdict."""
    others = [f"{dtype} {verdict.splitlines()[0]}" for dtype, verdict in by_dtype.items() if verdict != "equal"]
    return "; ".join(others) or "equal"


def row(name: str, columns: Sequence[dict[str, str]]) -> str:
    """A line of the table, with the verdicts by dtype under each method."""
    dtypes = "all" if len(columns[0]) == len(DTYPES) else ", ".join(columns[0])
    return f"| {name} | {dtypes} | {' | '.join(map(cell, columns))} |"


def page() -> str:
    """The whole document."""
    found = [cells(tuple(REDUCTIONS), DTYPES, method) for method in METHODS]
    lines = [f"| reduction | dtypes | {' | '.join(METHODS)} |", f"|---|---|{'---|' * len(METHODS)}"]
    lines += [row(name, [column[name] for column in found]) for name in REDUCTIONS]
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(page())
