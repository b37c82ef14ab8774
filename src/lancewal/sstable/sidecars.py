"""The files beside an SSTable's rows that answer for its keys.

``_pk_index`` lists all keys in order with their row offsets, in pages, and the least
and greatest key of each page. ``bloom_filter.bin`` rules most absent keys out. Both are
as Lance writes them; checksums of them are in lancewal's own notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import crc32c
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
from lancewal.sstable.key_index import bounds_checksum, page_checksum
from lancewal.sstable.key_order import KeyOrder, Rows
from lancewal.sstable.notes import SsTableNotes, file_checksum
from lancewal.sstable.reader import SsTable

PAGE_ROWS = 8192

# What Lance itself writes these two files in, whatever the table's own version.
_FILE_VERSION = "2.0"


@dataclass(frozen=True)
class Keys:
    """The keys of an SSTable's rows: ``columns`` as they are, ``values`` ascending with the row of each."""

    columns: Sequence[pa.Array]
    values: pa.Array
    offsets: Rows


def write_sidecars(
    store: ObjectStore, directory: str, keys: Keys | None, base_version: int | None
) -> SsTableNotes:
    """Write the bloom filter and the key index, where there are keys, and the notes; gives the notes.

    They are not synced one by one: see :func:`~lancewal.sstable.durability.sync_directory`.
    """
    notes = SsTableNotes(base_version)
    if keys is not None:
        bloom = BloomFilter.build(keys.columns).to_bytes()
        files = {layout.BLOOM_FILTER_NAME: int(crc32c.crc32c(bloom))}
        with lance_errors(f"write the key index of {directory}"):
            bounds, pages = _write_key_index(store, directory, keys.values, keys.offsets)
            for name in (layout.PK_PAGE_DATA_NAME, layout.PK_PAGE_LOOKUP_NAME):
                if path := store.local_path(f"{directory}/{name}"):
                    files[name] = file_checksum(path)
        store.put(f"{directory}/{layout.BLOOM_FILTER_NAME}", bloom, durable=False)
        notes = SsTableNotes(base_version, files, bounds, pages)
    _write_notes(store, directory, notes)
    return notes


def rebuild_sidecars(store: ObjectStore, shard_id: UUID, entry: SsTableEntry, schema: TableSchema) -> str:
    """Write all of it anew from the rows of an SSTable, for one that lost or never had it.

    Gives the notes for the manifest.
    """
    table = SsTable.open(store, shard_id, entry)
    keys = None
    if schema.primary_key:
        columns, offsets, _ = table.keys(schema)
        order = KeyOrder.of(columns)
        keys = Keys(columns, order.values, offsets[order.rows])
    directory = layout.sstable_dir(shard_id, entry.path)
    # Whoever opens it meanwhile must not compare new files with the checksums of old ones.
    _write_notes(store, directory, SsTableNotes(table.written_for))
    notes = write_sidecars(store, directory, keys, table.written_for)
    sync_directory(store, directory)
    table.forget()
    return notes.copy()


def _write_notes(store: ObjectStore, directory: str, notes: SsTableNotes) -> None:
    store.put(f"{directory}/{layout.SSTABLE_NOTES_NAME}", notes.to_text().encode(), durable=False)


def _write_key_index(
    store: ObjectStore, directory: str, values: pa.Array, offsets: Rows
) -> tuple[int, tuple[int, ...]]:
    """Gives the checksums of the bounds and of each page."""
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
    sealed = (
        page_checksum(values[start : start + PAGE_ROWS], offsets[start : start + PAGE_ROWS])
        for start in starts.tolist()
    )
    return bounds_checksum(pages["min"], pages["max"], PAGE_ROWS), tuple(sealed)


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
