"""Writes of jobs that span shards and may be rerun: each reaches each shard exactly once.

There are two ways to write. :func:`publish` lists SSTables that tasks have staged, and
:func:`append_transaction` appends one WAL entry (:func:`append_rows`: in all shards). Both first take over
the shard, then check whether it has the transaction already, and only then write. Why that is exactly once:

- **A shard changes hands at the claim.** Once a run has claimed a shard (epoch raised, WAL
  fenced by a sentinel), no earlier run can commit a manifest or append an entry there. What an earlier
  run wrote before is below the sentinel or in the claimed manifest. So the question
  "is it there?" has one answer after the claim, and it is asked only then.
- **The proof is atomic with the write.** A tagged WAL entry is the write. SSTables are
  published by one manifest commit, and the manifest that lists them is the proof; which names
  to look for is in the ``started`` record, written before any shard was touched.
- **A late attempt finds the end.** ``done`` stays until a later version is done. The records of a write
  without a name are removed at its end. An attempt that finds no record of its transaction does not write.
- **The proof outlives its carrier.** Compaction prunes manifests, garbage collection deletes
  WAL entries; before they do they call ``Unsettled.preserve``, which leaves a mark. After
  ``done`` no proof is needed.
- **Shards are independent.** A crash between two shards leaves a transaction started and not
  done; the next run skips the shards that have it and writes the others. The rows of a
  transaction are the same in every run, and a row's key decides its shard.

The steps of a run; after each colon, what a crash right after the step leaves:

1. stage SSTables, or route rows: directories that nothing lists;
2. write ``started``: a record whose names no manifest lists, and whose tag no entry has;
3. claim, and drain the WAL into SSTables, so that what is published is newer than every row
   before it: the shard as it was, under another epoch;
4. append the pointer: the change feed sees it, finds the SSTables unlisted, and waits or drops it; a
   run that lost the shard right here writes another one, and only its last one counts;
5. commit the manifest: the rows are written; the next run finds the names and confirms them;
6. append the confirmation, for the feed: the next run finds the names and confirms them again;
7. write ``done``: nothing is left to do, and a further run skips all.

A run that is stopped for hours and then continues is one of the "earlier runs" above:
it may claim again, and then it checks again. It checks ``done`` too.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from uuid import UUID

import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.errors import (
    ConflictError,
    FencedError,
    InvalidInputError,
    OutcomeUnknownError,
    PartialWriteError,
    StorageError,
    WalTruncatedError,
)
from lancewal.format import ShardManifest, SsTableEntry
from lancewal.publish.sstable_pointers import SsTablePointer, confirmation_tags
from lancewal.publish.staging import STAGED_DELETION_AGE, Staged, StagedAge
from lancewal.publish.transactions import (
    History,
    Run,
    ShardWrite,
    Transaction,
    TransactionLog,
    find_entry,
)
from lancewal.shard import (
    Shard,
    ShardManifestStore,
    WalAppender,
    discover_manifests,
    find_tip,
    first_readable,
    is_flushed,
)
from lancewal.storage import ObjectStore, both, layout, ordered_map
from lancewal.writer import DrainBudget, ShardWriter, drain_shard

logger = logging.getLogger(__name__)

#: How many shards are written in parallel, locally and on remote storage. ``DrainBudget`` bounds the memory
#: for their logs.
_CONCURRENT_SHARDS, _CONCURRENT_REMOTE_SHARDS = 4, 16
#: How many claims in a row may be lost to others before the caller gets an error.
_CLAIM_ATTEMPTS = 8
_CONCURRENT_LISTINGS = 16
_LONGEST_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class Adoption:
    """A request to a shard's owner: list the staged SSTables of a run that has begun."""

    shard_id: UUID
    entries: tuple[SsTableEntry, ...]
    transaction: Transaction
    run_id: str
    age: StagedAge = field(compare=False)

    @property
    def rows(self) -> int:
        return sum(entry.physical_rows or 0 for entry in self.entries)

    def check_present(self, store: ObjectStore, position: int) -> None:
        """Refuse SSTables that may be collected; ``position`` is that of the pointer to them.

        Collections keep what a pointer names. So an SSTable that exists now stays until it is listed, however
        long this process is stopped from here on. The exception is a collection that looked for pointers
        before this pointer was written, and deletes afterwards. It deletes only SSTables that are old by the
        storage's clock, so those that are young by that clock are safe from it. Clocks of hosts do not
        count here, because somebody may set them.
        """
        self.age.refuse_old()
        pointer = store.head(layout.wal_entry(self.shard_id, position))

        def is_safe(entry: SsTableEntry) -> bool:
            # A collection deletes an SSTable's versions first.
            versions = store.list(f"{layout.sstable_dir(self.shard_id, entry.path)}/{layout.VERSIONS_DIR}")
            written = max((info.modified for info in versions), default=None)
            return (
                pointer is not None
                and written is not None
                and pointer.modified - written <= STAGED_DELETION_AGE / 2
            )

        workers = 1 if store.is_local else _CONCURRENT_LISTINGS
        lost = len(self.entries) - sum(ordered_map(is_safe, self.entries, workers))
        if lost:
            raise InvalidInputError(
                f"{lost} of {len(self.entries)} staged SSTables of shard {self.shard_id} are gone, or "
                "garbage collection may take them for abandoned: they were staged long ago, or a clock was "
                "set; write the data again"
            )

    @property
    def pointer(self) -> SsTablePointer:
        return SsTablePointer(
            self.run_id,
            tuple(entry.path for entry in self.entries),
            sum(entry.in_memory_bytes or 0 for entry in self.entries),
            self.transaction.tags["transaction"],
        )


