"""Opening a shard writer (claim, fence, replay), and the writers that are open in this process."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.errors import InvalidInputError
from lancewal.format import (
    PUT_IDS_TAG,
    EntryHeader,
    ShardManifest,
    WalEntry,
    check_key_types,
    refuse_blob_values,
)
from lancewal.index import IndexSpec, IndexStore, maintained_specs
from lancewal.shard import Replay, ShardManifestStore, WalAppender, WalTailer, may_follow
from lancewal.sstable import check_rows_in_log, copied_marker, held_generation, lift
from lancewal.storage import Clock, ObjectStore, boot_time, both, in_forked_child, layout, ordered_map, span
from lancewal.writer.group_commit import CommitLog
from lancewal.writer.intake import Adapter, Cast, Intake
from lancewal.writer.modes import MemTableMode, WalOnlyMode, WriteMode
from lancewal.writer.put_ids import RETRY_WINDOW, PutIds
from lancewal.writer.shard_writer import ShardWriter
from lancewal.writer.state import WriterState, WriteStats, WriteStatsSnapshot, added

logger = logging.getLogger(__name__)

#: Entries fetched ahead of the one being replayed, on a remote store.
REPLAY_READ_AHEAD = 96
#: How many flushed entries the first step of the search for earlier put ids reads.
_LOOK_BACK_AT_FIRST = 8
#: Above this many records, the statistics of writers that are gone are added up.
_FOLD_AFTER = 64

_Key = tuple[str, UUID]


class WriterRegistry:
    """The shard writers of this process, by table and shard. It keeps no writer alive.

    Readers of this process get live rows from it, and metrics get write statistics.
    """

    def __init__(self) -> None:
        self.start_empty()

    def start_empty(self) -> None:
        """Reset the registry. Also called in a forked child, which has no writers.

        The child needs a new lock, because a thread of the parent may have held the old one.
        """
        self._lock = threading.Lock()
        self._live: weakref.WeakValueDictionary[_Key, ShardWriter] = weakref.WeakValueDictionary()
        self._opened: list[tuple[_Key, weakref.ref[ShardWriter], WriteStats]] = []
        self._stats_of_gone: dict[_Key, WriteStatsSnapshot] = {}

    def add(self, table_uri: str, writer: ShardWriter, stats: WriteStats) -> None:
        """Make ``writer`` the live writer of its shard unless another has a newer epoch; keep ``stats``."""
        key = (table_uri.rstrip("/"), writer.shard_id)
        with self._lock:
            present = self._live.get(key)
            if writer.config.enable_memtable and (present is None or present.epoch < writer.epoch):
                self._live[key] = writer
            self._opened.append((key, weakref.ref(writer), stats))
            if len(self._opened) > _FOLD_AFTER:
                self._fold()

    def live_writer(self, table_uri: str, shard_id: UUID) -> ShardWriter | None:
        """The open MemTable-mode writer of a shard in this process, if there is a readable one."""
        with self._lock:
            writer = self._live.get((table_uri.rstrip("/"), shard_id))
        return writer if writer is not None and writer.readable else None

    def open_writers(self) -> dict[tuple[str, UUID], ShardWriter]:
        """The open writers of this process by table and shard, the newest of each shard."""
        with self._lock:
            found = [(key, writer()) for key, writer, _ in self._opened]
        return {key: writer for key, writer in found if writer is not None and not writer.closed}

    def written(self) -> dict[tuple[str, UUID], WriteStatsSnapshot]:
        """The statistics of all writers since this process began, by table and shard; they only grow."""
        with self._lock:
            self._fold()
            total = dict(self._stats_of_gone)
            opened = list(self._opened)
        for key, _, stats in opened:
            total[key] = added(total.get(key), stats.snapshot())
        return total

    def _fold(self) -> None:
        """Add up the statistics of writers that are gone. Requires the lock."""
        left = []
        for key, writer, stats in self._opened:
            if writer() is None:
                self._stats_of_gone[key] = added(self._stats_of_gone.get(key), stats.snapshot())
            else:
                left.append((key, writer, stats))
        self._opened = left


_registry = WriterRegistry()
in_forked_child(_registry.start_empty)
live_writer = _registry.live_writer
open_writers = _registry.open_writers
written = _registry.written


def open_shard_writer(
    base: BaseTable,
    shard_id: UUID | str,
    config: ShardWriterConfig | None = None,
    *,
    store: ObjectStore | None = None,
    spec_id: int | None = None,
    look: Callable[[ShardManifestStore], ShardManifest | None] = ShardManifestStore.read_to_claim,
    claimed: Callable[[int], object] | None = None,
    indexes: Sequence[IndexSpec] | None = None,
    cast: Cast = "numbers",
    clock: Clock = boot_time,
) -> ShardWriter:
    """Claim the shard, fence its previous writer, and load the rows that are in the WAL but in no SSTable.

    ``config`` defaults to the table's stored writer defaults. ``spec_id`` defaults to the value in
    the shard's manifest (0 for a new shard). ``look`` reads that manifest, and may create it.
    ``indexes`` defaults to the table's maintained indexes. WAL-only mode has no indexes and refuses any
    that are named.
    Everything that can be refused is refused before the claim.
    """
    shard = layout.parse_shard_id(shard_id)
    config = config or ShardWriterConfig.from_defaults(base.details.writer_config_defaults)
    check_key_types(base.schema)
    if base.schema.blob_columns:
        # Writers of tables with blob columns refuse rows. So this one only moves rows of the log, which
        # have no blob values.
        base = replace(base, schema=base.schema.without_blobs)
    intake = Intake(
        base.schema,
        cast=cast,
        storage_version=base.storage_version,
        newest=lambda: BaseTable.open(base.uri, base.storage_options, store=store).schema,
    )
    if indexes and not config.enable_memtable:
        raise InvalidInputError(
            "indexes require enable_memtable=True; WAL-only mode keeps no rows that could be indexed"
        )
    store = store or base.writer_store(fsync=config.fsync)

    specs: Sequence[IndexSpec] = ()

    def look_at_all(manifests: ShardManifestStore) -> ShardManifest | None:
        nonlocal specs
        found, specs = both(
            lambda: look(manifests), lambda: _specs(base, config, indexes), at_once=not store.is_local
        )
        return found

    appender = WalAppender.open(
        store,
        shard,
        spec_id,
        manifest_scan_batch_size=config.manifest_scan_batch_size,
        clock=clock,
        look=look_at_all,
        check=lambda manifest: held_generation(base, store, manifest),
        claimed=claimed,
        keep_metadata=True,
    )
    replay = Replay(
        appender,
        WalTailer(
            store,
            shard,
            read_ahead=REPLAY_READ_AHEAD,
            manifest_scan_batch_size=config.manifest_scan_batch_size,
        ),
    )
    entries, first, kept = replay.entries(), None, base
    if config.enable_memtable and len(replay.range):
        kept, first = both(
            lambda: _columns_to_keep(base, store), lambda: next(entries, None), at_once=not store.is_local
        )
    adapter: Adapter | None = None
    if kept is not base:
        adapter = Adapter(kept.schema, base.version)
        specs = adapter.indexes(specs)
    state, stats = WriterState(shard, appender.epoch, base.uri), WriteStats()
    log = CommitLog(appender, state, stats, config.max_wal_buffer_size, base_version=kept.version)
    mode: WriteMode
    if config.enable_memtable:
        mode = MemTableMode(config, kept, specs, store, appender, log, state, stats)
        try:
            to_load = chain(() if first is None else (first,), entries)
            with span("lancewal.replay", state.trace) as current:
                number, rows = _run_replay(kept, store, replay, to_load, appender, mode, stats)
                current.note(entries=number, rows=rows)
        except BaseException:
            state.close()
            mode.stop()
            raise
    else:
        mode = WalOnlyMode(log, state)
    put_ids = PutIds(partial(_earlier_put_ids, store, appender, replay, read=config.enable_memtable))
    for tag in replay.put_ids:
        put_ids.note(tag)
    writer = ShardWriter(config, intake, appender, log, mode, state, stats, adapter, put_ids)
    _registry.add(base.uri, writer, stats)
    logger.info("opened writer", extra=state.context)
    return writer


def _specs(
    base: BaseTable, config: ShardWriterConfig, given: Sequence[IndexSpec] | None
) -> Sequence[IndexSpec]:
    """The indexes of the MemTables; refuses indexes that cannot be maintained."""
    if given is None and config.enable_memtable:
        given = maintained_specs(
            base.dataset,
            base.details.maintained_indexes,
            base.details.maintain_all_indexes,
            base.details.writer_config_defaults,
            strict=False,
        )
    IndexStore(given or (), base.schema)
    return given or ()


def _columns_to_keep(base: BaseTable, store: ObjectStore) -> BaseTable:
    """``base``, or the newest version of the table if its columns have changed since ``base``.

    Call it after the claim: an earlier writer of the shard cannot know newer columns than these.
    """
    if base.dataset.latest_version == base.version:
        return base
    newest = BaseTable.open(base.uri, base.storage_options, store=store)
    newest = replace(newest, schema=newest.schema.without_blobs)
    same = newest.schema.columns.equals(base.schema.columns, check_metadata=True)
    return base if same and not newest.schema.replaced_since(base.version) else newest


def _earlier_put_ids(
    store: ObjectStore, appender: WalAppender, replay: Replay, *, read: bool
) -> Iterator[str]:
    """The tags of earlier writers' entries that were not replayed, newest first, back to the retry window.

    ``read`` says whether the replay's own range was read. The search stops at the first entry that is missing
    or cannot belong at its position. Entries below it may come from stalled writers, which wrote into slots
    that garbage collection had emptied. Such entries never counted, so their ids prove nothing.
    """
    claim = appender.sentinel_position
    if claim is None:
        return  # no writer came before this one
    tailer = WalTailer(store, appender.shard_id)
    now = store.head(layout.wal_entry(appender.shard_id, claim))
    end, count = replay.range.start if read else claim, _LOOK_BACK_AT_FIRST
    above: EntryHeader | WalEntry | None = tailer.read_header(end)
    while end > layout.FIRST_WAL_POSITION:
        some = range(max(layout.FIRST_WAL_POSITION, end - count), end)
        oldest = store.head(layout.wal_entry(appender.shard_id, some.start))
        for entry in ordered_map(tailer.read_entry, reversed(some), 1 if store.is_local else len(some)):
            if entry is None or above is None or not may_follow(entry, above):
                return
            if PUT_IDS_TAG in entry.tags:
                yield entry.tags[PUT_IDS_TAG]
            above = entry
        if oldest is None or now is None or (now.modified - oldest.modified).total_seconds() > RETRY_WINDOW:
            return
        end, count = some.start, min(2 * count, REPLAY_READ_AHEAD)


def _run_replay(
    base: BaseTable,
    store: ObjectStore,
    replay: Replay,
    to_load: Iterable[WalEntry],
    appender: WalAppender,
    mode: MemTableMode,
    stats: WriteStats,
) -> tuple[int, int]:
    """Load the settled range of the WAL; returns how many entries and rows it had.

    Flushes early, where that is safe, to stay within memory limits.
    """
    started = time.perf_counter()
    appender.seed_next_position(replay.next_position)
    entries = rows = 0
    for entry in to_load:
        if not entries:
            check_rows_in_log(base, store, entry.shard_id, entry.base_version)
        for batch in entry.batches:
            refuse_blob_values(batch)
        mode.replay(entry, entry.rows(base.schema))
        entries += 1
        rows += entry.num_rows
        if mode.replay_needs_room() and replay.may_split_after(entry.position, mode.active_generation):
            mode.flush_replayed()
    mode.finish_replay()
    stats.add(replay_time=time.perf_counter() - started, replayed_entries=entries, replayed_rows=rows)
    if entries:
        logger.info(
            "replayed %d entries with %d rows in %.3f s",
            entries,
            rows,
            time.perf_counter() - started,
            extra={"shard": str(appender.shard_id), "epoch": appender.epoch, "position": replay.range.stop},
        )
    claimed = appender.claimed
    if claimed is not None and (marker := copied_marker(base, store, claimed)):
        # In a copied table, continue above the generations that the original table's markers cover.
        mode.flush_replayed()
        mode.continue_at(lift(appender.manifests, appender.epoch, marker).current_generation)
    return entries, rows
