"""Flushing the rows of one shard, whoever put them there."""

from __future__ import annotations

import dataclasses

from lancewal.base import BaseTable
from lancewal.format.shard_manifest import ShardManifest
from lancewal.lineage import copied_marker
from lancewal.objects import ObjectStore
from lancewal.wal.tailer import has_unflushed_rows
from lancewal.writer.config import ShardWriterConfig
from lancewal.writer.open import open_shard_writer
from lancewal.writer.registry import live_writer


def drain_shard(
    base: BaseTable, manifest: ShardManifest, store: ObjectStore, config: ShardWriterConfig
) -> None:
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
        open_shard_writer(base, manifest.shard_id, config, store=store).finish()


def drain_config(config: ShardWriterConfig) -> ShardWriterConfig:
    """``config``, but with MemTables: the table's own writers may be WAL-only."""
    if config.enable_memtable:
        return config
    size = min(config.max_memtable_size, config.max_unflushed_memtable_bytes)
    return dataclasses.replace(config, enable_memtable=True, max_memtable_size=size)
