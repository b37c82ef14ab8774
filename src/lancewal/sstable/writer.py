"""Writing one SSTable: a MemTable's newest rows, their field ids, sidecars and indexes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pyarrow as pa

from lancewal import layout
from lancewal.errors import InvalidInputError
from lancewal.format.keys import key_columns
from lancewal.format.schema import TableSchema
from lancewal.format.shard_manifest import SsTableEntry
from lancewal.index.specs import IndexSpec
from lancewal.lance_errors import lance_errors
from lancewal.objects import ObjectStore
from lancewal.sstable.chunks import coalesced
from lancewal.sstable.durability import sync_directory
from lancewal.sstable.field_ids import NumberedSchema, write_numbered
from lancewal.sstable.indexes import build_indexes
from lancewal.sstable.key_order import KeyOrder
from lancewal.sstable.null_structs import needs_present_structs
from lancewal.sstable.sidecars import Keys, write_sidecars

# Lance's memory is not the object store's: rows written there would be gone.
_PRIVATE_TO_EACH_LIBRARY = "memory://"


def write_sstable(
    *,
    store: ObjectStore,
    shard_id: UUID,
    generation: int,
    schema: TableSchema,
    batches: Sequence[pa.RecordBatch],
    storage_version: str,
    indexes: Sequence[IndexSpec] = (),
    in_memory_bytes: int | None = None,
) -> SsTableEntry:
    """Write ``batches`` (in ``schema.stored``, insert order) as a new SSTable; its manifest entry.

    Only the newest row of each key is written, a tombstone too: what it replaces would
    never be read. When this returns the SSTable is as durable as the store makes things.
    A failure raises StorageError and leaves a directory that no manifest names, for
    garbage collection; a retry writes to another one.
    """
    rows = sum(batch.num_rows for batch in batches)
    if rows == 0:
        raise InvalidInputError(f"generation {generation} of shard {shard_id} has no rows to write")
    if store.uri.startswith(_PRIVATE_TO_EACH_LIBRARY):
        raise InvalidInputError(f"Lance cannot write where we can read at {store.uri}; use a directory")
    keys = [_column(batches, schema, name) for name in schema.primary_key]
    order = KeyOrder.of(keys) if keys else None
    newest = None if order is None else order.newest
    name = layout.fresh_sstable_name(generation)
    directory = layout.sstable_dir(shard_id, name)
    uri = layout.child_uri(store.uri, directory)
    numbered = NumberedSchema.of(schema)
    stored_keys = keys if newest is None else [key.filter(pa.array(newest)) for key in keys]

    sorted_keys = None if order is None else Keys(stored_keys, order.values, order.offsets())

    with ThreadPoolExecutor(1, "lancewal-sidecars") as pool:
        sidecars = pool.submit(write_sidecars, store, directory, sorted_keys, schema.version)
        with lance_errors(f"write the SSTable at {uri}"):
            dataset = write_numbered(
                coalesced(
                    batches,
                    numbered.arrow,
                    newest,
                    dead_structs_present=needs_present_structs(storage_version, numbered.arrow),
                ),
                uri,
                numbered,
                storage_version,
                dict(store.storage_options),
            )
        build_indexes(dataset, indexes)
        notes = sidecars.result()
    sync_directory(store, directory)
    return SsTableEntry(
        generation=generation,
        path=name,
        in_memory_bytes=sum(b.nbytes for b in batches) if in_memory_bytes is None else in_memory_bytes,
        physical_rows=rows if order is None else len(order.rows),
        primary_key_bytes=sum(int(key.nbytes) for key in stored_keys) if stored_keys else None,
        notes=notes.copy(),
    )


def _column(batches: Sequence[pa.RecordBatch], schema: TableSchema, name: str) -> pa.Array:
    chunks = pa.chunked_array([batch.column(name) for batch in batches], schema.columns.field(name).type)
    return key_columns([chunks])[0]
