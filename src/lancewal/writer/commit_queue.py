"""What the commit log keeps in line: threads that wait, puts to be written, and those being written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa


class DurableRows(Protocol):
    """Where the rows of a queue item live, to be told when they are durable."""

    def note_durable(self, end_position: int, wal_position: int) -> None: ...


@dataclass(slots=True, eq=False)
class Waiter:
    """A thread that waits: until where, or with which rows."""

    #: Where it may go on; ``None`` while its rows have no position yet.
    end_position: int | None
    #: Queues the rows of its put; ``None`` where there are none, or they were withdrawn.
    offer: Callable[[], object] | None = None
    positions: range | None = None
    refusal: Exception | None = None
    queued: bool = False
    #: Held by ``with`` for as long as the thread is there: an interrupt may keep it from saying that it goes.
    present: threading.Lock = field(default_factory=threading.Lock)
    # Held by the waiter; released by whoever wakes it. A bare lock is several times
    # cheaper than a Condition, which matters with many threads per entry.
    gate: threading.Lock | None = None

    @property
    def undecided(self) -> bool:
        """Whether it brought rows that are neither queued nor refused."""
        return self.offer is not None and self.end_position is None and self.refusal is None

    def wake(self) -> None:
        """May be called twice: nobody waits a second time."""
        if self.gate is not None and self.gate.locked():
            self.gate.release()


@dataclass(slots=True)
class Item:
    batches: Sequence[pa.RecordBatch]
    end_position: int
    num_bytes: int
    # Of all items up to this one, since the log began: differences tell what is queued.
    end_bytes: int
    generation: int | None
    home: DurableRows | None
    owner: Waiter | None


@dataclass(slots=True)
class Group:
    items: list[Item]
    data: memoryview
    # The appender's next position before the first try: once that has moved, the entry is stored.
    tried_from: int | None = None
