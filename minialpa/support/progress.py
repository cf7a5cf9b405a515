"""Progress bars for long planning and compiling: only on a terminal, and unless disabled."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class _Switch:
    disabled = False


def disable_progress() -> None:
    """Show no progress bars in this process from here on."""
    _Switch.disabled = True


def _is_terminal(stream: TextIO | None) -> bool:
    """A program without a console has no streams, and closed streams raise errors."""
    return stream is not None and not stream.closed and stream.isatty()


class ProgressBar:
    """A context in which `report(what, done, total)` moves the bar of each `what`."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        if _is_terminal(sys.stderr) and not _Switch.disabled:
            # A slow import.
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def report(self, what: str, done: int, total: int) -> None:
        if self._progress is None:
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done)
