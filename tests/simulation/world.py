"""A world in which one seed decides which thread runs next and what every clock says.

The code under test runs in threads of its own, as it does in life, but only one of them runs at a time.
At every storage call, lock, sleep and start of a thread it picks the next one by the seed, which may be
itself, and hands over. Time passes only when nobody can run, or when a process is made to stand still.

``World.installed`` gives the modules of lancewal a ``threading``, ``time``, ``random`` and ``secrets`` of
this world in place of Python's: the same names, so that the code under test knows nothing of it.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache, partial
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from lancewal.storage import forks, parallel

#: More steps than any schedule needs: beyond it somebody waits for ever. Whoever asks an owner of a forged
#: record looks for the answer twice a second for up to ten minutes, which are 3600 steps. A few that ask one
#: such owner after the other took 22 000 steps, and came to their end.
MOST_STEPS = 60_000
#: How long workers go on whose processes have nothing else to do. One that fails tries again for ever, as it
#: should; one that turns without a pause gets no further in time, and is noticed by its steps.
LEFT_ALONE = 3600.0


class Killed(BaseException):
    """The process of this thread is dead; nothing it still does has any effect."""


class StuckError(AssertionError):
    """Somebody waits for what nobody will do."""


@dataclass(eq=False)
class Process:
    """Threads that live and die together, with clocks of their own."""

    name: str
    #: Seconds that its clock since boot is ahead, and how much faster it goes.
    ahead: float = 0.0
    drift: float = 0.0
    #: What somebody has set its other clock to, beside that.
    was_set: float = 0.0
    urgency: float = 0.0
    is_dead: bool = False
    #: Whether it was forked from a process that had used lancewal.
    is_forked: bool = False
    #: The world's time until which it stands still.
    stands_still_until: float = 0.0
    #: Where it runs, and under which number.
    host: str = ""
    pid: int = 0
    #: The world's time of its death.
    died: float | None = None

    def clock(self, now: float) -> float:
        return self.ahead + now * (1.0 + self.drift)


@dataclass(eq=False)
class _Thread:
    """What the scheduler knows of a thread: why it does not run, and how to let it."""

    process: Process
    name: str
    baton: Any = field(default_factory=lambda: _locked())
    #: Whether it could go on; ``None`` while nothing holds it.
    waits_for: Callable[[], bool] | None = None
    deadline: float | None = None
    timed_out: bool = False
    is_over: bool = False
    place: str = "start"
    #: What the code under test has in its place.
    shown_as: object = None


def _locked() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


class _Carrier:
    """A thread of the system that carries one thread of a world after another: starting one is dear."""

    _idle: ClassVar[list[_Carrier]] = []

    def __init__(self) -> None:
        self._go = _locked()
        self._body: Callable[[], None] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    @classmethod
    def carrying(cls, body: Callable[[], None]) -> _Carrier:
        carrier = cls._idle.pop() if cls._idle else cls()
        carrier._body = body
        carrier._go.release()
        return carrier

    def _run(self) -> None:
        while True:
            self._go.acquire()
            body, self._body = self._body, None
            assert body is not None
            body()
            del body


class World:
    """The scheduler. :meth:`spawn` starts processes, :meth:`run` lets them run to their end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        #: How often the scheduler thinks of another process.
        self.restlessness = self.random.choice([0.02, 0.1, 0.3, 0.6])
        self.now = 0.0
        self.steps = 0
        #: Process, thread and place of every step.
        self.trace: list[tuple[str, str, str]] = []
        #: Called before every step.
        self.watch: Callable[[], None] | None = None
        self._threads: list[_Thread] = []
        self._main = _locked()
        #: Since when there are only workers of writers that nobody closed.
        self._alone_since: float | None = None
        self._error: BaseException | None = None
        self._is_ending = False
        self._local = threading.local()
        self._began = datetime.now(UTC)

    # ------------------------------------------------------------- processes

    def spawn(self, process: Process, body: Callable[[], None], name: str | None = None) -> None:
        """Let ``body`` be the main thread of ``process``, or a further one."""
        process.urgency = self.random.random()
        self._start(process, name or process.name, body)

    @property
    def process(self) -> Process:
        """That of the thread which runs."""
        return self._current().process

    def kill(self, process: Process) -> None:
        process.is_dead = True
        process.died = self.now

    def run(self) -> None:
        """Until every thread is over; raises the first error that a body let through."""
        try:
            thread = self._next()
            if thread is not None:
                thread.baton.release()
                self._main.acquire()
        finally:
            forks._forked = False
            self._end()
        if self._error is not None:
            raise self._error

    def _next(self) -> _Thread | None:
        """Who runs now; ``None`` at the end, which may be an error."""
        try:
            thread = self._chosen()
        except Exception as error:
            self._error = self._error or error
            return None
        if thread is not None:
            self.steps += 1
            if self.steps > MOST_STEPS:
                self._error = StuckError(f"{MOST_STEPS} steps, and no end: {self._places()}")
                return None
            self.trace.append((thread.process.name, thread.name, thread.place))
            if thread.waits_for is None:
                thread.timed_out = False
            else:
                thread.timed_out = not thread.waits_for()
                thread.waits_for = thread.deadline = None
            forks._forked = thread.process.is_forked
        return thread

    def _chosen(self) -> _Thread | None:
        if self.watch is not None:
            self.watch()
        while True:
            now = self.now
            ready: list[_Thread] = []
            chosen: Process | None = None
            for thread in self._threads:
                process = thread.process
                if process.is_dead or process.stands_still_until > now:
                    continue
                waits_for, deadline = thread.waits_for, thread.deadline
                if waits_for is not None and (deadline is None or deadline > now) and not waits_for():
                    continue
                # By process first: one with many threads does not run more often for it. The most urgent
                # one runs on until its urgency is drawn anew: a few long stretches find more than even
                # turns.
                if chosen is None or process.urgency > chosen.urgency:
                    chosen, ready = process, [thread]
                elif process is chosen:
                    ready.append(thread)
            if chosen is not None:
                if self.random.random() < self.restlessness:
                    chosen.urgency = self.random.random()
                return ready[0] if len(ready) == 1 else self.random.choice(ready)
            living = [thread for thread in self._threads if not thread.process.is_dead]
            wakes = [t.process.stands_still_until for t in living if t.process.stands_still_until > now]
            wakes += [t.deadline for t in living if t.deadline is not None and t.deadline > now]
            is_left_alone = all(thread.name.startswith("lancewal-") for thread in living)
            if not wakes and not is_left_alone:
                raise StuckError(f"nobody can go on: {self._places()}")
            if not wakes or (is_left_alone and min(wakes) > self._end_of_workers(living)):
                return None
            self.now = min(wakes)

    def _end_of_workers(self, workers: Sequence[_Thread]) -> float:
        """When processes end that do nothing any more, with the workers of writers that nobody closed."""
        if self._alone_since is None:
            self._alone_since = self.now
        return max([self._alone_since, *(each.process.stands_still_until for each in workers)]) + LEFT_ALONE

    def _places(self) -> str:
        return ", ".join(f"{t.process.name}/{t.name} at {t.place}" for t in self._threads)

    def _end(self) -> None:
        """Every thread that is left unwinds as a dead one, so that none outlives the world."""
        self._is_ending = True
        for _ in range(1000):
            left = list(self._threads)
            if not left:
                return
            for thread in left:
                thread.process.is_dead = True
                if not thread.is_over:
                    thread.baton.release()
                    self._main.acquire()
        raise StuckError(f"threads outlive their world: {self._places()}")

    def time(self, moment: float | None = None) -> datetime:
        """The storage's time; base tables are stamped by the real clock, which stands still beside it."""
        return self._began + timedelta(seconds=self.now if moment is None else moment)

    # ------------------------------------------- what threads of this world call

    def step(self, place: str) -> None:
        """Hand over to whoever the seed picks; ``place`` is for the trace."""
        self.wait(place, None)

    def wait(self, place: str, condition: Callable[[], bool] | None, timeout: float | None = None) -> bool:
        """Go on when ``condition`` holds; ``False`` when ``timeout`` seconds were over before."""
        thread = self._current()
        if thread.process.is_dead:
            raise Killed
        thread.place, thread.waits_for = place, condition
        thread.deadline = None if timeout is None else self.now + timeout
        chosen = self._next()
        if chosen is not thread:
            (self._main if chosen is None else chosen.baton).release()
            thread.baton.acquire()
        if thread.process.is_dead:
            raise Killed
        return not thread.timed_out

    def is_here(self) -> bool:
        return hasattr(self._local, "thread")

    def _current(self) -> _Thread:
        thread: _Thread = self._local.thread
        return thread

    def _start(self, process: Process, name: str, body: Callable[[], None]) -> _Thread:
        thread = _Thread(process, name)

        def run() -> None:
            thread.baton.acquire()
            self._local.thread = thread
            try:
                if not process.is_dead:
                    body()
            except Killed:
                pass
            except BaseException as error:
                if not process.is_dead and self._error is None:
                    self._error = error
            finally:
                del self._local.thread
                thread.is_over = True
                self._threads.remove(thread)
                _Carrier._idle.append(carrier[0])
                going_on = None if self._is_ending or self._error is not None else self._next()
                (self._main if going_on is None else going_on.baton).release()

        carrier: list[_Carrier] = []
        self._threads.append(thread)
        carrier.append(_Carrier.carrying(run))
        return thread

    # ----------------------------------------------- in place of Python's modules

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Modules of lancewal see this world's threads, clocks and chance within the block."""
        shims = {"threading": self._threading(), "time": self._time(), "random": self.random}
        shims["secrets"] = SimpleNamespace(
            token_bytes=self.random.randbytes,
            token_hex=lambda size: self.random.randbytes(size).hex(),
            randbits=self.random.getrandbits,
            randbelow=self.random.randrange,
            choice=self.random.choice,
        )
        saved: list[tuple[Any, str, Any]] = [(parallel, "SimpleQueue", parallel.SimpleQueue)]
        queues = _Shim(self, SimpleNamespace(new=partial(Queue, self)), SimpleNamespace(new=SimpleQueue))
        parallel.SimpleQueue = lambda: queues.new()  # type: ignore[assignment,misc]
        for module, attribute in _uses():
            real = getattr(module, attribute)
            saved.append((module, attribute, real))
            setattr(module, attribute, _Shim(self, shims[attribute], real))
        for each in _cached_properties():
            # Python 3.11 has one for all instances of a class, those of other processes of the world too.
            if hasattr(each, "lock"):
                saved.append((each, "lock", each.lock))
                each.lock = nullcontext()
        try:
            yield
        finally:
            for owner, attribute, value in saved:
                setattr(owner, attribute, value)

    def _threading(self) -> Any:
        world = self

        class Lock:
            """As ``threading.Lock``; whoever finds it locked waits in the scheduler."""

            def __init__(self) -> None:
                self._holder: object = None

            def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
                if not world.is_here():
                    assert self._holder is None, "a lock of the world is held from outside"
                    self._holder = True
                    return True
                if timeout > threading.TIMEOUT_MAX:
                    raise OverflowError("timestamp too large to convert to C _PyTime_t")
                if self._holder is not None:
                    if not blocking:
                        return False
                    left = None if timeout < 0 else timeout
                    while self._holder is not None:
                        if not world.wait("a lock", lambda: self._holder is None, left):
                            return False
                self._holder = True
                return True

            def release(self) -> None:
                if self._holder is None:
                    raise RuntimeError("release unlocked lock")
                self._holder = None

            def locked(self) -> bool:
                return self._holder is not None

            def __enter__(self) -> Lock:
                self.acquire()
                return self

            def __exit__(self, *_: object) -> None:
                self.release()

        class Thread:
            """As ``threading.Thread``: a thread of the process that starts it."""

            def __init__(
                self,
                target: Callable[[], None],
                name: str = "",
                daemon: bool = True,
                args: tuple[Any, ...] = (),
            ) -> None:
                self._target, self.name, self._args = target, name, args
                self._started: _Thread | None = None

            def start(self) -> None:
                if not world.is_here():
                    # Lance takes rows from us in threads of its own; what they begin is done in them.
                    raise RuntimeError("can't start new thread")
                self._started = world._start(world.process, self.name, lambda: self._target(*self._args))
                self._started.shown_as = self
                world.step("a thread starts")

            def run(self) -> None:
                self._target(*self._args)

            def is_alive(self) -> bool:
                return self._started is not None and not self._started.is_over

            def join(self, timeout: float | None = None) -> None:
                if self._started is not None and world.is_here():
                    started = self._started
                    world.wait("a thread's end", lambda: started.is_over, timeout)

        return SimpleNamespace(
            Lock=Lock,
            Thread=Thread,
            Event=threading.Event,
            local=threading.local,
            current_thread=world._current_or_none,
            main_thread=lambda: SimpleNamespace(is_alive=lambda: True),
            get_ident=threading.get_ident,
            TIMEOUT_MAX=threading.TIMEOUT_MAX,
        )

    def _current_or_none(self) -> object:
        return (self._current().shown_as or self._current()) if self.is_here() else None

    def _time(self) -> Any:
        def clock() -> float:
            return self.process.clock(self.now) if self.is_here() else self.now

        def sleep(seconds: float) -> None:
            self.wait("sleep", lambda: False, max(seconds, 0.0))

        def wall_clock() -> float:
            return clock() + (self.process.was_set if self.is_here() else 0.0)

        return SimpleNamespace(
            monotonic=clock,
            time=wall_clock,
            perf_counter=clock,
            clock_gettime=lambda _: clock(),
            sleep=sleep,
            CLOCK_MONOTONIC=time.CLOCK_MONOTONIC,
        )


