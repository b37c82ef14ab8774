"""Threads that wait for storage and for each other, without hanging after an interrupt.

Threads, because every call spends its time in the object store with the GIL released.

Ctrl-C raises KeyboardInterrupt in the main thread, between any two steps of Python code.
``threading.Condition``, ``Event``, ``Thread.start`` and ``concurrent.futures`` are Python code:
an interrupt inside them leaves a lock locked, or a thread that never runs, and the next
caller waits for ever. This module uses only bare locks, which are taken and released in C,
and assignments. If an interrupt removes the thread that should have woken others, they wake by
themselves after :data:`LOOK_AGAIN_SECONDS`.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lancewal.storage.forks import is_forked
from lancewal.storage.tracing import in_this_trace

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

#: A waiting thread looks again after this time, even if nothing woke it.
LOOK_AGAIN_SECONDS = 1.0
#: How long a process that exits waits for the calls of its background threads.
EXIT_SECONDS = 10.0


if TYPE_CHECKING:
    lazy_property = cached_property
else:

    class lazy_property:  # noqa: N801
        """A ``cached_property`` that may wait for storage. Two threads may both compute it; one value stays.

        Up to Python 3.11 all instances of a class share the lock of a ``cached_property``: while one
        opens its files, the others wait.
        """

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute = compute
            self.__doc__ = compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            # Only reached while the instance has no value of that name.
            return instance.__dict__.setdefault(self._name, self._compute(instance))


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``; raises ``RuntimeError`` when the system has no more threads.

    The main thread lets another thread start it, because interrupts reach only the main thread. So
    the thread may not run yet when this returns.
    """
    if threading.current_thread() is threading.main_thread():
        _thread.start_new_thread(_start, (thread,))
    else:
        thread.start()


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError:
        thread.run()  # no second thread available: run in this one


class Bell:
    """Wakes all waiting threads, as a Condition does; they check their condition again.

    It is not a lock, and it may be rung from anywhere, even by the garbage collector.
    """

    def __init__(self) -> None:
        self._waiting: dict[threading.Lock, None] = {}

    def ring(self) -> None:
        if not self._waiting:
            return
        for gate in list(self._waiting):
            if gate.locked():
                with suppress(RuntimeError):  # another thread has opened it
                    gate.release()
            self._waiting.pop(gate, None)

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``condition()`` is true; returns ``False`` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not condition():
            gate = threading.Lock()
            gate.acquire()
            self._waiting[gate] = None
            try:
                # Check again: a change before the gate was registered did not open it.
                if condition():
                    return True
                left = LOOK_AGAIN_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return False
                gate.acquire(timeout=min(left, LOOK_AGAIN_SECONDS))
            finally:
                self._waiting.pop(gate, None)
        return True


class Room:
    """Bounds to ``size`` what concurrent calls hold together.

    Each call holds its own lock, by ``with``, while it runs. No interrupt can skip its release, so a
    call that has ended never takes up room.

    >>> room, call = Room(100), threading.Lock()
    >>> with call:
    ...     fits = room.enter(call, 70)
    ...     room.taken
    70
    >>> room.leave(call)
    >>> room.taken
    0
    """

    def __init__(self, size: float = float("inf")) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._calls: dict[threading.Lock, int] = {}
        self._left = Bell()

    @property
    def taken(self) -> int:
        return sum([needed for call, needed in list(self._calls.items()) if call.locked()])

    def enter(self, call: threading.Lock, needed: int = 0, timeout: float | None = None) -> bool:
        """Wait until there is room; a call that needs more than ``size`` waits until it is the only one.

        Returns ``False`` if there is none after ``timeout`` seconds.
        """
        return self._fits(call, needed) or self._left.wait_for(lambda: self._fits(call, needed), timeout)

    def leave(self, call: threading.Lock) -> None:
        """Release the room of a call that is over or holds nothing more."""
        self._calls.pop(call, None)
        self._left.ring()

    def wait_until_empty(self) -> None:
        """Wait until all calls that have entered are over."""
        for call in list(self._calls):
            self._left.wait_for(lambda: call not in self._calls or not call.locked())  # noqa: B023

    def _fits(self, call: threading.Lock, needed: int) -> bool:
        with self._lock:
            taken = self.taken
            if taken and taken + needed > self._size:
                return False
            self._calls[call] = needed
            return True


# Running calls of this process's daemon threads, each represented by a lock that it holds.
_under_way: dict[_thread.LockType, None] = {}


