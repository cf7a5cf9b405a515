"""Plans for later runs of a script: the inputs of planning go in; a plan, from a folder or new, comes out.

A digest of the inputs names a file: traced step, cluster, options, user's rules, minialpa's source and jax's version.
Its first line is their text; the plan follows. The user's folder is `~/.cache/minialpa/plans` or similar.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

from minialpa.errors import VerifyError
from minialpa.methods import Target
from minialpa.options import PlanOptions
from minialpa.plan import Plan
from minialpa.rules.registered import registered_rules
from minialpa.support.files import write_text
from minialpa.support.private_jax import warn
from minialpa.support.users_cache import users_cache
from minialpa.tracing.trace import TracedStep

#: Most bytes of all plans in the user's folder.
_MOST_BYTES = 2**28
#: Equations of the smallest step with a plan there. Smaller steps are planned in a second or two.
_LEAST_EQUATIONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFolder:
    """A folder of plans, which the first plan creates.

    Attributes:
        path: None for the user's folder, which keeps only plans of large steps.
    """

    path: Path | None

    def planned(self, traced: TracedStep, options: PlanOptions, target: Target, make: Callable[[], Plan]) -> Plan:
        """The plan from the folder; if absent, `make` returns it, and the folder keeps it."""
        folder = self.path
        if folder is None and len(traced.flat.eqns) >= _LEAST_EQUATIONS:
            folder = users_cache("plans")
        if folder is None:
            return make()

        inputs_text = _planning_inputs_text(traced, options, target)
        file = folder / f"{hashlib.sha256(inputs_text.encode()).hexdigest()[:32]}.json"
        plan = _read_plan(file, inputs_text)
        if plan is not None and (plan.fingerprint, plan.cluster) == (traced.fingerprint, target.cluster):
            with suppress(OSError):
                os.utime(file)  # used now
            return plan

        plan = make()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(file, f"{json.dumps(inputs_text)}\n{plan.to_json()}")
            if self.path is None:
                _keep_the_latest(folder)
        except OSError as error:
            if self.path is not None:  # the user asked for it
                warn(
                    f"The plan is not kept for later runs ({error}). Pass a folder that this process can write as "
                    "`plan_cache`, or leave it out.",
                )
        return plan


def _keep_the_latest(folder: Path) -> None:
    """Delete the plans with the oldest use above `_MOST_BYTES`. Other processes may delete files at the same time."""
    found = []
    for file in folder.glob("*.json"):
        with suppress(FileNotFoundError):
            status = file.stat()
            found.append((status.st_mtime_ns, status.st_size, file))

    n_bytes = 0
    for _, size, file in sorted(found, reverse=True):
        n_bytes += size
        if n_bytes > _MOST_BYTES:
            file.unlink(missing_ok=True)


#: "auto" for the user's folder, a path, or None.
PlanCache = Literal["auto"] | str | Path | None


def folder_of(cache: PlanCache) -> PlanFolder | None:
    if cache is None:
        return None
    return PlanFolder(path=None if cache == "auto" else Path(cache))


def _planning_inputs_text(traced: TracedStep, options: PlanOptions, target: Target) -> str:
    """The inputs of planning as text, equal in every process."""
    versions = f"minialpa {_source_digest()}, jax {jax.__version__}"
    # Scopes affect layers, and some options name arguments. The fingerprint has neither.
    names = (
        [(op.scope, op.origin) for op in traced.flat.ops],
        traced.n_boundaries,
        traced.in_paths,
        traced.out_paths,
        traced.no_batch,
    )
    names_digest = hashlib.sha256(repr(names).encode()).hexdigest()
    rules = registered_rules(traced.flat.eqns)
    given = (rules, traced.fingerprint, options, target.cluster, target.logical_mesh, target.jax_version)
    return "\n".join((versions, names_digest, *map(repr, given)))


def _read_plan(file: Path, inputs_text: str) -> Plan | None:
    """The plan in a file, or None. Warns about a file without a plan for these inputs of planning."""
    try:
        text = file.read_text(encoding="utf-8")
        first, _, rest = text.partition("\n")
        if json.loads(first) != inputs_text:
            raise VerifyError("It is for another step.")
        return Plan.from_json(rest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, VerifyError) as error:
        warn(
            f"`{file}` has no usable plan for this step, so minialpa plans it and replaces the file. {error}",
        )
        return None


@functools.cache
def _source_digest() -> str:
    """A changed planner may plan differently."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:32]