class _Shim:
    """A module as the threads of a world see it, and as lancewal's real threads in this process see it.

    These belong to writers that were open before: a heartbeat that slept by a simulated clock, or got a
    simulated thread, would never beat again.
    """

    def __init__(self, world: World, simulated: Any, real: Any) -> None:
        self._world, self._simulated, self._real = world, simulated, real

    def __getattr__(self, name: str) -> Any:
        is_outsider = not self._world.is_here() and threading.current_thread().name.startswith("lancewal-")
        return getattr(self._real if is_outsider else self._simulated, name)


@contextmanager
def uncollected() -> Iterator[None]:
    """Python collects no cycles within the block, and what is left of it is not ended when it does.

    A writer that is freed ends its threads: in a world these would be steps of whatever thread was running
    when Python thought of it, which no seed decides; after it there is nobody left who could end.
    """
    before = set(weakref.finalize._registry)  # type: ignore[attr-defined]
    gc.disable()
    try:
        yield
    finally:
        for each in set(weakref.finalize._registry) - before:  # type: ignore[attr-defined]
            each.detach()
        gc.enable()


def _uses() -> list[tuple[ModuleType, str]]:
    """The modules of lancewal that use what a world replaces, and under which name."""
    return _found_in(len(sys.modules))[0]


def _cached_properties() -> list[Any]:
    return _found_in(len(sys.modules))[1]


@lru_cache(maxsize=1)
def _found_in(_: int) -> tuple[list[tuple[ModuleType, str]], list[Any]]:
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("lancewal.") and m is not None]
    uses = [
        (module, attribute)
        for module in modules
        for attribute in ("threading", "time", "random", "secrets")
        if isinstance(getattr(module, attribute, None), ModuleType)
    ]
    classes = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    properties = [p for each in classes for p in vars(each).values() if isinstance(p, cached_property)]
    return uses, properties


class Queue:
    """As ``queue.SimpleQueue``, for threads of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        while not self._items:
            self._world.wait("a queue", lambda: bool(self._items))
        return self._items.popleft()
