"""A background thread that does one job over and over and can always be stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from lancewal.parallel import Bell, start_thread

logger = logging.getLogger(__name__)


class Worker:
    """Runs ``step`` whenever it is kicked, and again after as many seconds as it returned.

    ``step`` returns how long to sleep at most (``None``: until the next kick). An error
    in it is logged and the worker goes on: one failing job must not strand the others.
    The thread starts with the first kick, so a writer that needs no worker has none.
    """

    def __init__(self, name: str, step: Callable[[], float | None], retry_seconds: float = 1.0) -> None:
        self._name = name
        self._step = step
        self._retry_seconds = retry_seconds
        # Locked while nobody has kicked. A bare lock: an interrupt in the middle of Event.set
        # would leave the worker asleep for good.
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self._stopping = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = False
        self._ended = Bell()

    @property
    def stopping(self) -> bool:
        return self._stopping

    def kick(self) -> None:
        """Make the worker look at its work now."""
        self._wake()
        if self._thread is None:
            self._start()

    def stop(self, timeout: float | None = None) -> None:
        """Let the running step finish, then end. Safe to call twice and from the worker itself."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        self._wake()
        if thread is None or thread is threading.current_thread():
            return
        if self._ended.wait_for(lambda: self._over, timeout):
            with suppress(RuntimeError):  # another ran in its place
                thread.join(timeout)

    def _wake(self) -> None:
        if self._asleep.locked():
            with suppress(RuntimeError):  # another has woken it meanwhile
                self._asleep.release()

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._stopping:
                return
            # A daemon: a process that exits without close() must not hang here, and
            # loses nothing by it, since whatever was acknowledged is in the WAL.
            thread = threading.Thread(target=lambda: self._run(thread), name=self._name, daemon=True)
            start_thread(thread)
            # Not before: without a thread to be had, or after an interrupt, the next kick tries again.
            self._thread = thread

    def _run(self, thread: threading.Thread) -> None:
        with self._lock:
            if self._thread is not thread:
                return  # its start was interrupted
        try:
            self._work()
        finally:
            self._over = True
            self._ended.ring()

    def _work(self) -> None:
        while not self._stopping:
            self._asleep.acquire(blocking=False)
            try:
                sleep = self._step()
            except BaseException:
                # A panic in native code is no Exception; whoever waits for this thread
                # would wait for ever if it ended.
                logger.exception("%s: a step failed; going on", self._name)
                sleep = self._retry_seconds
            if not self._stopping:
                self._asleep.acquire(timeout=-1 if sleep is None else max(sleep, 0.0))
