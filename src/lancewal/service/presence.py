"""Presence: this process's owner records, one per table with the shards that it owns, and its heartbeat."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from uuid import UUID

from lancewal.errors import LanceWalError, ShardOwnedError
from lancewal.format import ShardManifest
from lancewal.service.owners import (
    BEATS,
    Owner,
    TakeOver,
    encoded_owner,
    forget_owner,
    is_dead_here,
    read_owners,
    wait_until_gone,
)
from lancewal.shard import ShardManifestStore
from lancewal.storage import ObjectStore, Worker, both, in_forked_child, in_thread, layout, span
from lancewal.writer import ShardWriter

logger = logging.getLogger(__name__)

_USUAL_LEASE = timedelta(seconds=10)
#: How often per heartbeat this process looks for requests. The first number applies on a local store, where
#: looks are free, or for some leases after a request. The second applies if both hold, so that a stream of
#: micro-batches need not wait for its answers.
_LOOKS_IN_A_BEAT = 8
_FREE_LOOKS_WHILE_ASKED = 64
_BUSY_LEASES = 3
#: How often the deletion of the record is tried when no shard is owned any more.
_FAREWELLS = 5
_SHORTEST_PAUSE = 0.01
_LONGEST_PAUSE = 60.0

Look = Callable[[ShardManifestStore], ShardManifest | None]
Claimed = Callable[[int], object]


class _ContestedError(Exception):
    """Another process owns the shard."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner.owner_id)
        self.owner = owner


