"""The text of a plan file: JSON of the version and the fields of a plan."""

from __future__ import annotations

import json
from typing import Any

from minialpa.errors import VerifyError
from minialpa.plan.codec import encode
from minialpa.plan.record import PlanRecord

VERSION = 6
#: Characters of a plan's text, at some 65 for each equation. JSON may take 25 times its length in memory.
MOST_CHARACTERS = 16 * 2**20


def file_text(plan: PlanRecord) -> str:
    """The plan as JSON. Equal plans have equal texts."""
    return json.dumps({"version": VERSION, "plan": encode(plan)}, sort_keys=True, separators=(",", ":"))


def fields_in(text: str) -> Any:
    """What a text that `file_text` wrote says of the plan, as JSON data. Raises VerifyError if it is no such text."""
    if len(text) > MOST_CHARACTERS:
        raise VerifyError(
            f"Not a plan: it has more than {MOST_CHARACTERS} characters, and the plans of large models have a few "
            "million. Write one with `Plan.save`."
        )
    try:
        data = json.loads(text, object_pairs_hook=_fields_once)
    except VerifyError:
        raise
    except (ValueError, RecursionError) as error:
        raise VerifyError(f"Not a plan: {error}. Write one with `Plan.save`.") from error

    # The version first: a file of another version has other fields, and should not be called broken.
    if not isinstance(data, dict) or "version" not in data:
        raise VerifyError("Not a plan: JSON without `version`. Write one with `Plan.save`.")
    version = data["version"]
    if version != VERSION or isinstance(version, bool):
        raise VerifyError(f"The plan has version {version!r}; this minialpa reads version {VERSION}. Plan again.")
    if data.keys() != {"version", "plan"}:
        raise VerifyError(f"Not a plan: JSON with the fields {sorted(data)}; expected `plan` and `version`.")
    return data["plan"]


def _fields_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which no name may come twice: the second value would replace the first one."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise VerifyError(f"Not a plan: there is a record that has `{twice[:60]}` twice. Write one with `Plan.save`.")
    return fields
