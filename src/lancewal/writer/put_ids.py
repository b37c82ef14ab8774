"""Put ids: a put that is sent again, after a lost reply or to another writer, lands once.

A client names its puts: a session, which it draws at random, and a number that counts up. With each put it
also says which numbers are settled, those that it will never send again. A writer keeps the numbers
that landed and are not settled, so what it keeps is as large as what clients have under way.

The ids of an entry's puts are stored in the entry itself, so they are durable exactly when the rows are.
A writer that takes the shard over reads them with the entries that it replays, and those of entries that
were flushed before, back to :data:`RETRY_WINDOW`, when the first put with an id comes. Garbage collection
keeps entries for at least that long.
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
    #: For each number that landed the end of its rows' batch positions; 0 for puts of an earlier writer.
    landed: dict[int, int] = field(default_factory=dict)
    #: The puts that were begun and not ended. An interrupt may leave one here for good: its state says
    #: what became of it once its thread is gone.
    under_way: dict[int, Put] = field(default_factory=dict)
    #: Puts whose threads were interrupted while they waited. A leader may have been about to take one in:
    #: whoever sends it again has it beside him, and stands for it if so.
    interrupted: dict[int, Put] = field(default_factory=dict)
    used_at: float = 0.0

    def settle(self, up_to: int) -> None:
        if up_to > self.settled:
            self.settled = up_to
            self.landed = {number: end for number, end in self.landed.items() if number > up_to}
            self.interrupted = {number: put for number, put in self.interrupted.items() if number > up_to}


class PutIds:
    """The ids that one shard's writer knows."""

    def __init__(
        self, earlier: Callable[[], Iterable[str]] = tuple, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``earlier`` gives the tags of entries that were not replayed; it is called once, if at all."""
        self._earlier = earlier
        self._clock = clock
        self._loading = threading.Lock()
        self._loaded = False
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._swept_at = clock()

    def note(self, tag: str) -> None:
        """The puts of an earlier writer's entry landed."""
        with self._lock:
            for put_id in put_ids_of(tag):
                session = self._session(put_id)
                if put_id.number > session.settled:
                    session.landed.setdefault(put_id.number, 0)

    def begin(self, put: Put) -> int | None:
        """Where the rows end if the same put has landed; ``None`` if ``put`` is the one to write.

        The caller holds ``put.present`` and calls :meth:`end` before it lets go. Whoever begins the same
        put meanwhile waits for that.
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
        """Keep whether the rows of a put were taken in; harmless when it is repeated."""
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
                    # Refused before a leader saw it: what became of the earlier one is still to be found out.
                    session.interrupted[put_id.number] = put.earlier
            del session.under_way[put_id.number]

    def _session(self, put_id: PutId) -> _Session:
        """Requires the lock."""
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