#: Asks owners to adopt SSTables. Returns the result for each shard; a shard that is missing has no owner.
Adopt = Callable[[Sequence[Adoption]], Mapping[UUID, ShardWrite | Exception]]


def publish(
    base: BaseTable,
    store: ObjectStore,
    staged: Sequence[Staged],
    transaction: Transaction | None = None,
    *,
    adopt: Adopt | None = None,
) -> list[ShardWrite]:
    """List staged SSTables in their shards' manifests, in their order, newer than all rows before.

    If ``transaction`` was published before, in full or in part, only the shards that lack it are
    written. Without a ``transaction`` a repeated call writes again. Takes over every touched shard
    that ``adopt`` does not handle: **a writer that is open on one of them is fenced**.
    """
    is_anonymous = transaction is None
    transaction = transaction or Transaction.anonymous()
    log = TransactionLog(store, transaction)
    if not is_anonymous and log.is_done():
        logger.info("version %d of %s is written already", transaction.version, transaction.app_id)
        return []
    age = StagedAge.of(staged)
    age.refuse_old()
    by_shard: dict[Shard, list[Staged]] = {}
    for each in sorted(staged, key=lambda s: s.order):
        by_shard.setdefault(each.shard, []).append(each)
    names = {shard.shard_id: tuple(s.entry.path for s in found) for shard, found in by_shard.items()}
    run = Run(transaction.version, sstables=names)
    if by_shard:
        log.start(run)
    failed: dict[UUID, Exception] = {}
    budget = DrainBudget(store)
    adopted: Mapping[UUID, ShardWrite | Exception] = {}
    if adopt is not None and by_shard:
        adopted = adopt(
            [
                Adoption(shard.shard_id, tuple(each.entry for each in found), transaction, run.run_id, age)
                for shard, found in by_shard.items()
            ]
        )

    def one(item: tuple[Shard, list[Staged]]) -> ShardWrite | None:
        shard, found = item
        settled = adopted.get(shard.shard_id)
        if isinstance(settled, ShardWrite):
            return settled
        try:
            if settled is not None:
                raise settled
            return _publish_shard(base, store, shard, [each.entry for each in found], log, run, budget, age)
        except Exception as error:
            # Finish the other shards before the caller gets the error.
            failed[shard.shard_id] = error
            return None

    written = [w for w in ordered_map(one, by_shard.items(), _shards_at_a_time(store)) if w is not None]
    if failed:
        rows = {w.shard_id: w.rows for w in written if not w.skipped}
        raise PartialWriteError("publish", failed, rows) from next(iter(failed.values()))
    if is_anonymous:
        log.forget()
    else:
        with _rows_are_written():
            log.finish(written)
    return written