def run_in_background(call: Callable[[], R]) -> R:
    """Run a daemon thread's ``call``; an exiting process waits for it up to :data:`EXIT_SECONDS`."""
    held = _thread.allocate_lock()
    with held:
        _under_way[held] = None
        try:
            return call()
        finally:
            _under_way.pop(held, None)


@atexit.register
def _let_calls_end() -> None:
    """Keep the interpreter from shutting down while a daemon thread is in native code.

    Up to Python 3.13 the interpreter ends such a thread by unwinding its stack when it returns from native
    code. Rust and C++ do not allow that: the process aborts, and its parent sees SIGABRT. This function is
    registered when this module is imported, so it runs after the finalizers of writers.
    """
    if is_forked():
        return  # a child inherits the list of its parent's calls, but not the threads
    deadline = time.monotonic() + EXIT_SECONDS
    for held in list(_under_way):
        held.acquire(timeout=max(0.0, deadline - time.monotonic()))


class Task(Generic[R]):
    """A call for another thread, and its result; one thread waits for it."""

    def __init__(self, call: Callable[[], R]) -> None:
        self._call = in_this_trace(call)
        self._begun = self._dropped = self._over = False
        self._error: BaseException | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    def run(self) -> None:
        """Make the call, unless it was dropped. Called once."""
        try:
            self._begun = True
            if not self._dropped:
                self._value = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._over = True
            self._gate.release()

    def drop(self) -> bool:
        """Prevent the call; ``False`` when it has begun already."""
        self._dropped = True
        return not self._begun

    def wait(self) -> None:
        while not self._over:
            self._gate.acquire(timeout=LOOK_AGAIN_SECONDS)

    def result(self) -> R:
        """Wait for the call; returns what it returned, or raises what it raised."""
        self.wait()
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            del self  # otherwise this frame and the error would keep each other alive


def in_thread(call: Callable[[], R], name: str) -> Task[R]:
    """Run ``call`` in a thread of its own, or in this one when no thread is available."""
    task = Task(call)
    try:
        start_thread(threading.Thread(target=run_in_background, args=(task.run,), name=name, daemon=True))
    except RuntimeError:
        task.run()
    return task


def both(first: Callable[[], R], second: Callable[[], T], *, at_once: bool) -> tuple[R, T]:
    """Return the results of two calls; with ``at_once`` the second runs in another thread."""
    if not at_once:
        return first(), second()
    other = in_thread(second, "lancewal-io")
    try:
        mine = first()
    finally:
        # Even if the first call fails, nothing may still be running when the caller continues.
        other.wait()
    return mine, other.result()


def beside(call: Callable[[], R], *, at_once: bool) -> Task[R]:
    """Make a call whose result is needed later: with ``at_once`` in another thread, otherwise now.

    An error is raised where the result is asked for.
    """
    if at_once:
        return in_thread(call, "lancewal-io")
    task = Task(call)
    task.run()
    return task


