"""Turns of threads: whoever asks something of the workers of a session in; one order of all that, and one end, out.

Workers run what they are told in the order in which they are told. All of them have to be told of two steps in the same
order, or each waits for what the other one has not begun. So a thread takes its turn (`ordered`), tells all workers,
and gives it up before it waits for results.

A session ends once, and its connection to the cluster only when no thread uses it any more. The thread that ends it
says why; others leave with that error, and the last thing that the first one does is to release everything.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from minialpa.errors import WorkerError
from minialpa.runtime.failures import ended

#: Seconds that threads have to leave a session that has ended. They look about once a second.
_LEAVE_S = 10.0


class Turns:
    """stop: wakes the threads that wait for workers, by ending these. release: gives back what the session has."""

    def __init__(self, stop: Callable[[], None], release: Callable[[], None]) -> None:
        self._stop, self._release = stop, release
        #: What has ended the session, if anything.
        self.failure: WorkerError | None = None
        self._order = threading.RLock()
        self._closing = threading.RLock()
        self._is_closed = False
        # How often each thread is inside, and the one that ends the session: both change under this lock only.
        self._changed = threading.Condition()
        self._inside: Counter[int] = Counter()
        self._ender: int | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The session is not released while this is open. Raises WorkerError if it has ended."""
        me = threading.get_ident()
        with self._changed:
            self.check()
            self._inside[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[me] -= 1
                has_left = not self._inside[me]
                if has_left:
                    del self._inside[me]
                    self._changed.notify_all()
            if has_left and self._ender == me:
                self._close()

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """While this is open, no other thread tells workers anything. Raises WorkerError if the session has ended."""
        with self.inside(), self._order:
            self.check()
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """As `ordered`, also when the session has ended: for what changes arrays and asks nothing of workers."""
        with self._order:
            yield

    def check(self) -> None:
        """Raise WorkerError if the session has ended."""
        if self.failure is not None:
            raise ended(self.failure)

    def end(self, first: WorkerError, cause: Callable[[], WorkerError] | None = None) -> NoReturn:
        """End the session, from inside. What raises is what `cause` finds out, and `first` if that is interrupted.

        Where another thread ends it already, this waits until that one knows why, and raises the same.
        """
        if not self._is_ender():
            self._await_failure()
            self.check()
        found = first
        try:
            found = cause() if cause is not None else first
        finally:
            with self._changed:
                self.failure = found
                self._changed.notify_all()
        raise found

    def shutdown(self, reason: WorkerError) -> None:
        """End the session, from outside, if it has not ended yet, and release it. Calling it twice is fine."""
        if self._is_ender():
            with self._changed:
                self.failure = reason
                self._changed.notify_all()
        self._await_failure()
        self._close()

    def _is_ender(self) -> bool:
        """Whether this thread is the first one that ends the session, and has not said why yet."""
        me = threading.get_ident()
        with self._changed:
            self._ender = self._ender or me
            return self._ender == me and self.failure is None

    def _await_failure(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None)

    def _close(self) -> None:
        """Release everything, once all other threads have left. Goes on where an earlier call was interrupted."""
        with self._closing:
            if self._is_closed:
                return
            self._stop()
            me = threading.get_ident()
            with self._changed:
                self._changed.wait_for(lambda: not self._inside.keys() - {me}, _LEAVE_S)
            self._release()
            self._is_closed = True