class Presence:
    """This process as an owner of one table's shards. Thread-safe.

    It keeps no writer alive. A writer that was dropped, has failed or was fenced is no longer named in the
    record.
    """

    def __init__(self, uri: str, changed: Callable[[Presence], None]) -> None:
        self.uri = uri
        self.owner_id = secrets.token_hex(8)
        #: The address at which this process serves the table, if it does.
        self.address: str | None = None
        #: How many writes of the record and looks for requests have failed.
        self.failures = 0
        #: Held by the heartbeat, which may have to wait for the storage.
        self.stepping = threading.Lock()
        #: Held while requests are executed.
        self.serving = threading.Lock()
        # By ``time.monotonic``: when the next heartbeat and the next look for requests are due, and until
        # when looks are more frequent.
        self._due = self._look_due = float("inf")
        self._busy_until = 0.0
        self._changed = changed
        self._lock = threading.Lock()  # guards the fields below; never held across a storage request
        self._held: dict[UUID, weakref.ref[ShardWriter]] = {}
        self._claimed: dict[UUID, int] = {}  # claimed shards whose writers are not open yet
        self._opening: dict[UUID, threading.Lock] = {}
        self._store: ObjectStore | None = None
        self._lease = _USUAL_LEASE
        self._changes = 0
        self._to_forget: list[str] = []
        # Held while the record is written; shards that are closed at the same time share one write.
        self._writing = threading.Lock()
        self._written_changes = 0
        self._is_stored = False
        self._failed_in_a_row = 0
        self._beats = 0
        self._looking = threading.Lock()
        self._others: tuple[float, list[Owner]] = (float("-inf"), [])

    @property
    def lease(self) -> timedelta:
        return self._lease

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return self._lease.total_seconds() / BEATS

    @property
    def store(self) -> ObjectStore | None:
        """The table's storage; ``None`` before the first claim or announcement."""
        return self._store

    def holder(self, shard_id: UUID) -> ShardWriter | None:
        """The usable writer in this process that owns the shard, if there is one.

        Waits while another thread closes the writer: a claim would fence its last flush.
        """
        while True:
            with self._lock:
                held = self._held.get(shard_id)
            writer = None if held is None else held()
            if writer is None or not writer.closing:
                return writer if writer is not None and writer.usable else None
            time.sleep(_SHORTEST_PAUSE)

    def shards(self) -> dict[UUID, int]:
        """The shards that this process owns, with their epochs."""
        with self._lock:
            writers, claimed = [held() for held in self._held.values()], dict(self._claimed)
        # A writer that is being closed keeps its shard until its last rows are flushed.
        return {w.shard_id: w.epoch for w in writers if w is not None and (w.usable or w.closing)} | claimed

    def is_needed(self) -> bool:
        """Whether there is a record to write or to delete."""
        return bool(self.address or self._is_stored or self._to_forget or self.shards())

    @contextmanager
    def opening(self, shard_id: UUID) -> Iterator[None]:
        """Let one thread at a time open a shard in this process; the next one finds its writer."""
        with self._lock:
            lock = self._opening.setdefault(shard_id, threading.Lock())
        with lock:
            yield

    def claimed(self, shard_id: UUID, store: ObjectStore, lease: timedelta, epoch: int) -> None:
        """Add a newly claimed shard to the record, and start the heartbeat.

        Returns when the record is written or could not be written.
        """
        with self._lock:
            self._claimed[shard_id] = epoch
            self._store = store
            self._lease = lease
            self._changes += 1
            change = self._changes
        self._write(change)
        # Start now: opening the writer may replay a long log, and can take longer than a lease.
        self._schedule()

    def hold(self, writer: ShardWriter) -> None:
        """Keep the writer's claimed shard in the record until the writer is closed."""
        with self._lock:
            self._held[writer.shard_id] = weakref.ref(writer)
            self._claimed.pop(writer.shard_id, None)
        writer.after_close = partial(self.release, writer.shard_id, writer.epoch)

    def announce(self, store: ObjectStore, address: str | None) -> None:
        """Publish the address at which this process serves the table, even without shards; ``None``: none."""
        with self._lock:
            self._store = self._store or store
            self.address = address
            self._changes += 1
            change = self._changes
        self._write(change)
        self._schedule()

    def _schedule(self) -> None:
        now = time.monotonic()
        self._due = min(self._due, now + self.interval)
        self._look_due = min(self._look_due, now + self._look_interval(now))
        self._changed(self)

    def release(self, shard_id: UUID, epoch: int) -> None:
        """Remove the shard from the record; returns when the record is written or could not be written."""
        with self._lock:
            held = self._held.get(shard_id)
            writer = None if held is None else held()
            if writer is not None and writer.epoch > epoch:
                return
            self._held.pop(shard_id, None)
            if self._claimed.get(shard_id, -1) <= epoch:
                self._claimed.pop(shard_id, None)
            self._changes += 1
            change = self._changes
        self._write(change)

    def give_up(self, shard_id: UUID) -> None:
        """Remove a shard that may have been claimed, but whose writer was not opened."""
        with self._lock:
            if self._claimed.pop(shard_id, None) is None:
                return
            self._changes += 1
            change = self._changes
        self._write(change)

    def forget(self, owner_id: str) -> None:
        """Delete the record of an owner that is gone, at the next heartbeat."""
        with self._lock:
            self._to_forget.append(owner_id)

    @property
    def due(self) -> float:
        """When the next step is due, by ``time.monotonic``."""
        return min(self._due, self._look_due)

    def step(self) -> None:
        """Do what is due: the heartbeat, and a look for requests."""
        now = time.monotonic()
        if self._due <= now:
            self.beat()
            self._tend_writers()
        if self._look_due <= now:
            self._look_due = now + self._look_interval(now)
            self._look_for_requests()

    def _tend_writers(self) -> None:
        """Do the writers' periodic work: old rows are flushed, because a trickle never fills a MemTable."""
        with self._lock:
            writers = [held() for held in self._held.values()]
        for writer in writers:
            try:
                if writer is not None:
                    writer.tend()
            except LanceWalError as error:
                logger.warning("a writer of %s was not tended: %s", self.uri, error)

    def _look_interval(self, now: float) -> float:
        """Seconds until the next look for requests.

        A look is a request to the storage. So there is one per heartbeat, and more if looks are free (local
        storage) or requests came lately.
        """
        is_asked, is_free = now < self._busy_until, self._store is not None and self._store.is_local
        if is_asked and is_free:
            return self.interval / _FREE_LOOKS_WHILE_ASKED
        return self.interval / (_LOOKS_IN_A_BEAT if is_asked or is_free else 1)

    def _look_for_requests(self) -> None:
        store = self._store
        if store is None or not self._is_stored:
            return
        try:
            if _serve is not None and _serve(self, store):
                self._busy_until = time.monotonic() + _BUSY_LEASES * self._lease.total_seconds()
        except LanceWalError as error:
            self.failures += 1
            logger.warning("requests to %s could not be looked for: %s", self.uri, error)

    def beat(self) -> None:
        """Write the record, and delete the records of owners that are gone."""
        self._due = time.monotonic() + self.interval
        self._write(None)
        with self._lock:
            to_forget, self._to_forget = self._to_forget, []
            store = self._store
        for owner_id in to_forget:
            if store is not None:
                forget_owner(store, owner_id)

    def _write(self, change: int | None) -> None:
        """Write the record, unless it already includes ``change``."""
        with self._writing:
            with self._lock:
                store, changes = self._store, self._changes
            if store is None or (change is not None and self._written_changes >= change):
                return
            shards = self.shards()
            try:
                if shards or self.address:
                    self._beats += 1
                    data = encoded_owner(self.owner_id, shards, self._lease, self.address, self._beats)
                    self._is_stored = True  # set first: a failed write may still have stored the record
                    store.put(layout.owner_record(self.owner_id), data, durable=False)
                elif self._is_stored:
                    store.delete(layout.owner_record(self.owner_id))
                    self._is_stored = False
                self._written_changes = changes
                self._failed_in_a_row = 0
            except LanceWalError as error:
                self.failures += 1
                self._failed_in_a_row += 1
                logger.warning("the owner record of %s was not written: %s", self.uri, error)
                if not shards and not self.address and self._failed_in_a_row >= _FAREWELLS:
                    # The record expires by itself: another process waits for at most a lease.
                    self._is_stored = False

    def others(self, store: ObjectStore) -> list[Owner]:
        """The other owners. Concurrent callers share one read, which began after all of them called."""
        asked = time.monotonic()
        with self._looking:
            read_at, found = self._others
            if read_at < asked:
                read_at = time.monotonic()
                try:
                    found = read_owners(store, except_for=self.owner_id)
                except LanceWalError as error:
                    logger.warning("the owners of %s are not known: %s", self.uri, error)
                    found = []
                self._others = (read_at, found)
            return found

    def refuse(self, shard_id: UUID) -> ShardOwnedError:
        """The error for a shard that this process itself owns."""
        return ShardOwnedError(
            shard_id,
            self.owner_id,
            socket.gethostname(),
            os.getpid(),
            None,  # a gateway of this process would send its clients to itself
            "a writer that is open in this process has it",
        )


