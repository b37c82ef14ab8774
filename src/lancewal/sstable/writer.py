"""Write one SSTable: a MemTable's newest rows with their field ids, sidecars and indexes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import UUID

import crc32c
import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileWriter

from lancewal.base import lance_errors
from lancewal.errors import InvalidInputError, OutcomeUnknownError, StorageError
from lancewal.format import (
    BloomFilter,
    RowSum,
    SsTableEntry,
    TableSchema,
    key_columns,
    newest_manifest_name,
)
from lancewal.index import FullTextParams, IndexSpec, VectorParams
from lancewal.sstable.columns import NumberedSchema, write_numbered
from lancewal.sstable.key_index import KeyOrder, Mask, Rows, bounds_checksum, page_checksum
from lancewal.sstable.notes import SsTableNotes, file_checksum
from lancewal.sstable.reader import SsTable
from lancewal.sstable.storable import needs_present_structs, with_present_dead_structs
from lancewal.storage import ObjectStore, Room, in_thread, layout, ordered_map, scratch_directory

logger = logging.getLogger(__name__)

_SYNCS_AT_ONCE = 8
#: More files than an SSTable with three indexes has.
_UPLOADS_AT_ONCE = 32
#: Larger files are uploaded in parts, several at a time, so that they are not held in memory as a whole.
_UPLOAD_BYTES = 8 << 20
_PARTS_BYTES = 64 << 20
#: The memory of all uploads of this process together.
_uploads = Room(128 << 20)
_TRANSACTIONS_DIR = "_transactions"


def sync_directory(store: ObjectStore, directory: str) -> None:
    """Sync ``directory``, every file and directory below it, and its entry in the parent directory.

    Lance never syncs, and once a manifest names an SSTable, WAL entries may be deleted. Without this sync a
    power cut after the flush could lose acknowledged rows. Does nothing on object storage, or on a store
    that was opened without fsync.
    """
    if not store.fsync:
        return
    root = store.local_path(directory)
    assert root is not None, "a local store has local paths"
    try:
        # Each sync waits for the disk; parallel syncs share the file system's journal commits.
        files, directories = _below(root)
        for paths in (files, [*directories, os.path.dirname(root)]):
            for _ in ordered_map(_sync, paths, min(_SYNCS_AT_ONCE, len(paths))):
                continue
    except OSError as error:
        raise StorageError(f"cannot sync the SSTable at {root!r}: {error}") from error


def _below(root: str) -> tuple[list[str], list[str]]:
    files: list[str] = []
    directories: list[str] = []
    for parent, _, names in os.walk(root, onerror=_raise):
        directories.append(parent)
        files += [f"{parent}/{name}" for name in names]
    return files, directories


def _raise(error: OSError) -> None:
    # A file that is not listed is not synced, and ``os.walk`` ignores errors without this.
    raise error


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class _Workshop:
    """The place where the files of an SSTable are made, then its dataset and the names of its sidecars."""

    store: ObjectStore
    dataset: lance.LanceDataset | None = None
    sidecars: Collection[str] = ()


@contextmanager
def _workshop(store: ObjectStore, directory: str) -> Iterator[_Workshop]:
    """A place to make the files of an SSTable; when the block ends, they are in ``store``.

    Lance writes a dataset and its indexes file by file, and reads rows back for each index. On object
    storage each of these is a round trip. So the files are made in a local temporary directory and then
    uploaded in parallel.
    """
    if store.is_local:
        yield _Workshop(store)
        store.check_place()
        sync_directory(store, directory)
        return
    with scratch_directory() as place:
        local = ObjectStore.from_uri(place, fsync=False)
        workshop = _Workshop(local)
        yield workshop
        assert workshop.dataset is not None, "the dataset was made in the block"
        expected = {**_sizes(workshop.dataset), **dict.fromkeys(workshop.sidecars)}
        _upload(local, store, directory, expected)


def _upload(
    local: ObjectStore, store: ObjectStore, directory: str, expected: Mapping[str, int | None]
) -> None:
    """Copy the SSTable to ``store``, in any order: no reader uses it before a manifest lists it.

    Each index was a separate commit. Only the last version is copied, and no transaction files, because they
    serve concurrent commits and there are none to an SSTable.

    Other programs may delete files in a temporary directory. An SSTable that lacks a file must not be listed,
    so the files are compared with ``expected``.
    """
    names = {info.path.removeprefix(f"{directory}/"): info.size for info in local.list(directory)}
    versions = [name for name in names if name.startswith(f"{layout.VERSIONS_DIR}/")]
    newest = newest_manifest_name(name.partition("/")[2] for name in versions)
    lost = [part for part, size in expected.items() if not _is_there(names, part, size)]
    if newest is None or lost:
        raise StorageError(
            f"files of an SSTable were lost in the directory for temporary files, {local.uri}, before they "
            f"were uploaded: {', '.join(lost) or layout.VERSIONS_DIR}; does anybody delete files there?"
        )
    left_out = {*versions} - {f"{layout.VERSIONS_DIR}/{newest[0]}"}
    kept = [n for n in names if n not in left_out and not n.startswith(f"{_TRANSACTIONS_DIR}/")]

    def copy(name: str) -> None:
        path = local.local_path(f"{directory}/{name}")
        assert path is not None, "the workshop is local"
        size = os.path.getsize(path)
        upload = threading.Lock()
        try:
            with upload:
                _uploads.enter(upload, min(size, _PARTS_BYTES))
                if size > _UPLOAD_BYTES:
                    store.put_from(f"{directory}/{name}", partial(_chunks_of, path))
                else:
                    store.put(f"{directory}/{name}", next(_chunks_of(path), b""), durable=False)
        except OutcomeUnknownError as error:
            # Whether the file was written does not matter: no manifest lists the directory.
            raise StorageError(str(error)) from error
        finally:
            _uploads.leave(upload)

    for _ in ordered_map(copy, kept, min(_UPLOADS_AT_ONCE, len(kept))):
        continue


def _sizes(dataset: lance.LanceDataset) -> dict[str, int | None]:
    """The size of each data file and of each index, as far as Lance knows it."""
    sizes: dict[str, int | None] = {}
    for fragment in dataset.get_fragments():
        for file in fragment.data_files():
            sizes[f"data/{file.path}"] = file.file_size_bytes
    for index in dataset.describe_indices():
        for segment in index.segments:
            sizes[f"_indices/{segment.uuid}/"] = segment.size_bytes
    return sizes


def _is_there(names: Mapping[str, int], part: str, size: int | None) -> bool:
    """Whether the file, or the directory ``part``, is among ``names`` with the expected total size."""
    found = [names[name] for name in names if name.startswith(part)]
    return bool(found) and size in (None, sum(found))


def _chunks_of(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(_UPLOAD_BYTES):
            yield chunk


PAGE_ROWS = 8192

# The file version that Lance itself uses for these two files, independent of the table's version.
_FILE_VERSION = "2.0"


@dataclass(frozen=True)
class Keys:
    """The keys of an SSTable's rows: ``columns`` in row order, ``values`` ascending with their rows."""

    columns: Sequence[pa.Array]
    values: pa.Array
    offsets: Rows


