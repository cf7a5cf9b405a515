"""Plans in a folder, for the next run of a script: the inputs of planning in, a plan out.

The name of a file is a digest of the traced step, cluster, options, rules of the user, minialpa's files and jax's
version. The file holds the text of all of these, which must match. A plan replaces a file that does not match, such as
a half written one. The user's own folder keeps the plans that were used last, such as `~/.cache/minialpa/plans`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
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
from minialpa.support.users_cache import users_cache
from minialpa.tracing.trace import TracedStep

#: Bytes of all plans in the folder of the user, at most.
_MOST_BYTES = 2**28
#: Equations of a step from which its plan is kept there: smaller steps are planned in a second or two.
_LEAST_EQUATIONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFolder:
    """The plans in a folder. Writing the first plan makes the folder.

    Attributes:
        path: the folder.
        least_equations: of the steps whose plans it keeps.
        most_bytes: of all plans in it; the plan that was not used for longest goes first. None for any number.
    """

    path: Path
    least_equations: int = 0
    most_bytes: int | None = None

    def planned(self, traced: TracedStep, options: PlanOptions, target: Target, make: Callable[[], Plan]) -> Plan:
        """The plan of a step with these options on these devices, from the folder or else from `make`.

        A plan that `make` returns is written to the folder.
        """
        if len(traced.flat.eqns) < self.least_equations:
            return make()
        about = _about(traced, options, target)
        file = self.path / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.json"
        plan = _read(file, about)
        if plan is not None and (plan.fingerprint, plan.cluster) == (traced.fingerprint, target.cluster):
            with suppress(OSError):
                os.utime(file)  # used now
            return plan

        plan = make()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(file, f"{json.dumps(about)}\n{plan.to_json()}")
            self._keep_the_latest()
        except OSError as error:
            # The user asked for a folder without a limit.
            if self.most_bytes is None:
                warnings.warn(f"The plan is not kept for later runs: {error}", UserWarning, stacklevel=2)
        return plan

    def _keep_the_latest(self) -> None:
        """Delete the plans beyond `most_bytes`. Another process may delete files at the same time."""
        if self.most_bytes is None:
            return
        found = []
        for file in self.path.glob("*.json"):
            with suppress(FileNotFoundError):
                status = file.stat()
                found.append((status.st_mtime_ns, status.st_size, file))

        n_bytes = 0
        for _, size, file in sorted(found, reverse=True):
            n_bytes += size
            if n_bytes > self.most_bytes:
                file.unlink(missing_ok=True)


#: "auto" for the plans of all scripts of the user; the path of a folder; or None for no folder.
PlanCache = Literal["auto"] | str | Path | None


def folder_of(cache: PlanCache) -> PlanFolder | None:
    """The folder that the user asks for, if there is one. A private folder may be impossible."""
    if cache != "auto":
        return None if cache is None else PlanFolder(path=Path(cache))
    folder = users_cache("plans")
    if folder is None:
        return None
    return PlanFolder(path=folder, least_equations=_LEAST_EQUATIONS, most_bytes=_MOST_BYTES)


def _about(traced: TracedStep, options: PlanOptions, target: Target) -> str:
    """The inputs of planning, as text that is the same in every process."""
    versions = f"minialpa {_code()}, jax {jax.__version__}"
    # Layers also depend on scopes, and some options name arguments. The fingerprint has neither.
    names = (
        [(op.scope, op.origin) for op in traced.flat.ops],
        traced.n_boundaries,
        traced.in_paths,
        traced.out_paths,
        traced.no_batch,
    )
    written = hashlib.sha256(repr(names).encode()).hexdigest()
    given = (registered_rules(), traced.fingerprint, options, target.cluster, target.logical_mesh, target.jax_version)
    return "\n".join((versions, written, *map(repr, given)))


def _read(file: Path, about: str) -> Plan | None:
    """The plan in a file, or None. Warns if the file is not a plan for `about`."""
    try:
        text = file.read_text(encoding="utf-8")
        first, _, rest = text.partition("\n")
        if json.loads(first) != about:
            raise VerifyError("It is for another step.")
        return Plan.from_json(rest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, VerifyError) as error:
        warnings.warn(f"`{file}` has no plan for this step, so minialpa plans it: {error}", UserWarning, stacklevel=2)
        return None


@functools.cache
def _code() -> str:
    """A digest of minialpa's own files, since a changed planner may plan differently."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:32]
