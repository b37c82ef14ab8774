"""Tables and batches that several workloads share, and the peer's writer on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import lance
import numpy as np
import pyarrow as pa

from lancewal.base.table import BaseTable

KEY = {"lance-schema:unenforced-primary-key": "true"}
#: The shortest interval that the peer's writer takes; its default of 100 ms is what a
#: durable put would wait for.
PEER_BEST_INTERVAL_MS = 1


def vector_schema(dimension: int) -> pa.Schema:
    return pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False, metadata=KEY),
            pa.field("vector", pa.list_(pa.float32(), dimension)),
        ]
    )


def vector_batches(count: int, rows: int, dimension: int, first_id: int = 0) -> list[pa.RecordBatch]:
    """``count`` batches of ``rows`` rows with ascending ids and random vectors."""
    random = np.random.default_rng(7)
    schema = vector_schema(dimension)
    batches = []
    for index in range(count):
        start = first_id + index * rows
        values = pa.array(random.random(rows * dimension, dtype=np.float32))
        vectors = pa.FixedSizeListArray.from_arrays(values, dimension)
        ids = pa.array(np.arange(start, start + rows))
        batches.append(pa.record_batch([ids, vectors], schema=schema))
    return batches


def new_table(path: Path, schema: pa.Schema, data: pa.Table | None = None) -> BaseTable:
    """A Lance table with a MemWAL index that maintains nothing."""
    dataset = lance.write_dataset(schema.empty_table() if data is None else data, str(path), schema=schema)
    dataset.initialize_mem_wal(unsharded=True, maintained_indexes=[])
    return BaseTable.open(str(path))


def peer_writer(dataset: lance.LanceDataset, shard: str | None = None, *, durable_write: bool = True) -> Any:
    """Lance's own shard writer, on a new shard unless one is given; at its best interval if it is durable."""
    interval = {"max_wal_flush_interval_ms": PEER_BEST_INTERVAL_MS} if durable_write else {}
    return dataset.mem_wal_writer(shard or str(uuid4()), durable_write=durable_write, **interval)


def upsert(dataset: lance.LanceDataset, rows: pa.Table | pa.RecordBatchReader) -> object:
    """What Lance does without a write-ahead log: rows with known keys replace, the others are added."""
    merge = dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    return merge.execute(rows)


def expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise RuntimeError(f"{wanted!r} was expected, {found!r} came")
