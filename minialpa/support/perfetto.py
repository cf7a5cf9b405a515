"""Events and files for ui.perfetto.dev and chrome://tracing, from seconds and names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from minialpa.support.files import write_text

Event = dict[str, Any]


def interval(
    process: int,
    thread: int,
    name: str,
    *,
    start_s: float,
    end_s: float,
    category: str,
    args: Mapping[str, Any] | None = None,
) -> Event:
    """Work of a thread. args: shown when a user selects it."""
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    event = {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": category, **times}
    return event if args is None else {**event, "args": dict(args)}


def counter(process: int, name: str, at_s: float, args: Mapping[str, float]) -> Event:
    """Values of a process from `at_s` on."""
    return {"ph": "C", "pid": process, "name": name, "ts": at_s * 1e6, "args": dict(args)}


def process_name(process: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}


def thread_name(process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}


def write_trace(path: str | Path, events: Iterable[Event]) -> None:
    write_text(path, json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))
