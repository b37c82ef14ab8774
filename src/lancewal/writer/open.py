"""Opening a shard writer: claim, fence, replay."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from uuid import UUID

from lancewal import layout
from lancewal.base import BaseTable
from lancewal.clock import Clock, boot_time
from lancewal.errors import InvalidInputError
from lancewal.format.align import align
from lancewal.format.keys import check_key_types
from lancewal.format.shard_manifest import SsTableEntry
from lancewal.index.specs import IndexSpec, maintained_specs
from lancewal.index.store import IndexStore
from lancewal.lineage import check_entries, copied_marker, held_generation, lift
from lancewal.manifest import ShardManifestStore
from lancewal.memtable import MemTable
from lancewal.objects import ObjectStore
from lancewal.sstable import write_sstable
from lancewal.wal.appender import WalAppender
from lancewal.wal.replay import Replay
from lancewal.wal.tailer import WalTailer
from lancewal.writer.adapter import Adapter, columns_to_keep
from lancewal.writer.commit_log import CommitLog
from lancewal.writer.config import ShardWriterConfig
from lancewal.writer.intake import Intake
from lancewal.writer.memtable_mode import MemTableMode
from lancewal.writer.registry import count_writer, register_writer
from lancewal.writer.shard_writer import ShardWriter, WriteMode
from lancewal.writer.state import WriterState
from lancewal.writer.stats import WriteStats
from lancewal.writer.wal_only_mode import WalOnlyMode

logger = logging.getLogger(__name__)

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
    cast: bool = False,
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
    store = store or ObjectStore.from_uri(base.uri, base.storage_options, fsync=config.fsync)
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
        Intake(base.schema, cast=cast, storage_version=base.storage_version),
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
        update_cursor=False,
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
            check_entries(base, store, [entry])
        mode.replay(entry, [align(batch, base.schema, entry.base_version) for batch in entry.batches])
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
