"""How costs grow with SSTables, shards and WAL entries.

``make bench ARGS=growth`` runs all of them, ``ARGS=growth_shards`` one. Beside ours runs what plain Lance
does with the same files, where there is such a thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
from lance.mem_wal import LsmPointLookupPlanner, ShardSnapshot

from bench.comparison import Comparison
from bench.context import Context
from bench.growth import FLAT, ONCE, Measure, Steps, growth
from bench.growth_tables import (
    PLAIN,
    QUIET,
    ROOMY,
    SEARCHED,
    VECTOR,
    WORDS,
    abandon,
    add_entries,
    add_sstables,
    copied,
    forget,
    local_store,
    new_table,
    only_shard,
    plain_rows,
    query_vector,
    query_words,
    reader_of,
    resident_growth,
    searched_rows,
    sstable_uris,
    stored_batch,
)
from bench.tables import expect, upsert
from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.maintenance import collect_garbage, compact
from lancewal.reader import TableReader
from lancewal.shard import ShardManifestStore, ShardRouter
from lancewal.status import table_status
from lancewal.table import Table
from lancewal.writer import open_shard_writer

K = 10


def _at_64(curves: Sequence[Comparison]) -> list[Comparison]:
    """The warm reads of 64 SSTables beside the plain read of their files."""
    found = []
    for curve in curves:
        if curve.name in ("scan, warm", "count, warm"):
            for point in curve.points:
                if point.size == 64 and point.peer:
                    name = f"{curve.name}, 64 SSTables"
                    found.append(
                        Comparison(
                            name, point.ours, point.peer, "ms of CPU", False, "plain read by Lance", 3.0
                        )
                    )
    return found


@growth(
    "growth_sstables",
    "reads by SSTables whose rows replace each other's, 1 to 256",
    axis="SSTables",
    sizes=(1, 4, 16, 64, 256),
    quick=(1, 2, 4),
    peer="plain read of the same files",
    goals=_at_64,
)
def sstables(context: Context, sizes: Sequence[int]) -> Steps:
    """Half of the keys of each SSTable are new, half replace older ones, however many there are."""
    rows_each, searched_each = context.size(full=20_000, quick=200), context.size(full=500, quick=50)
    base = new_table(context.directory("plain") / "table", PLAIN.empty_table())
    searched = new_table(
        context.directory("searched") / "table", SEARCHED.empty_table(), indexed=[WORDS, VECTOR]
    )
    shard, shard_searched = only_shard(base), only_shard(searched)
    made = 0
    for size in sizes:
        numbers = range(made, size)
        add_sstables(base, shard, (plain_rows(_half_new(n, rows_each)) for n in numbers))
        add_sstables(
            searched,
            shard_searched,
            (searched_rows(_half_new(n, searched_each), n) for n in numbers),
        )
        made = size
        yield size, [*_reads(base, shard, rows_each), *_searches(searched, shard_searched)]


def _half_new(number: int, rows: int) -> Any:
    new = np.arange(number * rows // 2, (number * rows // 2) + rows // 2)
    if number == 0:
        return new
    random = np.random.default_rng(number)
    return np.concatenate([new, random.choice(number * rows // 2, min(rows // 2, new[0]), replace=False)])


def _reads(base: BaseTable, shard: UUID, rows_each: int) -> list[Measure]:
    uris = sstable_uris(base, shard)
    opened = [lance.dataset(uri) for uri in uris]
    live = len(uris) * rows_each // 2
    reader = reader_of(base)
    key = live // 3
    columns = PLAIN.names
    cold = partial(forget, base, [shard])
    return [
        Measure(
            "scan, warm",
            lambda: expect(reader.scan().to_table().num_rows, live),
            lambda: pa.concat_tables([each.to_table(columns=columns) for each in opened]),
        ),
        Measure(
            "scan, cold",
            lambda: expect(reader_of(base).scan().to_table().num_rows, live),
            lambda: pa.concat_tables([lance.dataset(uri).to_table(columns=columns) for uri in uris]),
            before=cold,
            samples=2,
        ),
        Measure(
            "count, warm",
            lambda: expect(reader.scan().count_rows(), live),
            lambda: pa.concat_tables([each.to_table(columns=["id"]) for each in opened]),
        ),
        Measure(
            "lookup, warm",
            lambda: expect(reader.lookup([key]).table.num_rows, 1),
            partial(_planned_lookup, _planner(base, shard), key),
        ),
        Measure(
            "lookup, cold",
            lambda: expect(reader_of(base).lookup([key]).table.num_rows, 1),
            before=cold,
            samples=2,
        ),
    ]


def _planner(base: BaseTable, shard: UUID) -> LsmPointLookupPlanner:
    manifest = ShardManifestStore(local_store(base), shard).require_latest()
    snapshot = ShardSnapshot(str(shard)).with_current_generation(manifest.current_generation)
    for entry in manifest.sstables:
        snapshot = snapshot.with_sstable(entry.generation, entry.path)
    return LsmPointLookupPlanner(lance.dataset(base.uri), [snapshot], ["id"])


def _planned_lookup(planner: LsmPointLookupPlanner, key: int) -> pa.Table:
    return planner.plan_lookup(pa.array([key])).to_table()


def _searches(base: BaseTable, shard: UUID) -> list[Measure]:
    uris = sstable_uris(base, shard)
    opened = [lance.dataset(uri) for uri in uris]
    reader = reader_of(base)
    vector, words = query_vector(), query_words()
    near = {"column": VECTOR, "q": vector, "k": K}
    cold = partial(forget, base, [shard])

    def by_vector(datasets: Sequence[lance.LanceDataset]) -> pa.Table:
        found = [each.to_table(columns=["id", "_distance"], nearest=near) for each in datasets]
        return pa.concat_tables(found).sort_by("_distance").slice(0, K)

    def by_words(datasets: Sequence[lance.LanceDataset]) -> pa.Table:
        found = [
            each.scanner(columns=["id", "_score"], full_text_query=words, limit=K).to_table()
            for each in datasets
        ]
        return pa.concat_tables(found).sort_by([("_score", "descending")]).slice(0, K)

    return [
        Measure(
            "vector search, warm",
            lambda: expect(reader.vector_search(VECTOR, vector, K, columns=["id"]).num_rows, K),
            partial(by_vector, opened),
        ),
        Measure(
            "text search, warm",
            lambda: reader.full_text_search(WORDS, words, K, columns=["id"]),
            partial(by_words, opened),
        ),
        Measure(
            "vector search, cold",
            lambda: reader_of(base).vector_search(VECTOR, vector, K, columns=["id"]),
            lambda: by_vector([lance.dataset(uri) for uri in uris]),
            before=cold,
            samples=2,
        ),
        Measure(
            "text search, cold",
            lambda: reader_of(base).full_text_search(WORDS, words, K, columns=["id"]),
            lambda: by_words([lance.dataset(uri) for uri in uris]),
            before=cold,
            samples=2,
        ),
    ]


@growth(
    "growth_shards",
    "reads and maintenance by shards with an SSTable of 20 rows and a WAL entry each, 1 to 1,024",
    axis="shards",
    sizes=(1, 4, 16, 64, 256, 1024),
    quick=(1, 4, 16),
    peer="one merge_insert of the same rows",
)
def shards(context: Context, sizes: Sequence[int]) -> Steps:
    return ((size, _with_shards(context, size)) for size in sizes)


def _with_shards(context: Context, size: int) -> list[Measure]:
    rows = plain_rows(np.arange(20 * size))
    base = new_table(context.directory(f"shards_{size}") / "table", PLAIN.empty_table(), bucket=("id", size))
    store = local_store(base)
    found: list[UUID] = []
    router = ShardRouter.for_table(base.details, base.schema)
    for shard, part in router.split(rows.combine_chunks().to_batches()[0]):
        add_sstables(base, shard, [part])
        add_entries(base, shard, [stored_batch(base, part.slice(0, 1))])
        found.append(shard)
    reader, table = reader_of(base), Table(store)
    peer = copied(base, context.directory(f"peer_{size}") / "table")
    key, cold = 10 * size, partial(forget, base, found)
    return [
        Measure("lookup, warm", lambda: expect(reader.lookup([key]).table.num_rows, 1), bound=FLAT),
        Measure(
            "lookup, cold",
            lambda: expect(reader_of(base).lookup([key]).table.num_rows, 1),
            before=cold,
            bound=FLAT,
        ),
        Measure("count, warm", lambda: expect(reader.scan().count_rows(), rows.num_rows)),
        Measure("status", lambda: table_status(store, TableReader(store).base)),
        Measure("open a table writer", lambda: table.writer(**QUIET).close()),
        Measure("gc, nothing to do", lambda: collect_garbage(store), before=lambda: None, samples=3),
        Measure("flush", lambda: table.flush(**QUIET), before=lambda: None, samples=ONCE),
        Measure(
            "compact",
            lambda: compact(store),
            lambda: upsert(peer, rows),
            before=lambda: None,
            samples=ONCE,
        ),
    ]


@growth(
    "growth_entries",
    "a log of one-row WAL entries that no SSTable holds, 100 to 100,000",
    axis="WAL entries",
    sizes=(100, 1_000, 10_000, 30_000, 100_000),
    quick=(30, 100, 300),
    peer="replay by Lance",
)
def entries(context: Context, sizes: Sequence[int]) -> Steps:
    base = new_table(context.directory("log") / "table", PLAIN.empty_table())
    shard = only_shard(base)
    made = 0

    def append(keys: Any) -> None:
        whole = stored_batch(base, plain_rows(keys))
        add_entries(base, shard, (whole.slice(row, 1) for row in range(whole.num_rows)))

    for size in sizes:
        append(np.arange(made, size))
        made = size
        yield size, _with_entries(base, shard, size, append)


def _with_entries(base: BaseTable, shard: UUID, size: int, append: Callable[[Any], None]) -> list[Measure]:
    reader = reader_of(base)
    key = size // 2
    return [
        Measure(
            "count, cold",
            lambda: expect(reader_of(base).scan().count_rows(), size),
            before=partial(forget, base, [shard]),
            samples=2,
        ),
        Measure("lookup, warm", lambda: expect(reader.lookup([key]).table.num_rows, 1), bound=FLAT),
        Measure("count, warm", lambda: expect(reader.scan().count_rows(), size)),
        Measure(
            "lookup after one more entry",
            lambda: expect(reader.lookup([key]).table.num_rows, 1),
            before=lambda: append(np.arange(1)),
            bound=FLAT,
        ),
        Measure("memory of the first lookup", lambda: resident_growth(base.uri), unit="MB"),
        Measure(
            "replay",
            lambda: abandon(open_shard_writer(base, shard, ShardWriterConfig(**ROOMY))),
            (lambda: _replayed_by_lance(base, shard)) if size <= 10_000 else None,
            before=lambda: None,
            before_peer=lambda: None,
            samples=2,
        ),
    ]


def _replayed_by_lance(base: BaseTable, shard: UUID) -> None:
    lance.dataset(base.uri).mem_wal_writer(
        str(shard), max_memtable_rows=10_000_000, max_memtable_batches=1_000_000
    )