class _Heart:
    """The heartbeats of this process for all its tables; one thread schedules them while any is needed."""

    def __init__(self) -> None:
        self.start_empty()

    def start_empty(self) -> None:
        """Reset. Also called in a forked child: the writers and their records belong to the parent."""
        self._lock = threading.Lock()
        # A presence lives as long as something refers to it: an open writer, or ``_beating``.
        self._presences: weakref.WeakValueDictionary[str, Presence] = weakref.WeakValueDictionary()
        #: The presences that need a heartbeat.
        self._beating: dict[str, Presence] = {}
        self._worker: Worker | None = None

    def presence(self, uri: str) -> Presence:
        """The presence of this process at the table."""
        uri = uri.rstrip("/")
        with self._lock:
            found = self._presences.get(uri)
            if found is None:
                found = self._presences[uri] = Presence(uri, self.kick)
            return found

    def kick(self, presence: Presence) -> None:
        """Add the presence to the heartbeat, and check now which heartbeats are due."""
        with self._lock:
            self._beating[presence.uri] = presence
            if self._worker is None:
                self._worker = Worker("lancewal-heartbeat", self._step)
            self._worker.kick_for_later()

    def _step(self) -> float | None:
        with self._lock:
            needed = [each for each in self._beating.values() if each.is_needed()]
            self._beating = {each.uri: each for each in needed}
            if not needed and self._worker is not None:
                # The next writer starts another worker.
                self._worker.stop()
                self._worker = None
                return None
        now = time.monotonic()
        for each in needed:
            if each.due <= now and not each.stepping.locked():
                # In a thread of its own, even for a single presence: while its storage does not answer, the
                # records of tables that are opened later would expire.
                in_thread(partial(self._step_of_one, each), "lancewal-heartbeat-of-one")
        # A presence whose step is running is checked again soon, because its next heartbeat may be due first.
        waiting = [now + each.interval / 4 if each.stepping.locked() else each.due for each in needed]
        # Bounded, because ``due`` may be infinite and a lock cannot wait that long.
        return max(_SHORTEST_PAUSE, min([*waiting, now + _LONGEST_PAUSE]) - time.monotonic())

    @staticmethod
    def _step_of_one(presence: Presence) -> None:
        if presence.stepping.acquire(blocking=False):
            try:
                presence.step()
            finally:
                presence.stepping.release()