def begin_append(store: ObjectStore, transaction: Transaction, *, find_tips: bool = True) -> Run | None:
    """Prepare for :func:`append_transaction` in any number of processes; ``None`` if all is written.

    Called once, before the first of them, by the process that calls :func:`finish_append` after
    the last. The returned run may be passed to both, which then read less. Without ``find_tips``, entries
    of an application's first version are searched from the replay cursors on: a rerun reads more, and a
    first run reads less.
    """
    log = TransactionLog(store, transaction)
    history = log.read()
    if history.done >= transaction.version:
        logger.info("version %d of %s is written already", transaction.version, transaction.app_id)
        return None
    floors = log.floors(history)
    if not floors:
        manifests = discover_manifests(store)

        def floor(manifest: ShardManifest) -> int:
            if find_tips:
                return find_tip(store, manifest.shard_id, manifest)
            return manifest.first_unsettled

        tips = ordered_map(floor, manifests, 1 if store.is_local else 16)
        floors = {m.shard_id: tip for m, tip in zip(manifests, tips, strict=True)}
    run = Run(transaction.version, floors=floors)
    log.start(run)
    return run


def append_transaction(
    store: ObjectStore,
    shard: Shard,
    batches: Sequence[pa.RecordBatch],
    transaction: Transaction,
    *,
    base_version: int | None = None,
    run: Run | None = None,
    only_attempt: bool = False,
) -> ShardWrite:
    """Append ``batches`` (in the table's stored form) as one entry, unless an earlier run has.

    ``base_version`` is the version of the base table whose columns they have.

    Takes over the shard. :func:`begin_append` must have been called for the transaction. A transaction that
    was not begun, or was forgotten after its end, is refused with a :class:`ConflictError`.

    ``only_attempt`` says that no other attempt, such as a retried task, writes to this shard for ``run``.
    Then nothing is searched if the records name no other run. A run is recorded before it claims
    anything, so a run that the records do not name after our claim can only claim after us.
    """
    rows = sum(batch.num_rows for batch in batches)
    log = TransactionLog(store, transaction, [] if run is None else [run])
    at_once = not store.is_local

    def look(manifests: ShardManifestStore) -> ShardManifest:
        # Check for the end of the transaction before the claim too, so that a late attempt fences nobody.
        present, is_over = both(
            manifests.read_to_claim, lambda: _is_over(log.read(), transaction), at_once=at_once
        )
        if is_over:
            raise _OverError
        return shard.require(present) if present is not None else shard.create(store, manifests)

    tried = False

    def once() -> ShardWrite:
        nonlocal tried
        alone, tried = only_attempt and not tried, True
        seen: list[History] = []
        try:
            appender = WalAppender.open(
                store,
                shard.shard_id,
                shard.spec_id,
                look=look,
                # Read in parallel with the sentinel; _earlier_write says why that is late enough.
                claimed=lambda epoch: seen.append(log.read()),
                keep_metadata=True,
            )
        except _OverError:
            return ShardWrite(shard.shard_id, rows, True)
        claimed = appender.claimed
        assert claimed is not None, "a claim leaves a manifest"
        found = None
        if not alone or seen[0].runs_of(transaction.version) != [run]:
            end = appender.sentinel_position or find_tip(store, shard.shard_id, claimed)
            found = _earlier_write(store, log, claimed, end, seen[0])
        if found is not None:
            if found.run_id is not None:
                # An earlier run published SSTables. Once the transaction is done no proof of them is kept,
                # and the feed would drop a pointer that nothing confirms.
                with _rows_are_written():
                    appender.append_pointer(confirmation_tags(found.run_id))
            return ShardWrite(shard.shard_id, rows, True, found.position)
        result = appender.append(list(batches), tags=transaction.tags, base_version=base_version)
        tail = result.position - claimed.replay_after_wal_entry_position
        return ShardWrite(shard.shard_id, rows, False, result.position, result.wal_bytes, tail=tail)

    return _retrying_lost_claims(once)


