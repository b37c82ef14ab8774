"""A background thread that does one job over and over and can always be stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

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
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def kick(self) -> None:
        """Make the worker look at its work now."""
        self._wake.set()
        if self._thread is None:
            self._start()

    def stop(self, timeout: float | None = None) -> None:
        """Let the running step finish, then end. Safe to call twice and from the worker itself."""
        with self._lock:
            self._stopping.set()
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def pause(self, seconds: float) -> None:
        """Sleep inside a step; a kick or a stop ends it early."""
        self._wake.wait(seconds)

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._stopping.is_set():
                return
            try:
                # A daemon: a process that exits without close() must not hang here, and
                # loses nothing by it, since whatever was acknowledged is in the WAL.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            except BaseException:
                # No thread to be had, or an interrupt: then the next kick tries again.
                self._thread = None
                raise

    def _run(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return  # its start was interrupted
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                sleep = self._step()
            except BaseException:
                # A panic in native code is no Exception; whoever waits for this thread
                # would wait for ever if it ended.
                logger.exception("%s: a step failed; going on", self._name)
                sleep = self._retry_seconds
            if not self._stopping.is_set():
                self._wake.wait(sleep)
