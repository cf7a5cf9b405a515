"""Turns of the threads that share a session: one thread at a time calls the workers, and the session ends once.

Without turns, two threads could start steps A and B in different orders, and each worker would wait for the other:

    worker 0    A, then B
    worker 1    B, then A

So a thread takes its *turn*, makes the calls to all workers, and ends the turn before it waits for results.

The first thread that ends the session determines the cause, which all others raise. It releases the session after the
others have left it, because they may use its connection to the cluster.

`_changed` protects the counts and the failure. `_closing` is held during `stop` and `release`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from minialpa.errors import WorkerError
from minialpa.runtime.workers.failures import ended

#: Seconds to leave an ended session. Waiting threads check about once a second.
_LEAVE_S = 10.0


class Turns:
    """`stop` ends the workers, which wakes waiting threads. `release` returns the reserved hosts.

    failure: the error that has ended the session, if any.
    """

    def __init__(self, stop: Callable[[], None], release: Callable[[], None]) -> None:
        self._stop, self._release = stop, release
        self._turn = threading.RLock()
        self._closing = threading.RLock()
        self._is_closed = False

        # How often each thread is in `in_use`, and the thread that ends the session.
        self._changed = threading.Condition()
        self._users: Counter[int] = Counter()
        self._ender: int | None = None
        self.failure: WorkerError | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The session is not released meanwhile. Raises WorkerError if it has ended."""
        me = threading.get_ident()
        with self._changed:
            self.check()
            self._users[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._users[me] -= 1
                has_left = not self._users[me]
                if has_left:
                    del self._users[me]
                    self._changed.notify_all()

            # The ending thread may be several contexts deep.
            if has_left and self._ender == me:
                self._close()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Raises WorkerError if the session has ended."""
        with self.in_use(), self._turn:
            self.check()
            yield

    @contextmanager
    def turn_even_if_ended(self) -> Iterator[None]:
        """As `turn`, without an error: for changes of arrays that need no worker."""
        with self._turn:
            yield

    def check(self) -> None:
        if self.failure is not None:
            raise ended(self.failure)

    def end(self, first: WorkerError, find_cause: Callable[[], WorkerError] | None = None) -> NoReturn:
        """End the session, from within `in_use`. Raises the error that `find_cause` returns, or `first` without it.

        If another thread is ending the session, wait for its cause. After an interrupt of `find_cause`, the session has
        ended with `first`.
        """
        if not self._is_ender():
            self._await_failure()
            self.check()

        cause = first
        try:
            cause = find_cause() if find_cause is not None else first
        finally:
            with self._changed:
                self.failure = cause
                self._changed.notify_all()
        raise cause

    def shutdown(self, reason: WorkerError) -> None:
        """End the session unless it has ended, and release it. Call it outside `in_use`."""
        if self._is_ender():
            with self._changed:
                self.failure = reason
                self._changed.notify_all()
        self._await_failure()
        self._close()

    def _is_ender(self) -> bool:
        """Whether this thread ends the session, and has not set the failure yet."""
        me = threading.get_ident()
        with self._changed:
            self._ender = self._ender or me
            return self._ender == me and self.failure is None

    def _await_failure(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None)

    def _close(self) -> None:
        """A later call completes an interrupted one."""
        with self._closing:
            if self._is_closed:
                return
            self._stop()
            me = threading.get_ident()
            with self._changed:
                self._changed.wait_for(lambda: not self._users.keys() - {me}, _LEAVE_S)
            self._release()
            self._is_closed = True