class _OverError(Exception):
    """The transaction is written in full, so no writer should be fenced for it."""


def finish_append(
    store: ObjectStore, transaction: Transaction, written: Sequence[ShardWrite], run: Run | None = None
) -> None:
    """Record that every shard has the transaction. ``written`` are all results of its appends."""
    log = TransactionLog(store, transaction)
    # The floors of any run will do: they only bound where the next version's entries are searched.
    runs = log.read().runs_of(transaction.version) if run is None else [run]
    floors: dict[UUID, int] = {}
    for each in runs:
        for shard, position in (each.floors or {}).items():
            floors[shard] = max(position, floors.get(shard, 0))
    for write in written:
        if write.position is not None:
            floors[write.shard_id] = max(write.position + 1, floors.get(write.shard_id, 0))
    with _rows_are_written():
        log.finish(written, floors)


def append_rows(
    store: ObjectStore,
    parts: Mapping[Shard, Sequence[pa.RecordBatch]],
    transaction: Transaction | None = None,
    *,
    base_version: int | None = None,
) -> list[ShardWrite]:
    """Append all rows of a write from this process; the counterpart of :func:`publish` for SSTables.

    ``parts`` has all rows of the write for each shard. Another run of the same transaction, earlier or
    later, may publish SSTables instead. Both ways look for both kinds of proof after the claim, and both
    write a shard's whole part atomically. So a rerun may take either way. Without a ``transaction`` a
    repeated call writes again.
    """
    is_anonymous = transaction is None
    transaction = transaction or Transaction.anonymous()
    run = begin_append(store, transaction, find_tips=False)
    if run is None:
        return []
    failed: dict[UUID, Exception] = {}

    def one(item: tuple[Shard, Sequence[pa.RecordBatch]]) -> ShardWrite | None:
        shard, batches = item
        try:
            return append_transaction(
                store, shard, batches, transaction, base_version=base_version, run=run, only_attempt=True
            )
        except Exception as error:
            # Finish the other shards before the caller gets the error.
            failed[shard.shard_id] = error
            return None

    try:
        written = [w for w in ordered_map(one, parts.items(), _shards_at_a_time(store)) if w is not None]
        if failed:
            rows = {w.shard_id: w.rows for w in written if not w.skipped}
            raise PartialWriteError("append", failed, rows) from next(iter(failed.values()))
        if not is_anonymous:
            finish_append(store, transaction, written, run)
        return written
    finally:
        if is_anonymous:
            # An anonymous transaction cannot be rerun under its name.
            TransactionLog(store, transaction).forget()


def _shards_at_a_time(store: ObjectStore) -> int:
    return _CONCURRENT_SHARDS if store.is_local else _CONCURRENT_REMOTE_SHARDS


@contextmanager
def _rows_are_written() -> Iterator[None]:
    """Turn errors into "outcome unknown": the rows are written, only the record of that may be missing."""
    try:
        yield
    except StorageError as error:
        raise OutcomeUnknownError(f"rows are written, but not recorded as such: {error}") from error


@dataclass(frozen=True)
class _Earlier:
    """An earlier run's write of the same transaction; ``run_id`` is set if a confirmation may be missing."""

    run_id: str | None = None
    position: int | None = None


