"""Ctrl-C ends a command in any code, with one line and the status 130.

KeyboardInterrupt unwinds the command. There are three exceptions: compiled modules crash when it unwinds their import,
callbacks of compiled code lose it, and Python delivers it only when a call of compiled code returns.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from minialpa.cli import INTERRUPTED

#: For a call of compiled code to return, and then for the command to unwind.
_RETURN_S, _UNWIND_S = 2.0, 10.0
#: From a callback that lost an interrupt to the next interrupt.
_LATER_S = 0.01


@contextmanager
def interruptible(*, ends_process: bool) -> Iterator[Callable[[], bool]]:
    """The first SIGINT ends this context, and later ones have no effect. Yields a function: has one arrived?

    ends_process: whether the process ends after this context. Then SIGINT prints no traceback there either.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return

    interrupts = _Interrupts()
    earlier_hook, sys.unraisablehook = sys.unraisablehook, interrupts.repeat_lost
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    earlier_fd = signal.set_wakeup_fd(writer)
    threading.Thread(target=interrupts.end_process_later, args=(reader,), daemon=True).start()
    signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield lambda: interrupts.raised
    except BaseException:
        if interrupts.raised:  # the error may be a result of the interrupt
            raise KeyboardInterrupt from None
        raise
    finally:
        later = signal.SIG_IGN if interrupts.raised else signal.SIG_DFL
        signal.signal(signal.SIGINT, later if ends_process else signal.default_int_handler)
        interrupts.unwound.set()
        signal.set_wakeup_fd(earlier_fd)
        os.close(writer)
        sys.unraisablehook = earlier_hook


class _Interrupts:
    """raised: a SIGINT has arrived. unwound: set at the end of the context."""

    def __init__(self) -> None:
        self.raised, self.unwound = False, threading.Event()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.raised:
            return
        self.raised = True
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                _end_process()
            frame = frame.f_back
        raise KeyboardInterrupt

    def repeat_lost(self, error: sys.UnraisableHookArgs) -> None:
        """The hook for errors in callbacks."""
        if issubclass(error.exc_type, KeyboardInterrupt):
            self.raised = False
            threading.Timer(_LATER_S, _thread.interrupt_main).start()
        else:
            sys.__unraisablehook__(error)

    def end_process_later(self, reader: int) -> None:
        """Wait for the number of a signal on `reader`, or for its end."""
        if not os.read(reader, 1):
            os.close(reader)
        elif not (self.unwound.wait(_RETURN_S) or (self.raised and self.unwound.wait(_UNWIND_S))):
            _end_process()


def _end_process() -> None:
    with suppress(Exception):
        sys.stdout.flush()
    os.write(2, b"minialpa: interrupted\n")
    os._exit(INTERRUPTED)
