"""Tables of any size for the growth curves, built past the writers: SSTables, logs and bases as they lie."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

import lancewal
from bench.tables import KEY
from lancewal.base import BaseTable
from lancewal.format import SsTableEntry, encode_entry, entry_schema
from lancewal.index import maintained_specs
from lancewal.reader import TableReader, TableView
from lancewal.shard import ShardManifestStore, ShardRouter, WalAppender
from lancewal.sstable import keep_sstables, write_sstable
from lancewal.storage import ObjectStore, layout, process_cache
from lancewal.writer import ShardWriter

Numbers = npt.NDArray[np.int64]

_GIB = 1 << 30
#: Settings of writers that neither sync nor log.
QUIET: dict[str, Any] = {"fsync": False, "stats_log_interval": None}
#: No MemTable of such a writer is frozen by itself.
ROOMY: dict[str, Any] = {
    **QUIET,
    "max_memtable_rows": 10_000_000,
    "max_memtable_batches": 10_000_000,
    "max_memtable_size": 8 * _GIB,
    "max_unflushed_memtable_bytes": 16 * _GIB,
}

WORDS, VECTOR = "text", "vector"
DIMENSION = 32
_VOCABULARY = np.array([f"word{number}" for number in range(2000)])
_WORDS_PER_TEXT = 8

PLAIN = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("price", pa.float64()),
        pa.field("name", pa.string()),
    ]
)
SEARCHED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field(WORDS, pa.string()),
        pa.field(VECTOR, pa.list_(pa.float32(), DIMENSION)),
    ]
)


def plain_rows(keys: Numbers) -> pa.Table:
    ids = pa.array(keys)
    return pa.table([ids, pa.array(keys * 1.5), pc.cast(ids, pa.string())], schema=PLAIN)


def searched_rows(keys: Numbers, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    drawn = random.integers(0, len(_VOCABULARY), (len(keys), _WORDS_PER_TEXT))
    texts = [" ".join(words) for words in _VOCABULARY[drawn].tolist()]
    values = pa.array(random.random(len(keys) * DIMENSION, dtype=np.float32))
    vectors = pa.FixedSizeListArray.from_arrays(values, DIMENSION)
    return pa.table([pa.array(keys), pa.array(texts), vectors], schema=SEARCHED)


def query_vector(seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).random(DIMENSION, dtype=np.float32)


def query_words(seed: int = 0) -> str:
    return " ".join(_VOCABULARY[np.random.default_rng(seed).integers(0, len(_VOCABULARY), 2)].tolist())


def new_table(where: Path, rows: pa.Table, *, indexed: Sequence[str] = (), **sharding: object) -> BaseTable:
    """A base of ``rows`` with a write path; ``indexed`` columns get the index that their type calls for."""
    uri = str(where)
    dataset = lance.write_dataset(rows, uri)
    for column in indexed:
        if column == VECTOR:
            centroids = np.zeros((1, DIMENSION), np.float32)
            dataset.create_index(column, "IVF_FLAT", metric="l2", num_partitions=1, ivf_centroids=centroids)
        else:
            dataset.create_scalar_index(column, "INVERTED" if column == WORDS else "BTREE")
    lancewal.initialize(uri, **(sharding or {"unsharded": True}))  # type: ignore[arg-type]
    return BaseTable.open(uri)


def local_store(base: BaseTable) -> ObjectStore:
    return ObjectStore.from_uri(base.uri, fsync=False)


def only_shard(base: BaseTable) -> UUID:
    """The shard of an unsharded table."""
    return ShardRouter.for_table(base.details, base.schema).known_shards()[0].shard_id


def stored_batch(base: BaseTable, rows: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
    """``rows`` as logs and SSTables hold them."""
    (batch,) = rows.combine_chunks().to_batches() if isinstance(rows, pa.Table) else (rows,)
    alive = pa.array(np.zeros(batch.num_rows, np.bool_))
    return pa.RecordBatch.from_arrays([*batch.columns, alive], schema=base.schema.stored)


def add_sstables(base: BaseTable, shard: UUID, tables: Iterable[pa.Table | pa.RecordBatch]) -> None:
    """Flush each of ``tables`` to an SSTable of its own, and list them all in one manifest."""
    store = local_store(base)
    manifests = ShardManifestStore(store, shard)
    first = manifests.require_latest().current_generation
    details = base.details
    indexes = maintained_specs(
        base.dataset, details.maintained_indexes, details.maintain_all_indexes, strict=False
    )
    entries: list[SsTableEntry] = [
        write_sstable(
            store=store,
            shard_id=shard,
            generation=first + place,
            schema=base.schema,
            batches=[stored_batch(base, rows)],
            storage_version=base.storage_version,
            indexes=indexes,
        )
        for place, rows in enumerate(tables)
    ]
    manifests.commit_update(
        None,
        lambda m: replace(
            m, sstables=(*m.sstables, *entries), current_generation=m.current_generation + len(entries)
        ),
    )


def add_entries(base: BaseTable, shard: UUID, batches: Iterable[pa.RecordBatch]) -> None:
    """Append a WAL entry for each of ``batches``, which :func:`stored_batch` made."""
    store = local_store(base)
    appender = WalAppender.open(store, shard, _spec_of(store, shard), keep_metadata=True)
    generation = ShardManifestStore(store, shard).require_latest().current_generation
    schema = entry_schema(base.schema.stored, appender.epoch, generation, keep_metadata=True)
    left = iter(batches)
    position = appender.append([next(left)], generation=generation).position
    for batch in left:
        position += 1
        path = store.local_path(layout.wal_entry(shard, position))
        assert path is not None, "the table lies in a directory"
        with open(path, "xb") as file:
            file.write(encode_entry(schema, [batch], base_version=base.version))


def _spec_of(store: ObjectStore, shard: UUID) -> int:
    return ShardManifestStore(store, shard).require_latest().shard_spec_id


def sstable_uris(base: BaseTable, shard: UUID) -> list[str]:
    manifest = ShardManifestStore(local_store(base), shard).require_latest()
    return [f"{base.uri}/{layout.sstable_dir(shard, entry.path)}" for entry in manifest.sstables]


def forget(base: BaseTable, shards: Iterable[UUID] = ()) -> None:
    """Drop all that this process keeps of tables, so that the next read is cold."""
    store = local_store(base)
    process_cache.after_fork()
    for shard in shards:
        keep_sstables(store, shard, ())


def reader_of(base: BaseTable) -> TableView:
    store = ObjectStore.from_uri(base.uri)
    return TableView(store, TableReader(store))


def copied(base: BaseTable, where: Path) -> lance.LanceDataset:
    """A copy of the base table alone, for the peer to write to."""
    shutil.copytree(base.uri, where, ignore=shutil.ignore_patterns(layout.MEM_WAL_DIR))
    return lance.dataset(str(where))


def abandon(writer: ShardWriter) -> None:
    """Leave a writer as a crash would: closing would flush what is to be replayed again."""
    writer._finalizer()


def resident_growth(uri: str) -> float:
    """MB by which the first lookup of a table raises the memory of a fresh process."""
    command = [sys.executable, "-m", "bench.growth_tables", uri]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def resident_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


if __name__ == "__main__":
    table = lancewal.open(sys.argv[1])
    before = resident_bytes()
    table.lookup(0)
    print((resident_bytes() - before) / 1e6)
