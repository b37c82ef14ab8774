"""The files beside an SSTable's rows that answer for its keys.

``_pk_index`` lists all keys in order with their row offsets, in pages, and the least
and greatest key of each page. ``bloom_filter.bin`` rules most absent keys out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
from lance.file import LanceFileWriter

from lancewal import layout
from lancewal.format.bloom import BloomFilter
from lancewal.format.schema import TableSchema
from lancewal.format.shard_manifest import SsTableEntry
from lancewal.lance_errors import lance_errors
from lancewal.objects import ObjectStore
from lancewal.sstable.durability import sync_directory
from lancewal.sstable.key_order import KeyOrder, Rows
from lancewal.sstable.reader import SsTable

PAGE_ROWS = 8192

# What Lance itself writes these two files in, whatever the table's own version.
_FILE_VERSION = "2.0"


def write_sidecars(
    store: ObjectStore, directory: str, columns: Sequence[pa.Array], values: pa.Array, offsets: Rows
) -> None:
    """Write the bloom filter over the rows' key ``columns``, and the key index.

    ``values`` are the key values in ascending order, ``offsets`` the row of each.
    """
    with lance_errors(f"write the key index of {directory}"):
        _write_key_index(store, directory, values, offsets)
    store.put(f"{directory}/{layout.BLOOM_FILTER_NAME}", BloomFilter.build(columns).to_bytes())


def rebuild_sidecars(store: ObjectStore, shard_id: UUID, entry: SsTableEntry, schema: TableSchema) -> None:
    """Write both sidecars anew from the rows of an SSTable, for one that lost or never had them.

    Does nothing for a table without a primary key, whose SSTables have none.
    """
    if not schema.primary_key:
        return
    table = SsTable.open(store, shard_id, entry)
    columns, offsets, _ = table.keys(schema)
    order = KeyOrder.of(columns)
    directory = layout.sstable_dir(shard_id, entry.path)
    write_sidecars(store, directory, columns, order.values, offsets[order.rows])
    sync_directory(store, directory)
    table.forget()


def _write_key_index(store: ObjectStore, directory: str, values: pa.Array, offsets: Rows) -> None:
    starts = np.arange(0, len(values), PAGE_ROWS)
    ends = np.minimum(starts + PAGE_ROWS, len(values)) - 1
    pages = {
        "min": values.take(pa.array(starts)),
        "max": values.take(pa.array(ends)),
        "null_count": pa.array(np.zeros(len(starts), np.uint32)),
        "page_idx": pa.array(np.arange(len(starts), dtype=np.uint32)),
    }
    entries = {"values": values, "ids": pa.array(offsets.astype(np.uint64))}
    _write_file(store, f"{directory}/{layout.PK_PAGE_DATA_NAME}", entries, {})
    _write_file(
        store,
        f"{directory}/{layout.PK_PAGE_LOOKUP_NAME}",
        pages,
        {"batch_size": str(PAGE_ROWS), "range_partitioned": "false"},
    )


def _write_file(
    store: ObjectStore, path: str, columns: dict[str, pa.Array], metadata: dict[str, str]
) -> None:
    key_columns = ("values", "min", "max")
    schema = pa.schema([pa.field(name, a.type, name in key_columns) for name, a in columns.items()])
    arguments: dict[str, Any] = {"version": _FILE_VERSION, "storage_options": dict(store.storage_options)}
    with LanceFileWriter(layout.child_uri(store.uri, path), schema, **arguments) as file:
        for key, value in metadata.items():
            file.add_schema_metadata(key, value)
        file.write_batch(pa.record_batch(list(columns.values()), schema=schema))
