"""How costs grow with columns, base rows, threads and base versions; more of ``make bench ARGS=growth``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from uuid import UUID, uuid4

import lance
import numpy as np
import pyarrow as pa

import lancewal
from bench.context import Context, by_threads
from bench.distant import distant_store
from bench.growth import FLAT, ONCE, Measure, Steps, growth
from bench.growth_tables import (
    QUIET,
    ROOMY,
    add_sstables,
    copied,
    forget,
    local_store,
    new_table,
    only_shard,
    plain_rows,
    reader_of,
)
from bench.tables import KEY, expect, peer_writer, upsert, vector_batches, vector_schema
from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.maintenance import compact
from lancewal.reader import TableReader, TableView
from lancewal.writer import ShardWriter, open_shard_writer


@growth(
    "growth_columns",
    "a table of 1,000 rows by columns of doubles, 20 to 2,000",
    axis="columns",
    sizes=(20, 60, 200, 600, 2_000),
    quick=(5, 20, 60),
    peer="Lance on the same table",
)
def columns(context: Context, sizes: Sequence[int]) -> Steps:
    return ((size, _with_columns(context, size)) for size in sizes)


def _with_columns(context: Context, size: int) -> list[Measure]:
    names = ["id", *(f"column{number}" for number in range(1, size))]
    fields = [pa.field("id", pa.int64(), nullable=False, metadata=KEY)]
    schema = pa.schema([*fields, *(pa.field(name, pa.float64()) for name in names[1:])])
    ids = np.arange(1000)
    values = pa.array(ids * 1.5)
    rows = pa.table([pa.array(ids), *([values] * (size - 1))], schema=schema)
    base = new_table(context.directory(f"columns_{size}") / "table", rows, indexed=["id"])
    dataset, reader = lance.dataset(base.uri), reader_of(base)
    batch = rows.slice(0, 20)
    writer = open_shard_writer(base, only_shard(base), ShardWriterConfig(**ROOMY), indexes=())
    theirs = peer_writer(lance.dataset(base.uri))
    return [
        Measure(
            "lookup in the base",
            lambda: expect(reader.lookup([500]).table.num_rows, 1),
            lambda: expect(dataset.to_table(filter="id = 500").num_rows, 1),
        ),
        Measure(
            "scan",
            lambda: expect(reader.scan().to_table().num_rows, 1000),
            lambda: expect(dataset.to_table().num_rows, 1000),
        ),
        Measure("put of 20 rows", lambda: writer.put(batch), lambda: theirs.put(batch)),
        Measure("flush of 20 rows", lambda: _flush(writer), before=lambda: writer.put(batch)),
    ]


def _flush(writer: ShardWriter) -> None:
    writer.force_seal_active()
    writer.wait_for_flush_drain()


@growth(
    "growth_base",
    "a base with a BTree on its key by rows, 10,000 to 10 M",
    axis="base rows",
    sizes=(10_000, 100_000, 1_000_000, 10_000_000),
    quick=(1_000, 3_000, 10_000),
    peer="Lance on the same table",
)
def base_rows(context: Context, sizes: Sequence[int]) -> Steps:
    return ((size, _with_base_rows(context, size)) for size in sizes)


def _with_base_rows(context: Context, size: int) -> list[Measure]:
    base = new_table(context.directory(f"base_{size}") / "table", plain_rows(np.arange(size)), indexed=["id"])
    store, reader, shard = local_store(base), reader_of(base), only_shard(base)
    dataset = lance.dataset(base.uri)
    peer = copied(base, context.directory(f"peer_{size}") / "table")
    keys = iter(np.random.default_rng(size).permutation(size).reshape(-1, 100))

    def waiting(delete: bool) -> None:
        some = plain_rows(next(keys))
        config = ShardWriterConfig(**QUIET)
        with open_shard_writer(base, shard, config, indexes=()) as writer:
            writer.delete(some.select(["id"])) if delete else writer.put(some)

    return [
        Measure(
            "lookup, warm",
            lambda: reader.lookup([size // 2]),
            lambda: dataset.to_table(filter=f"id = {size // 2}"),
            bound=FLAT,
        ),
        Measure(
            "lookup, cold",
            lambda: reader_of(base).lookup([size // 2]),
            lambda: lance.dataset(base.uri).to_table(filter=f"id = {size // 2}"),
            before=partial(forget, base, [shard]),
            bound=FLAT,
        ),
        Measure(
            "count, warm",
            lambda: expect(reader.scan().count_rows(), size),
            lambda: dataset.count_rows(),
            bound=FLAT,
        ),
        Measure(
            "compaction of 100 updates",
            lambda: compact(store),
            lambda: upsert(peer, plain_rows(next(keys))),
            before=partial(waiting, False),
            before_peer=lambda: None,
            bound=FLAT,
            samples=2,
        ),
        Measure(
            "compaction of 100 deletes",
            lambda: compact(store),
            lambda: peer.delete(f"id IN ({', '.join(map(str, next(keys).tolist()))})"),
            before=partial(waiting, True),
            before_peer=lambda: None,
            bound=FLAT,
            samples=2,
        ),
        Measure("lookup after the compactions", lambda: reader.lookup([size // 2]), bound=FLAT),
        Measure("count after the compactions", lambda: reader.scan().count_rows(), bound=FLAT),
    ]


@growth(
    "growth_threads",
    "2,048 durable puts of 20 rows × 8-d by threads, 1 to 256",
    axis="threads",
    sizes=(1, 4, 16, 64, 256),
    quick=(1, 4, 16),
    peer="Lance's writer",
)
def threads(context: Context, sizes: Sequence[int]) -> Steps:
    (batch,) = vector_batches(1, 20, 8)
    puts = context.size(full=2048, quick=64)
    base = new_table(context.directory("threads") / "table", vector_schema(8).empty_table())
    return ((size, _with_threads(base, batch, size, puts)) for size in sizes)


def _with_threads(base: BaseTable, batch: pa.RecordBatch, size: int, puts: int) -> list[Measure]:
    writer = open_shard_writer(base, uuid4(), ShardWriterConfig(**ROOMY), spec_id=0, indexes=())
    theirs = peer_writer(lance.dataset(base.uri))

    def entries_written() -> int:
        before = writer.stats().wal_flush_count
        by_threads(size, puts // size, lambda _: writer.put(batch))
        return writer.stats().wal_flush_count - before

    return [
        Measure(
            f"{puts:,} puts",
            lambda: by_threads(size, puts // size, lambda _: writer.put(batch)),
            lambda: by_threads(size, puts // size, lambda _: theirs.put(batch)),
            before=lambda: None,
            before_peer=lambda: None,
            bound=FLAT,
        ),
        Measure("WAL entries", entries_written, unit="entries", bound=FLAT),
    ]


@growth(
    "growth_versions",
    "an SSTable that is so many base versions old, 10 to 3,000",
    axis="base versions",
    sizes=(10, 100, 1_000, 3_000),
    quick=(3, 10, 30),
    peer="Lance: open and count",
)
def versions(context: Context, sizes: Sequence[int]) -> Steps:
    base = new_table(context.directory("versions") / "table", plain_rows(np.arange(1000)))
    shard = only_shard(base)
    add_sstables(base, shard, [plain_rows(np.arange(100))])
    dataset = lance.dataset(base.uri)
    made = 0
    for size in sizes:
        reader = reader_of(base)
        forget(base, [shard])
        reader.lookup([5])
        for number in range(made, size):
            dataset.update_config({"made": str(number)})
        made = size
        yield size, _with_versions(base, shard, reader)


def _with_versions(base: BaseTable, shard: UUID, reader: TableView) -> list[Measure]:
    cold = partial(forget, base, [shard])
    return [
        Measure(
            "next read of a reader",
            lambda: expect(reader.scan().count_rows(), 1000),
            before=lambda: None,
            bound=FLAT,
            samples=ONCE,
        ),
        Measure(
            "first read",
            lambda: expect(reader_of(base).scan().count_rows(), 1000),
            lambda: lance.dataset(base.uri).count_rows(),
            before=cold,
            bound=FLAT,
        ),
        Measure("open", lambda: lancewal.open(base.uri), before=cold, bound=FLAT),
        Measure(
            "requests of the first read",
            partial(_requests_of_first_read, base),
            before=cold,
            unit="requests",
            bound=FLAT,
        ),
    ]


def _requests_of_first_read(base: BaseTable) -> int:
    store, backend = distant_store(base.uri)
    TableReader(store).scan().count_rows()
    return backend.requests.total()
