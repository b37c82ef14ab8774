"""Small tables and rows that tests of several rooms share."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import pyarrow as pa
import pyarrow.parquet as pq

import lancewal
from lancewal.base.table import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.storage import ObjectStore
from lancewal.writer import ShardWriter, open_shard_writer

KEY = {"lance-schema:unenforced-primary-key": "true"}

#: What a table keeps for its writers in tests, as it is stored.
FAST_DEFAULTS = {"fsync": "false", "stats_log_interval_ms": "0"}

KEYED = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=KEY), pa.field("name", pa.string())])
APPEND_ONLY = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])


def rows(start: int, count: int, *, schema: pa.Schema = KEYED, prefix: str = "name") -> pa.RecordBatch:
    """``count`` rows with ids from ``start``."""
    ids = range(start, start + count)
    return pa.record_batch(
        [pa.array(ids, pa.int64()), pa.array([f"{prefix}_{i}" for i in ids])], schema=schema
    )


def new_table(
    where: Path | str,
    schema: pa.Schema = KEYED,
    data: pa.Table | None = None,
    storage_options: dict[str, str] | None = None,
    **mem_wal: Any,
) -> BaseTable:
    """A Lance table with a MemWAL index, without any row unless ``data`` has some."""
    data = schema.empty_table() if data is None else data
    dataset = lance.write_dataset(data, str(where), schema=schema, storage_options=storage_options)
    dataset.initialize_mem_wal(**(mem_wal or {"unsharded": True}))
    return BaseTable.open(str(where), storage_options)


def wal_table(
    where: Path | str, schema: pa.Schema = KEYED, data: pa.Table | None = None, **how: Any
) -> lancewal.Table:
    """A table as users make one; ``how`` is for ``initialize``, without any it has one shard."""
    lance.write_dataset(schema.empty_table() if data is None else data, str(where), schema=schema)
    if not how.keys() & {"bucket", "identity", "unsharded", "by_hand"}:
        how["unsharded"] = True
    return lancewal.initialize(str(where), **{"writer_defaults": fast(), **how})


def writable_table(
    where: Path | str, schema: pa.Schema = KEYED, data: pa.Table | None = None, **how: Any
) -> lancewal.Table:
    """Like :func:`wal_table`, but in two buckets of ``id`` where ``how`` says nothing."""
    if not how.keys() & {"bucket", "identity", "unsharded", "by_hand"}:
        how["bucket"] = ("id", 2)
    return wal_table(where, schema, data, **{"writer_defaults": FAST_DEFAULTS, **how})


def write_parquet(path: Path, start: int, count: int) -> Path:
    """A file of :func:`rows`, in several row groups."""
    data = pa.Table.from_batches([rows(start, count, schema=APPEND_ONLY)])
    pq.write_table(data, path, row_group_size=max(4, count // 8))
    return path


def fast(**settings: Any) -> ShardWriterConfig:
    """A configuration for tests: no fsync, no periodic statistics."""
    return ShardWriterConfig(**{"fsync": False, "stats_log_interval": None, **settings})


def open_writer(
    base: BaseTable,
    shard_id: UUID | None = None,
    *,
    store: ObjectStore | None = None,
    indexes: Sequence[Any] = (),
    **settings: Any,
) -> ShardWriter:
    config = fast(**settings)
    return open_shard_writer(
        base,
        shard_id or uuid.uuid4(),
        config,
        store=store,
        indexes=indexes if config.enable_memtable else None,
    )


def ids(table: pa.Table | pa.RecordBatch) -> list[int]:
    """The ids of a result, sorted."""
    return sorted(table.column("id").to_pylist())


def abandon(writer: ShardWriter) -> None:
    """Drop a writer as a crash would: threads end, nothing is flushed."""
    writer._finalizer()
