"""Flushing the rows of one shard, whoever put them there."""

from __future__ import annotations

import dataclasses

from lancewal.base import BaseTable
from lancewal.format.shard_manifest import ShardManifest
from lancewal.lineage import copied_marker
from lancewal.objects import ObjectStore
from lancewal.wal.tailer import WalTailer
from lancewal.wal.tip import first_unsettled
from lancewal.writer.config import ShardWriterConfig
from lancewal.writer.open import open_shard_writer
from lancewal.writer.registry import live_writer


def drain_shard(base: BaseTable, manifest: ShardManifest, store: ObjectStore) -> None:
    """Move the shard's rows from MemTables and WAL to SSTables; ``manifest`` is its newest.

    Goes through the shard's writer in this process where there is one that still holds the
    shard. Otherwise, where the WAL has rows, or a copied table's markers are in the way of its
    generations, the shard is claimed for the time of the flush: **a
    writer that another process has on it is fenced**, and so is one in WAL-only mode.
    """
    writer = live_writer(base.uri, manifest.shard_id)
    if writer is not None and writer.epoch >= manifest.writer_epoch:
        writer.force_seal_active()
        writer.wait_for_flush_drain()
    elif has_unflushed_rows(manifest, store) or copied_marker(base, store, manifest):
        open_shard_writer(base, manifest.shard_id, drain_config(base), store=store).close()


def drain_config(base: BaseTable) -> ShardWriterConfig:
    """The table's stored settings, but with MemTables: its own writers may be WAL-only."""
    stored = ShardWriterConfig.from_defaults(base.details.writer_config_defaults)
    return dataclasses.replace(
        stored,
        enable_memtable=True,
        max_memtable_size=min(stored.max_memtable_size, stored.max_unflushed_memtable_bytes),
    )


def has_unflushed_rows(manifest: ShardManifest, store: ObjectStore) -> bool:
    """Whether the WAL has an entry with rows that no SSTable of the manifest holds."""
    tailer = WalTailer(store, manifest.shard_id, update_cursor=False)
    position = first_unsettled(manifest)
    while (header := tailer.read_header(position)) is not None:
        flushed = header.generation is not None and header.generation < manifest.current_generation
        if not header.sentinel and not flushed:
            return True
        position += 1
    return False