def write_sidecars(
    store: ObjectStore, directory: str, keys: Keys | None, base_version: int | None
) -> SsTableNotes:
    """Write the bloom filter and the key index, if there are keys; return the notes about them.

    ``_pk_index`` lists all keys in order with their row offsets, in pages, and the least and greatest key
    of each page. ``bloom_filter.bin`` rules out most absent keys. Both have Lance's format; their
    checksums are in lancewal's own notes.

    Nothing is synced here; :func:`sync_directory` does that.
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
    return notes


def rebuild_sidecars(store: ObjectStore, shard_id: UUID, entry: SsTableEntry, schema: TableSchema) -> str:
    """Rebuild the missing sidecars of an SSTable from its rows; return the notes for the manifest."""
    table = SsTable.open(store, shard_id, entry)
    keys = None
    if schema.primary_key:
        columns, offsets, _ = table.keys(schema)
        order = KeyOrder.of(columns)
        keys = Keys(columns, order.values, offsets[order.rows])
    directory = layout.sstable_dir(shard_id, entry.path)
    # Keep the checksum of the flush: a checksum of the present rows would hide rows that were lost since.
    noted = table.noted_rows
    # Drop the old checksums first: a concurrent reader must not compare new files with them.
    _write_notes(store, directory, SsTableNotes(table.written_for, rows=noted))
    notes = replace(write_sidecars(store, directory, keys, table.written_for), rows=noted)
    _write_notes(store, directory, notes)
    sync_directory(store, directory)
    table.forget()
    return notes.copy()


def _write_notes(store: ObjectStore, directory: str, notes: SsTableNotes) -> None:
    store.put(f"{directory}/{layout.SSTABLE_NOTES_NAME}", notes.to_text().encode(), durable=False)


def _write_key_index(
    store: ObjectStore, directory: str, values: pa.Array, offsets: Rows
) -> tuple[int, tuple[int, ...]]:
    """Write both files of the key index; return the checksums of the bounds and of each page."""
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


#: Small batches are joined to chunks of about this size, because Lance's cost per batch is far above its
#: cost per row.
CHUNK_ROWS = 8192
CHUNK_BYTES = 4 << 20


def coalesced(
    batches: Sequence[pa.RecordBatch],
    schema: pa.Schema,
    newest: Mask | None,
    *,
    fill_dead_for: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of ``batches`` that ``newest`` marks, in order, with ``schema``.

    ``schema`` may differ from the schema of the batches only in field metadata. Large batches are not copied
    if all their rows are kept. ``fill_dead_for`` is the file version, if it cannot hold some nulls that
    tombstones have.
    """
    for chunk in _chunks(batches, newest):
        # Skip empty batches: Lance would write a page for each.
        if chunk.num_rows:
            rows = chunk if fill_dead_for is None else with_present_dead_structs(chunk, fill_dead_for)
            yield pa.RecordBatch.from_arrays(rows.columns, schema=schema)