#: Executes requests; set by the ``requests`` module.
_serve: Callable[[Presence, ObjectStore], bool] | None = None


def serve_with(serve: Callable[[Presence, ObjectStore], bool]) -> None:
    """Let ``serve`` look for requests to this process; it returns whether there were any."""
    global _serve
    _serve = serve


_heart = _Heart()
in_forked_child(_heart.start_empty)


def presence_at(uri: str) -> Presence:
    """The presence of this process at the table."""
    return _heart.presence(uri)


def open_owned(
    store: ObjectStore,
    shard_id: UUID,
    open_with: Callable[[Look, Claimed], ShardWriter],
    *,
    look: Look,
    take_over: TakeOver,
    lease: timedelta,
) -> ShardWriter:
    """Open a shard writer, unless that would stop a live one, and record this process as the shard's owner.

    ``open_with`` opens the writer. It must read the shard's manifest with its first argument, which is
    ``look`` combined with a check of the owners, and call its second argument with the claimed epoch.
    """
    presence = presence_at(store.uri)
    claimed = partial(presence.claimed, shard_id, store, lease)
    with span("lancewal.open", table=store.uri, shard=str(shard_id)), presence.opening(shard_id):
        gone: set[str] = set()
        if take_over != "now" and presence.holder(shard_id) is not None:
            raise presence.refuse(shard_id)
        try:
            if take_over == "now":
                writer = open_with(look, claimed)
            else:
                writer = _opened(
                    presence, store, shard_id, lambda look: open_with(look, claimed), look, take_over, gone
                )
        except BaseException:
            presence.give_up(shard_id)
            raise
        for owner_id in gone:
            presence.forget(owner_id)
        presence.hold(writer)
        return writer


def _opened(
    presence: Presence,
    store: ObjectStore,
    shard_id: UUID,
    open_with: Callable[[Look], ShardWriter],
    look: Look,
    take_over: TakeOver,
    gone: set[str],
) -> ShardWriter:
    def look_at_owners_too(manifests: ShardManifestStore) -> ShardManifest | None:
        manifest, others = both(
            lambda: look(manifests), lambda: presence.others(store), at_once=not store.is_local
        )
        epoch = 0 if manifest is None else manifest.writer_epoch
        for owner in others:
            if owner.has(shard_id, epoch) and owner.owner_id not in gone:
                if take_over == "never" or not is_dead_here(owner):
                    raise _ContestedError(owner)
                gone.add(owner.owner_id)
        return manifest

    while True:
        try:
            return open_with(look_at_owners_too)
        except _ContestedError as contest:
            owner = contest.owner
        if take_over == "never":
            raise owner.error(shard_id, 'take_over="never" leaves it alone, living or gone')
        if wait_until_gone(store, owner, shard_id):
            gone.add(owner.owner_id)