def _earlier_write(
    store: ObjectStore,
    log: TransactionLog,
    claimed: ShardManifest,
    end: int,
    history: History | None = None,
) -> _Earlier | None:
    """The proof that the shard has the transaction; ``None`` if it does not have it.

    Requires that the shard was claimed, and that ``claimed``, ``end`` and ``history``, if given, were read
    after that. ``history`` may be older than the sentinel, because the log is searched after both.
    Whatever an earlier run did here, it did before the claim, so that the records or ``claimed`` show it, or
    before the sentinel, so that its entry is below ``end``. If that entry is collected already, the
    search finds the gap, and the records are read again.
    """
    transaction, shard_id = log.transaction, claimed.shard_id
    listed = {entry.path for entry in claimed.sstables}
    first = layout.FIRST_WAL_POSITION
    looked_again = False
    while True:
        history = history or log.read()
        if _is_over(history, transaction):
            return _Earlier()
        marked_by = history.marks.get((transaction.version, shard_id))
        if marked_by is not None:
            return _Earlier(marked_by)
        runs = history.runs_of(transaction.version)
        for run in runs:
            if not listed.isdisjoint(run.sstables.get(shard_id, ())):
                return _Earlier(run.run_id)
        floor = min((run.floor(shard_id) for run in runs if run.floors is not None), default=end)
        start = max(first, floor, history.proven_from(transaction.version, shard_id))
        try:
            entry = find_entry(store, shard_id, transaction, start, end)
            if max(first, floor) >= end:
                return None
            # Neither an entry nor its absence counts before the records are read again: see find_entry.
            history = log.read()
            if entry is None:
                is_marked = (transaction.version, shard_id) in history.marks
                if not is_marked and not _is_over(history, transaction):
                    return None
            elif history.proven_from(transaction.version, shard_id) <= entry.position:
                return _Earlier(position=entry.position)
        except WalTruncatedError:
            first = first_readable(store, shard_id, ShardManifestStore(store, shard_id).read_latest())
            if first <= start:
                # A stalled run may have written its entry into an emptied slot just now.
                if looked_again:
                    raise
                looked_again = True
            # Before an entry is deleted, its proof is preserved or its transaction is done. That may have
            # happened after the records were read, so read them again.
            history = None


def _is_over(history: History, transaction: Transaction) -> bool:
    """Whether all shards have the transaction. Refuses a late attempt of a transaction that is forgotten."""
    if history.done >= transaction.version:
        return True
    if not history.runs_of(transaction.version):
        raise ConflictError(
            f"version {transaction.version} of {transaction.app_id} was not begun, or is over and forgotten; "
            "nothing was written"
        )
    return False


def adopt_sstables(writer: ShardWriter, store: ObjectStore, adoption: Adoption) -> ShardWrite:
    """Carry out an adoption with the shard's ``writer``, unless an earlier run of the transaction has.

    The run must have begun. The writer holds the shard, so its findings are valid as after a claim. If it
    has lost the shard, nothing is committed (:class:`FencedError`).
    """
    log = TransactionLog(store, adoption.transaction)
    earlier: _Earlier | None = None

    def prepare() -> None:
        nonlocal earlier
        held = ShardManifestStore(store, adoption.shard_id).require_latest()
        if held.writer_epoch != writer.epoch:
            raise FencedError(adoption.shard_id, writer.epoch, held.writer_epoch, "before publishing")
        earlier = _earlier_write(store, log, held, find_tip(store, adoption.shard_id, held))
        if earlier is None:
            _require_announced(log, adoption)
            adoption.age.refuse_old()

    def commit(appender: WalAppender) -> tuple[ShardWrite, ShardManifest | None]:
        position, manifest = None, None
        run_id: str | None = adoption.run_id
        if earlier is None:
            position = appender.append_pointer(adoption.pointer.tags())
            adoption.check_present(store, position)
            manifest = appender.manifests.commit_update(
                writer.epoch, partial(_listing, entries=adoption.entries, position=position)
            )
        else:
            run_id = earlier.run_id
        # Only while no put is running: the log's leader takes every entry of the epoch for its own.
        if run_id is not None:
            with _rows_are_written():
                appender.append_pointer(confirmation_tags(run_id))
        return ShardWrite(adoption.shard_id, adoption.rows, earlier is not None, position), manifest

    return writer.insert_generations(prepare, commit)


