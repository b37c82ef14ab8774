"""Opening a shard writer: claim, fence, replay."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.errors import InvalidInputError
from lancewal.format import SsTableEntry, check_key_types, refuse_blob_values
from lancewal.index import IndexSpec, IndexStore, maintained_specs
from lancewal.memtable import MemTable
from lancewal.shard import Replay, ShardManifestStore, WalAppender, WalTailer
from lancewal.sstable import check_rows_in_log, copied_marker, held_generation, lift, write_sstable
from lancewal.storage import Clock, ObjectStore, boot_time, in_forked_child, layout
from lancewal.writer.group_commit import CommitLog
from lancewal.writer.intake import Adapter, Cast, Intake, columns_to_keep
from lancewal.writer.modes import MemTableMode, WalOnlyMode
from lancewal.writer.shard_writer import ShardWriter, WriteMode
from lancewal.writer.state import WriterState
from lancewal.writer.stats import WriteStats, WriteStatsSnapshot, added

logger = logging.getLogger(__name__)

# The shard writers of this process: readers here see live rows, and metrics what was written.


_lock = threading.Lock()
_writers: weakref.WeakValueDictionary[tuple[str, UUID], ShardWriter] = weakref.WeakValueDictionary()

#: Writers that are gone keep their statistics until so many of them are added up.
_FOLD_AFTER = 64


@dataclass(frozen=True)
class _Opened:
    key: tuple[str, UUID]
    writer: weakref.ref[ShardWriter]
    stats: WriteStats


_opened: list[_Opened] = []
_of_the_gone: dict[tuple[str, UUID], WriteStatsSnapshot] = {}


def _start_empty() -> None:
    """A forked child has no writers; another thread may have held the lock when it was forked."""
    global _lock, _writers
    _lock = threading.Lock()
    _writers = weakref.WeakValueDictionary()
    _opened.clear()
    _of_the_gone.clear()


in_forked_child(_start_empty)


def register_writer(table_uri: str, writer: ShardWriter) -> None:
    """Make ``writer`` the live one of its shard; a newer claim replaces an older one."""
    with _lock:
        key = (_normal(table_uri), writer.shard_id)
        present = _writers.get(key)
        if present is None or present.epoch < writer.epoch:
            _writers[key] = writer


def count_writer(table_uri: str, writer: ShardWriter) -> None:
    """Have :func:`written` count this writer, of either mode, also when it is gone."""
    with _lock:
        _opened.append(
            _Opened((_normal(table_uri), writer.shard_id), weakref.ref(writer), writer.stats_handle)
        )
        if len(_opened) > _FOLD_AFTER:
            _fold()


def written() -> dict[tuple[str, UUID], WriteStatsSnapshot]:
    """By table and shard what all writers of this process did since it began; it only grows."""
    with _lock:
        _fold()
        total = dict(_of_the_gone)
        live = list(_opened)
    for each in live:
        total[each.key] = added(total.get(each.key), each.stats.snapshot())
    return total


def open_writers() -> dict[tuple[str, UUID], ShardWriter]:
    """By table and shard the writers that are open here, the newest of each shard."""
    with _lock:
        found = [(each.key, each.writer()) for each in _opened]
    return {key: writer for key, writer in found if writer is not None and not writer.closed}


def _fold() -> None:
    """Add up the statistics of writers that are gone. Requires the lock."""
    left = []
    for each in _opened:
        if each.writer() is None:
            _of_the_gone[each.key] = added(_of_the_gone.get(each.key), each.stats.snapshot())
        else:
            left.append(each)
    _opened[:] = left


def live_writer(table_uri: str, shard_id: UUID) -> ShardWriter | None:
    """The open MemTable-mode writer of a shard in this process, if there is one that can be read."""
    with _lock:
        writer = _writers.get((_normal(table_uri), shard_id))
    if writer is None or not writer.readable:
        return None
    return writer


def _normal(table_uri: str) -> str:
    return table_uri.rstrip("/")


#: Entries fetched ahead of the one being replayed, on a remote store.
REPLAY_READ_AHEAD = 16


def open_shard_writer(
    base: BaseTable,
    shard_id: UUID | str,
    config: ShardWriterConfig | None = None,
    *,
    store: ObjectStore | None = None,
    spec_id: int | None = None,
    indexes: Sequence[IndexSpec] | None = None,
    cast: Cast = False,
    clock: Clock = boot_time,
) -> ShardWriter:
    """Claim the shard, fence whoever held it, and load what is in the WAL but in no SSTable.

    ``config`` defaults to the table's stored writer defaults. ``spec_id`` defaults to what
    the shard's manifest says (0 for a new shard). ``indexes`` defaults to the table's
    maintained indexes; WAL-only mode has none and refuses any that are named.
    Everything that can be refused is refused before the claim.
    """
    shard = layout.parse_shard_id(shard_id)
    config = config or ShardWriterConfig.from_defaults(base.details.writer_config_defaults)
    check_key_types(base.schema)
    if base.schema.blob_columns:
        # Their writers refuse rows, so this one only moves what is in the log, which has none of them.
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
    if indexes is None and config.enable_memtable:
        indexes = maintained_specs(
            base.dataset,
            base.details.maintained_indexes,
            base.details.maintain_all_indexes,
            base.details.writer_config_defaults,
            strict=False,
        )
    IndexStore(indexes or (), base.schema)  # refuses what cannot be maintained
    store = store or base.writer_store(fsync=config.fsync)
    if spec_id is None:
        known = ShardManifestStore(store, shard, config.manifest_scan_batch_size).read_latest()
        spec_id = known.shard_spec_id if known else 0

    appender = WalAppender.open(
        store,
        shard,
        spec_id,
        manifest_scan_batch_size=config.manifest_scan_batch_size,
        clock=clock,
        check=lambda manifest: held_generation(base, store, manifest),
    )
    appender.keep_metadata = True
    appender.base_version = base.version
    state = WriterState(shard, appender.epoch)
    stats = WriteStats()
    log = CommitLog(
        appender,
        stats,
        config.max_wal_buffer_size,
        on_failure=lambda error: state.fail(error, memory_ahead_of_log=True),
    )
    mode: WriteMode
    adapter: Adapter | None = None
    if config.enable_memtable:
        replay = _replay_of(config, store, appender)
        kept = columns_to_keep(base, store) if len(replay.range) else base
        if kept is not base:
            adapter = Adapter(kept.schema, base.version)
            indexes = adapter.indexes(indexes or ())
            appender.base_version = kept.version
        mode = _open_memtable_mode(kept, config, store, appender, log, state, stats, indexes or (), replay)
    else:
        mode = WalOnlyMode(config, log, state, stats)
    writer = ShardWriter(
        config,
        intake,
        appender,
        log,
        mode,
        state,
        stats,
        adapter,
    )
    if config.enable_memtable:
        register_writer(base.uri, writer)
    count_writer(base.uri, writer)
    logger.info("opened writer", extra=state.context)
    return writer


def _open_memtable_mode(
    base: BaseTable,
    config: ShardWriterConfig,
    store: ObjectStore,
    appender: WalAppender,
    log: CommitLog,
    state: WriterState,
    stats: WriteStats,
    indexes: Sequence[IndexSpec],
    replay: Replay,
) -> MemTableMode:
    def make_memtable(generation: int, first_position: int) -> MemTable:
        return MemTable(
            state.shard_id,
            base.schema,
            generation,
            IndexStore(indexes, base.schema),
            first_position,
            index_on_insert=config.sync_indexed_write,
        )

    def flush(memtable: MemTable) -> SsTableEntry:
        return write_sstable(
            store=store,
            shard_id=state.shard_id,
            generation=memtable.generation,
            schema=base.schema,
            batches=memtable.batches,
            storage_version=base.storage_version,
            indexes=indexes,
            in_memory_bytes=memtable.row_bytes,
        )

    claimed = appender.claimed
    mode = MemTableMode(
        config,
        appender.manifests,
        log,
        state,
        stats,
        make_memtable=make_memtable,
        write_sstable=flush,
        generation=claimed.current_generation if claimed else layout.FIRST_GENERATION,
    )
    try:
        _run_replay(base, store, replay, appender, mode, stats)
        marker = 0 if claimed is None else copied_marker(base, store, claimed)
        if marker:
            mode.renumber(lambda: lift(appender.manifests, state.epoch, marker).current_generation)
    except BaseException:
        state.close()
        mode.stop()
        raise
    return mode


def _replay_of(config: ShardWriterConfig, store: ObjectStore, appender: WalAppender) -> Replay:
    tailer = WalTailer(
        store,
        appender.shard_id,
        read_ahead=REPLAY_READ_AHEAD,
        manifest_scan_batch_size=config.manifest_scan_batch_size,
    )
    return Replay(appender, tailer)


def _run_replay(
    base: BaseTable,
    store: ObjectStore,
    replay: Replay,
    appender: WalAppender,
    mode: MemTableMode,
    stats: WriteStats,
) -> None:
    """Load the settled range of the WAL; memory stays within the backpressure limit."""
    started = time.perf_counter()
    appender.seed_next_position(replay.next_position)
    entries = rows = 0
    for entry in replay.entries():
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
    stats.record_replay(time.perf_counter() - started, entries, rows)
    if entries:
        logger.info(
            "replayed %d entries with %d rows in %.3f s",
            entries,
            rows,
            time.perf_counter() - started,
            extra={"shard": str(appender.shard_id), "epoch": appender.epoch, "position": replay.range.end},
        )
