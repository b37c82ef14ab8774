"""A world in which one seed decides which thread runs next and what every clock says.

The code under test runs in threads of its own, as it does in life, but only one of them runs at a time.
At every storage call, lock, sleep and start of a thread it hands over to the scheduler, which picks the next
one by the seed. Time passes only when nobody can run, or when a process is made to stand still.

``World.installed`` gives the modules of lancewal a ``threading``, ``time``, ``random`` and ``secrets`` of
this world in place of Python's: the same names, so that the code under test knows nothing of it.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from lancewal.storage import parallel

#: More steps than any schedule needs: beyond it somebody waits for ever.
MOST_STEPS = 20_000


class Killed(BaseException):
    """The process of this thread is dead; nothing it still does has any effect."""


class StuckError(AssertionError):
    """Somebody waits for what nobody will do."""


@dataclass(eq=False)
class Process:
    """Threads that live and die together, with a clock of their own."""

    name: str
    #: Seconds that its clocks are ahead, and how much faster they go.
    ahead: float = 0.0
    drift: float = 0.0
    urgency: float = 0.0
    is_dead: bool = False
    #: The world's time until which it stands still.
    stands_still_until: float = 0.0

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
    error: BaseException | None = None
    place: str = "start"


def _locked() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


class World:
    """The scheduler. :meth:`spawn` starts processes, :meth:`run` lets them run to their end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        #: How often the scheduler thinks of another process.
        self.restlessness = self.random.choice([0.02, 0.1, 0.5])
        self.now = 0.0
        self.steps = 0
        self.trace: list[str] = []
        self._threads: list[_Thread] = []
        self._scheduler = _locked()
        self._local = threading.local()
        self._began = datetime.now(UTC)

    # ------------------------------------------------------------- processes

    def spawn(self, process: Process, body: Callable[[], None]) -> None:
        """Let ``body`` be the main thread of ``process``."""
        process.urgency = self.random.random()
        self._start(process, process.name, body)

    @property
    def process(self) -> Process:
        """That of the thread which runs."""
        return self._current().process

    def kill(self, process: Process) -> None:
        process.is_dead = True

    def run(self) -> None:
        """Until every thread is over; raises the first error that a body let through."""
        try:
            while (thread := self._next()) is not None:
                self.steps += 1
                if self.steps > MOST_STEPS:
                    raise StuckError(f"{MOST_STEPS} steps, and no end: {self._places()}")
                self.trace.append(f"{thread.process.name}/{thread.name}: {thread.place}")
                self._let_run(thread)
                if thread.error is not None:
                    raise thread.error
        finally:
            self._end()

    def _next(self) -> _Thread | None:
        living = [t for t in self._threads if not t.is_over and not t.process.is_dead]
        if not living:
            return None
        while True:
            ready = [thread for thread in living if self._is_ready(thread)]
            if ready:
                # By process first: one with many threads does not run more often for it. The most urgent one
                # runs on until its urgency is drawn anew: a few long stretches find more than even turns.
                chosen = max((thread.process for thread in ready), key=lambda process: process.urgency)
                if self.random.random() < self.restlessness:
                    chosen.urgency = self.random.random()
                return self.random.choice([thread for thread in ready if thread.process is chosen])
            wakes = [t.process.stands_still_until for t in living if t.process.stands_still_until > self.now]
            wakes += [t.deadline for t in living if t.deadline is not None and t.deadline > self.now]
            if not wakes:
                if all(thread.name.startswith("lancewal-") for thread in living):
                    return None  # workers of writers that nobody closed
                raise StuckError(f"nobody can go on: {self._places()}")
            self.now = min(wakes)

    def _is_ready(self, thread: _Thread) -> bool:
        if thread.process.stands_still_until > self.now:
            return False
        if thread.waits_for is None or thread.waits_for():
            return True
        return thread.deadline is not None and thread.deadline <= self.now

    def _places(self) -> str:
        return ", ".join(f"{t.process.name}/{t.name} at {t.place}" for t in self._threads if not t.is_over)

    def _let_run(self, thread: _Thread) -> None:
        thread.timed_out = thread.waits_for is not None and not thread.waits_for()
        thread.waits_for = thread.deadline = None
        thread.baton.release()
        self._scheduler.acquire()

    def _end(self) -> None:
        """Every thread that is left unwinds as a dead one, so that none outlives the world."""
        for _ in range(1000):
            left = [thread for thread in self._threads if not thread.is_over]
            if not left:
                return
            for thread in left:
                thread.process.is_dead = True
                if not thread.is_over:
                    self._let_run(thread)
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
        self._scheduler.release()
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
                thread.error = None
            except BaseException as error:
                thread.error = None if process.is_dead else error
            finally:
                thread.is_over = True
                self._scheduler.release()

        threading.Thread(target=run, name=name, daemon=True).start()
        self._threads.append(thread)
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
        saved: list[tuple[ModuleType, str, Any]] = [(parallel, "SimpleQueue", parallel.SimpleQueue)]
        parallel.SimpleQueue = partial(Queue, self)  # type: ignore[assignment,misc]
        for name, module in list(sys.modules.items()):
            if not name.startswith("lancewal.") or module is None:
                continue
            for attribute, shim in shims.items():
                if isinstance(getattr(module, attribute, None), ModuleType):
                    saved.append((module, attribute, getattr(module, attribute)))
                    setattr(module, attribute, shim)
        try:
            yield
        finally:
            for module, attribute, value in saved:
                setattr(module, attribute, value)

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
                self._started = world._start(world.process, self.name, lambda: self._target(*self._args))
                world.step("a thread starts")

            def run(self) -> None:
                self._target(*self._args)

            def is_alive(self) -> bool:
                return self._started is not None and not self._started.is_over

            def join(self, timeout: float | None = None) -> None:
                if self._started is not None:
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
        )

    def _current_or_none(self) -> object:
        return self._current() if self.is_here() else None

    def _time(self) -> Any:
        def clock() -> float:
            return self.process.clock(self.now) if self.is_here() else self.now

        def sleep(seconds: float) -> None:
            self.wait("sleep", lambda: False, max(seconds, 0.0))

        return SimpleNamespace(
            monotonic=clock,
            time=clock,
            perf_counter=clock,
            clock_gettime=lambda _: clock(),
            sleep=sleep,
            CLOCK_MONOTONIC=time.CLOCK_MONOTONIC,
        )


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