def _chunks(batches: Sequence[pa.RecordBatch], newest: Mask | None) -> Iterator[pa.RecordBatch]:
    limit = _chunk_rows(batches)
    group: list[pa.RecordBatch] = []
    rows = first_row = 0
    for batch in batches:
        if group and rows + batch.num_rows > limit:
            yield _joined(group, newest, first_row)
            first_row += rows
            group, rows = [], 0
        group.append(batch)
        rows += batch.num_rows
    if group:
        yield _joined(group, newest, first_row)


def _chunk_rows(batches: Sequence[pa.RecordBatch]) -> int:
    """Rows per chunk, estimated from the largest batch: measuring all would cost more than joining them."""
    sample = max(batches, key=lambda batch: batch.num_rows)
    row_bytes = max(sample.nbytes // max(sample.num_rows, 1), 1)
    return int(min(CHUNK_ROWS, max(CHUNK_BYTES // row_bytes, 1)))


def _joined(group: Sequence[pa.RecordBatch], newest: Mask | None, first_row: int) -> pa.RecordBatch:
    chunk = group[0] if len(group) == 1 else pa.concat_batches(group)
    if newest is None:
        return chunk
    kept = newest[first_row : first_row + chunk.num_rows]
    return chunk if kept.all() else chunk.filter(pa.array(kept))


# One partition of scalar-quantised vectors, which a search scans completely. Lance's own flush builds an HNSW
# graph here. At 100,000 rows of 128 dimensions a graph takes 30 s, and this index 0.25 s. With Lance's
# default beam the graph also finds fewer of the true neighbours.
_VECTOR_INDEX = "IVF_SQ"


def build_indexes(dataset: lance.LanceDataset, indexes: Sequence[IndexSpec]) -> None:
    """Build every index of ``indexes`` in ``dataset`` as an index of Lance, each in its own commit.

    An index that cannot be built is left out with a warning, and searches then read all rows. If the flush
    failed instead, it would fail on every retry, and the shard would become unwritable.
    """
    for spec in indexes:
        try:
            with lance_errors(f"build index {spec.name!r}"):
                _build(dataset, spec)
        except StorageError as error:
            logger.warning(
                "SSTable %s has no index on column %r, and searches of it read every row: %s",
                dataset.uri,
                spec.column,
                error,
            )


def _build(dataset: lance.LanceDataset, spec: IndexSpec) -> None:
    if isinstance(spec.params, VectorParams):
        # A given centroid needs no training, so this works with a single row, and even without any vector.
        dataset.create_index(
            spec.column,
            _VECTOR_INDEX,
            name=spec.name,
            metric=spec.params.metric.value,
            num_partitions=1,
            ivf_centroids=np.zeros((1, spec.params.dimension), np.float32),
        )
    elif isinstance(spec.params, FullTextParams):
        dataset.create_scalar_index(
            spec.column,
            "INVERTED",
            name=spec.name,
            with_position=spec.params.with_position,
            **spec.params.tokenizer_options(),
        )
    else:
        dataset.create_scalar_index(spec.column, "BTREE", name=spec.name)


# Lance and obstore have separate memory stores: lancewal could not read rows that Lance writes there.
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
    row_sums: bool = True,
) -> SsTableEntry:
    """Write ``batches`` (in ``schema.stored``, insert order) as a new SSTable; return its manifest entry.

    Only the newest row of each key is written, tombstones included, because replaced rows would never be
    read. When this returns, the SSTable is as durable as the store makes it. A failure raises StorageError
    and leaves a directory that no manifest names; garbage collection deletes it, and a retry writes to
    another one.
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
    fill_dead = needs_present_structs(storage_version, numbered.arrow)
    stored_keys = keys if newest is None else [key.filter(pa.array(newest)) for key in keys]

    sums: list[RowSum] = []
    sorted_keys = None if order is None else Keys(stored_keys, order.values, order.offsets())
    with lance_errors(f"write the SSTable at {uri}"), _workshop(store, directory) as workshop:
        write = partial(write_sidecars, workshop.store, directory, sorted_keys, schema.version)
        sidecars = in_thread(write, "lancewal-sidecars")
        chunks = coalesced(
            batches, numbered.arrow, newest, fill_dead_for=storage_version if fill_dead else None
        )
        try:
            workshop.dataset = write_numbered(
                _summed(chunks, schema.primary_key, sums) if row_sums else chunks,
                layout.child_uri(workshop.store.uri, directory),
                numbered,
                storage_version,
            )
            build_indexes(workshop.dataset, indexes)
        finally:
            sidecars.wait()
        notes = replace(sidecars.result(), rows=sum(sums, RowSum()) if row_sums else None)
        _write_notes(workshop.store, directory, notes)
        workshop.sidecars = {layout.SSTABLE_NOTES_NAME, *notes.files}
    return SsTableEntry(
        generation=generation,
        path=name,
        in_memory_bytes=sum(b.nbytes for b in batches) if in_memory_bytes is None else in_memory_bytes,
        physical_rows=rows if order is None else len(order.rows),
        primary_key_bytes=sum(int(key.nbytes) for key in stored_keys) if stored_keys else None,
        notes=notes.copy(),
    )


def _summed(
    chunks: Iterator[pa.RecordBatch], primary_key: Sequence[str], sums: list[RowSum]
) -> Iterator[pa.RecordBatch]:
    """Pass on ``chunks``, and append their checksums to ``sums``."""
    for chunk in chunks:
        sums.append(RowSum.of([chunk], primary_key))
        yield chunk


def _column(batches: Sequence[pa.RecordBatch], schema: TableSchema, name: str) -> pa.Array:
    chunks = pa.chunked_array([batch.column(name) for batch in batches], schema.columns.field(name).type)
    return key_columns([chunks])[0]
