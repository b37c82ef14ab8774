"""Put ids make puts idempotent: a put that is sent again, perhaps to another writer, is written once.

A client gives each put an id: a random session name and a number that counts up. With each put it also says
which numbers are settled: it will never send them again. A writer keeps the numbers that were written and are
not settled. So its memory is bounded by what clients have in progress.

The ids of an entry's puts are stored in the entry itself, so they are durable exactly when the rows are.
A writer that takes the shard over reads the ids of the entries that it replays. When the first put with an id
comes, it also reads the ids of older, flushed entries, back to :data:`RETRY_WINDOW`. Garbage collection keeps
entries for at least that long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lancewal.errors import InvalidInputError
from lancewal.format import PutId, put_ids_of
from lancewal.storage import LOOK_AGAIN_SECONDS
from lancewal.writer.group_commit import Put, PutState

#: How long after its first try a put may be sent again, in seconds.
RETRY_WINDOW = 600.0


@dataclass(slots=True)
class _Session:
    settled: int = 0
    #: The numbers that were written, with the end of their batch positions; 0 for puts of an earlier writer.
    landed: dict[int, int] = field(default_factory=dict)
    #: Puts that began and have not ended. An interrupt may leave a put here for good. Once its thread is
    #: gone, its state says what became of it.
    under_way: dict[int, Put] = field(default_factory=dict)
    #: Puts whose threads were interrupted while they waited. A leader may have been about to insert such a
    #: put. The retry of the put refers to it (``Put.earlier``), and takes its place if it was inserted.
    interrupted: dict[int, Put] = field(default_factory=dict)
    used_at: float = 0.0

    def settle(self, up_to: int) -> None:
        if up_to > self.settled:
            self.settled = up_to
            self.landed = {number: end for number, end in self.landed.items() if number > up_to}
            self.interrupted = {number: put for number, put in self.interrupted.items() if number > up_to}


class PutIds:
    """The put ids that one shard's writer knows."""

    def __init__(
        self, earlier: Callable[[], Iterable[str]] = tuple, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``earlier`` returns the tags of entries that were not replayed; it is called at most once."""
        self._earlier = earlier
        self._clock = clock
        self._loading = threading.Lock()
        self._loaded = False
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._swept_at = clock()

    def note(self, tag: str) -> None:
        """Record the put ids in the tag of an earlier writer's entry as written."""
        with self._lock:
            for put_id in put_ids_of(tag):
                session = self._session(put_id)
                if put_id.number > session.settled:
                    session.landed.setdefault(put_id.number, 0)

    def begin(self, put: Put) -> int | None:
        """Return where the rows end if the same put was already written; ``None`` if ``put`` must be written.

        The caller holds ``put.present``, and calls :meth:`end` when it is done with the put. A thread that
        begins the same put in between waits until the first one is done.
        """
        put_id = put.put_id
        assert put_id is not None
        self._load()
        while True:
            with self._lock:
                session = self._session(put_id)
                if put_id.number <= session.settled:
                    raise InvalidInputError(
                        f"put {put_id.number} of session {put_id.session} was said to be settled; a put that "
                        "may be sent again must not be"
                    )
                if put_id.number in session.landed:
                    return session.landed[put_id.number]
                first = session.under_way.get(put_id.number)
                if first is None:
                    put.earlier = session.interrupted.pop(put_id.number, None)
                    session.under_way[put_id.number] = put
                    return None
            if first.present.acquire(timeout=LOOK_AGAIN_SECONDS):
                first.present.release()
                self.end(first)

    def end(self, put: Put) -> None:
        """Record whether the rows of a put were queued; idempotent."""
        put_id = put.put_id
        assert put_id is not None
        with self._lock:
            session = self._session(put_id)
            if session.under_way.get(put_id.number) is not put:
                return
            if put_id.number > session.settled:
                if put.state is PutState.QUEUED:
                    session.landed[put_id.number] = put.end_position
                elif put.state is not PutState.REFUSED:
                    session.interrupted[put_id.number] = put
                elif put.earlier is not None and put.refusal is None:
                    # Refused before a leader saw it, so the outcome of the earlier put is still unknown.
                    session.interrupted[put_id.number] = put.earlier
            del session.under_way[put_id.number]

    def _session(self, put_id: PutId) -> _Session:
        """The session of a put id, made if there is none; also drops unused sessions. Requires the lock."""
        now = self._clock()
        if now - self._swept_at > RETRY_WINDOW:
            self._swept_at = now
            self._sessions = {
                name: session
                for name, session in self._sessions.items()
                if session.under_way or now - session.used_at <= RETRY_WINDOW
            }
        session = self._sessions.get(put_id.session)
        if session is None:
            session = self._sessions[put_id.session] = _Session()
        session.used_at = now
        session.settle(put_id.settled)
        return session

    def _load(self) -> None:
        if self._loaded:
            return
        with self._loading:
            if not self._loaded:
                for tag in self._earlier():
                    self.note(tag)
                self._loaded = True