def _require_announced(log: TransactionLog, adoption: Adoption) -> None:
    """Refuse SSTables that the run has not announced: they may be listed already."""
    paths = tuple(entry.path for entry in adoption.entries)
    runs = log.read().runs_of(adoption.transaction.version)
    announced = [run.sstables.get(adoption.shard_id) for run in runs if run.run_id == adoption.run_id]
    if paths not in announced:
        raise InvalidInputError(f"run {adoption.run_id} has not announced these SSTables")


def _publish_shard(
    base: BaseTable,
    store: ObjectStore,
    shard: Shard,
    entries: Sequence[SsTableEntry],
    log: TransactionLog,
    run: Run,
    budget: DrainBudget,
    age: StagedAge,
) -> ShardWrite:
    adoption = Adoption(shard.shard_id, tuple(entries), log.transaction, run.run_id, age)
    rows, pointer = adoption.rows, adoption.pointer
    shard.create(store)

    def once() -> ShardWrite:
        with budget.for_log_of(shard.shard_id):
            epoch = drain_shard(base, store, shard.shard_id).epoch
        manifests = ShardManifestStore(store, shard.shard_id)
        claimed = manifests.require_latest()
        if claimed.writer_epoch != epoch:
            raise FencedError(shard.shard_id, epoch, claimed.writer_epoch, "before publishing")
        appender = WalAppender(store, manifests, epoch, claimed)
        earlier = _earlier_write(store, log, claimed, find_tip(store, shard.shard_id, claimed))
        if earlier is not None:
            if earlier.run_id is not None:
                with _rows_are_written():
                    appender.append_pointer(confirmation_tags(earlier.run_id))
            return ShardWrite(shard.shard_id, rows, True)
        position = appender.append_pointer(pointer.tags())
        adoption.check_present(store, position)
        manifests.commit_update(epoch, lambda manifest: _listing(manifest, entries, position))
        with _rows_are_written():
            appender.append_pointer(confirmation_tags(run.run_id))
        return ShardWrite(shard.shard_id, rows, False, position)

    return _retrying_lost_claims(once)


def _listing(manifest: ShardManifest, entries: Sequence[SsTableEntry], position: int) -> ShardManifest:
    """``manifest`` with the SSTables as its newest generations; the pointer's ``position`` is covered."""
    if is_flushed(manifest, position):
        # Under one epoch only this commit moves the cursor there, so it has happened already.
        return manifest
    first = manifest.current_generation
    listed = tuple(replace(entry, generation=first + place) for place, entry in enumerate(entries))
    return replace(
        manifest,
        sstables=(*manifest.sstables, *listed),
        current_generation=first + len(listed),
        replay_after_wal_entry_position=position,
        wal_entry_position_last_seen=max(manifest.wal_entry_position_last_seen, position),
    )


def _retrying_lost_claims(attempt: Callable[[], ShardWrite]) -> ShardWrite:
    """Retry until no other claim comes in between, and count the claims that did.

    The loser may be the live run, or a stalled earlier one. Either finds out what is written after
    its next claim, so a retry is right for both. The pauses let one of them through.
    """
    for number in range(1, _CLAIM_ATTEMPTS + 1):
        try:
            return replace(attempt(), conflicts=number - 1)
        except FencedError as error:
            if number == _CLAIM_ATTEMPTS:
                raise
            logger.info("taken over while writing, attempt %d: %s", number, error)
            time.sleep(random.uniform(0, min(0.05 * 2**number, _LONGEST_PAUSE_SECONDS)))
        except StorageError as error:
            if number == 1:
                raise
            # An earlier attempt may have written before it was fenced.
            raise OutcomeUnknownError(f"an earlier attempt may have taken effect: {error}") from error
    raise AssertionError("unreachable: the last attempt returns or raises")
