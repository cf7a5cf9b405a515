"""A file of results, from which an interrupted run continues: the rows of each complete model.

All rows of a file have the same sources of minialpa and of the benchmark, and the same versions of packages. A file
with others is refused.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import minialpa
from benchmarks.models.all_models import MODELS
from benchmarks.registry import Rows
from minialpa.support.files import write_text

_SOURCES = (Path(minialpa.__file__).parent, Path(__file__).parent)


@dataclass(slots=True, kw_only=True)
class Results:
    """The rows of models, which `add` writes to a file.

    Attributes:
        path: the file; None for results that are only in memory.
        versions: versions of the packages by name, and a digest of the sources.
        of_model: the rows of each complete model, by its name.
    """

    path: Path | None
    versions: dict[str, str]
    of_model: dict[str, Rows] = field(default_factory=dict)

    def add(self, name: str, rows: Rows) -> None:
        """Keep the rows of a model. The file is replaced as a whole, so that an interruption leaves a complete file."""
        self.of_model[name] = rows
        if self.path is not None:
            write_text(self.path, json.dumps({"versions": self.versions, "models": self.of_model}, indent=1) + "\n")

    def rows(self, names: Iterable[str]) -> Rows:
        """The rows of these models, in order."""
        return [row for name in names for row in self.of_model.get(name, [])]


class OtherVersions(Exception):
    """A file of results has other sources or packages."""


def read(path: Path | None) -> Results:
    """The results so far. Raises `OtherVersions` if the file has other sources or packages."""
    versions = _versions()
    if path is None or not path.exists():
        return Results(path=path, versions=versions)

    stored = json.loads(path.read_text("utf-8"))
    before: dict[str, str] = stored["versions"]
    changed = [name for name in sorted(before.keys() | versions) if before.get(name) != versions.get(name)]
    if changed:
        told = ", ".join(f"{name} {before.get(name, 'none')} (now {versions.get(name, 'none')})" for name in changed)
        raise OtherVersions(f"The rows of `{path}` were made with {told}. Name another file, or delete this one.")
    return Results(path=path, versions=versions, of_model=stored["models"])


def _versions() -> dict[str, str]:
    packages = sorted({"jaxlib", *(package for model in MODELS.values() for package in model.packages)})
    found = {"sources": _digest()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def _digest() -> str:
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
