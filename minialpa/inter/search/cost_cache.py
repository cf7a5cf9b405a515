"""Costs of pieces on disk: a JSON file in, costs by what they are of out, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from minialpa.errors import VerifyError
from minialpa.inter.search.stage_cost import PieceCost
from minialpa.support.files import write_text

#: To be raised with every change after which some piece costs something else, be it of rules, strategies, prices,
#: memory or names: the names of costs tell pieces, meshes and options apart, and not the code that priced them.
_VERSION = 6


def load_costs(path: str | None) -> dict[str, PieceCost]:
    """The costs in a file; none without one, or in one of another version. Raises VerifyError if it is no such file."""
    if path is None or not Path(path).exists():
        return {}
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["version"] != _VERSION:
            return {}
        return {name: _cost(values) for name, values in data["costs"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise VerifyError(f"`{path}` holds no costs of pieces ({error!r}). Remove it, or name another file.") from error


def _cost(values: Sequence[float]) -> PieceCost:
    """A cost as `dataclasses.astuple` wrote it."""
    names = (field.name for field in dataclasses.fields(PieceCost))
    return PieceCost(**{name: float(value) for name, value in zip(names, values, strict=True)})


def save_costs(path: str | None, costs: dict[str, PieceCost]) -> None:
    """Write costs to a file, which is the old or the new one at any time."""
    if path is None:
        return
    data = {"version": _VERSION, "costs": {name: dataclasses.astuple(cost) for name, cost in sorted(costs.items())}}
    write_text(path, json.dumps(data))