class Once(Generic[R]):
    """A value that several threads need. The first one that asks reads it, and the others wait for it."""

    def __init__(self, read: Callable[[], R]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._value: R | None = None

    def get(self) -> R:
        with self._lock:
            if self._value is None:
                self._value = self._read()
            return self._value


class Worker:
    """A background thread that runs ``step`` whenever it is kicked, and can always be stopped.

    ``step`` returns how long to sleep at most (``None``: until the next kick). The worker logs an error
    in ``step`` and goes on: one failing job must not strand the others.
    The thread starts with the first kick, so a writer that needs no worker has no thread.
    """

    def __init__(self, name: str, step: Callable[[], float | None], retry_seconds: float = 1.0) -> None:
        self._name = name
        self._step = step
        self._retry_seconds = retry_seconds
        # Locked until the next kick. A bare lock, because an interrupt in the middle of Event.set
        # would leave the worker asleep for good.
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self.stopping = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = False
        self._ended = Bell()

    def kick(self) -> None:
        """Wake the worker now, and start its thread if none is running."""
        self._wake()
        if self._thread is None or self._over:
            self._start()

    def kick_for_later(self) -> bool:
        """Kick for work that is already accepted; ``False`` if no thread can be started.

        A missing thread must not fail the call that brought the work, such as a put. The next kick
        tries again.
        """
        try:
            self.kick()
        except RuntimeError as error:
            logger.warning("%s: %s; the next kick tries again", self._name, error)
            return False
        return True

    def stop(self, timeout: float | None = None) -> None:
        """Let the running step finish, then end the thread. Safe to call twice and from the worker itself."""
        with self._lock:
            self.stopping = True
            thread = self._thread
        self._wake()
        if thread is None or thread is threading.current_thread():
            return
        if self._ended.wait_for(lambda: self._over, timeout):
            with suppress(RuntimeError):  # the work ran in another thread: this one never started
                thread.join(timeout)

    def _wake(self) -> None:
        if self._asleep.locked():
            with suppress(RuntimeError):  # another thread woke it first
                self._asleep.release()

    def _start(self) -> None:
        with self._lock:
            if self._over and not self.stopping:
                # An interrupt ended the thread outside of a step, where nothing catches it.
                self._thread, self._over = None, False
            if self._thread is not None or self.stopping:
                return
            # A daemon thread: a process that exits without close() must not hang here. It loses
            # nothing, because all acknowledged rows are in the WAL.
            thread = threading.Thread(target=lambda: self._run(thread), name=self._name, daemon=True)
            start_thread(thread)
            # Set only now: if the start failed or was interrupted, the next kick tries again.
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
        while not self.stopping:
            self._asleep.acquire(blocking=False)
            try:
                sleep = run_in_background(self._step)
            except BaseException:
                # BaseException, because a panic in native code is not an Exception. If the thread ended,
                # threads that wait for its work would wait for ever.
                logger.exception("%s: a step failed; going on", self._name)
                sleep = self._retry_seconds
            if not self.stopping:
                self._asleep.acquire(
                    timeout=-1 if sleep is None else min(max(sleep, 0.0), threading.TIMEOUT_MAX)
                )


class Crew:
    """A pool of up to ``size`` threads, started as needed, which run tasks in the order given."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._tasks: SimpleQueue[Task[object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        # The threads that were started; an interrupt may leave one out, which does no harm.
        self._hired: list[tuple[threading.Thread, Task[None]]] = []

    def take(self, task: Task[R]) -> None:
        """Run the task in a thread of the pool, or in this one when no thread is available."""
        with self._lock:
            self._unfinished += 1
            hire = len(self._hired) < min(self._unfinished, self._size)
        if hire:
            try:
                self._hire()
            except RuntimeError:
                if not self._hired:
                    task.run()
                    return
        self._tasks.put(task)  # type: ignore[arg-type]

    def dismiss(self, *, wait: bool = False) -> None:
        """Let the threads end after their tasks. Takes no lock: the garbage collector may call it."""
        self._tasks.put(None)
        if wait and not is_forked():
            for thread, work in self._hired:
                work.wait()
                with suppress(RuntimeError):  # its work ran in another thread
                    thread.join()

    def _hire(self) -> None:
        work = Task(self._work)
        thread = threading.Thread(target=work.run, name=f"{self._name}_{len(self._hired)}", daemon=True)
        start_thread(thread)
        self._hired.append((thread, work))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            run_in_background(task.run)
            del task
            with self._lock:
                self._unfinished -= 1
        self._tasks.put(None)  # ends the next thread, however many there are


def ordered_map(
    call: Callable[[T], R],
    items: Iterable[T],
    workers: int,
    *,
    first: int | None = None,
    ahead_after: Callable[[R], int] | None = None,
) -> Iterator[R]:
    """Yield ``call(item)`` in order, with up to ``workers`` calls ahead of the consumer.

    At most ``workers`` results wait for the consumer; an error is raised at its item's turn. For results
    of different sizes, ``first`` is how many calls may be ahead at the beginning. After each result,
    ``ahead_after`` returns how many may be ahead from then on (up to ``workers``).
    When the iterator is exhausted or closed, calls that have not begun are dropped, and the
    threads end after their current calls.
    """
    if workers <= 1:
        yield from map(call, items)
        return
    source = iter(items)
    crew = Crew(workers, "lancewal-io")
    ahead: deque[Task[R]] = deque()

    def ask(count: int) -> None:
        for item in islice(source, count):
            task = Task(partial(call, item))
            ahead.append(task)
            crew.take(task)

    try:
        limit = min(workers, first or workers)
        ask(limit)
        while ahead:
            result = ahead[0].result()
            ahead.popleft()
            if ahead_after is not None:
                limit = min(workers, ahead_after(result))
            ask(max(0, limit - len(ahead)))
            yield result
        # All calls have returned: the threads are idle and end at once.
        crew.dismiss(wait=True)
    finally:
        # Do not wait here: the garbage collector may close an abandoned iterator, in any thread and
        # while any lock is held.
        for task in ahead:
            task.drop()
        crew.dismiss()
