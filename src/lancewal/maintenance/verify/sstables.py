"""The SSTables that a shard's manifest names, and the directories that it does not name."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal import layout
from lancewal.base import table_schema
from lancewal.errors import LanceWalError
from lancewal.format.keys import key_values
from lancewal.format.shard_manifest import SsTableEntry
from lancewal.maintenance.verify.columns import mismatches
from lancewal.maintenance.verify.context import ShardCheck
from lancewal.maintenance.verify.findings import Kind, Severity
from lancewal.sstable import SsTable

_SIDECARS = (layout.PK_PAGE_DATA_NAME, layout.PK_PAGE_LOOKUP_NAME, layout.BLOOM_FILTER_NAME)
_SHARD_DIRECTORIES = ("manifest", "wal")


def check(shard: ShardCheck) -> None:
    for entry in shard.manifest.sstables:
        _check_entry(shard, entry)
    _check_directories(shard)


def _check_entry(shard: ShardCheck, entry: SsTableEntry) -> None:
    directory = layout.sstable_dir(shard.shard_id, entry.path)
    # Once the base holds a generation nobody needs its SSTable; a collector may just be at it.
    lost = Severity.ERROR if entry.generation > shard.marker else Severity.INFO
    names = {info.path.removeprefix(f"{directory}/") for info in shard.store.list(directory)}
    if not names:
        text = f"the manifest names {entry.path}, which does not exist"
        shard.found(Kind.DANGLING_PATH, lost, directory, text, entry.generation)
        return
    if shard.base.schema.primary_key:
        for name in _SIDECARS:
            if name not in names:
                text = f"{entry.path} has no {name}; Lance's own readers need it"
                shard.found(Kind.SIDECAR_MISSING, lost, f"{directory}/{name}", text, entry.generation)
    try:
        table = SsTable.open(shard.store, shard.shard_id, entry)
        _check_content(shard, entry, table, lost)
    except (LanceWalError, pa.ArrowException) as error:
        text = f"{entry.path} cannot be read: {error}"
        shard.found(Kind.SSTABLE_UNREADABLE, lost, directory, text, entry.generation)
    shard.checked["SSTables"] += 1


def _check_content(shard: ShardCheck, entry: SsTableEntry, table: SsTable, lost: Severity) -> None:
    directory = layout.sstable_dir(shard.shard_id, entry.path)
    dataset = table.dataset
    stored = table_schema(dataset).columns
    for severity, text in mismatches(stored, shard.base.schema):
        shard.found(Kind.FIELD_ID_MISMATCH, severity, directory, f"{entry.path}: {text}", entry.generation)
    rows = sum(fragment.physical_rows for fragment in dataset.get_fragments())
    if entry.physical_rows is not None and rows != entry.physical_rows:
        text = f"{entry.path} has {rows} rows, the manifest says {entry.physical_rows}"
        shard.found(Kind.ROW_COUNT_WRONG, lost, directory, text, entry.generation)
    if not shard.deep:
        return
    schema = shard.base.schema
    if schema.primary_key:
        _check_keys(shard, entry, table, lost)
        return
    shard.checked["rows"] += sum(batch.num_rows for batch in table.scan(schema, schema.names))


def _check_keys(shard: ShardCheck, entry: SsTableEntry, table: SsTable, lost: Severity) -> None:
    directory = layout.sstable_dir(shard.shard_id, entry.path)
    schema = shard.base.schema
    for batch in table.scan(schema, schema.names, with_tombstone=True):
        shard.checked["rows"] += batch.num_rows
    columns, offsets, _ = table.keys(schema)
    values = key_values(columns)
    doubled = len(values) - len(pc.unique(values))
    if doubled:
        text = f"{entry.path} has {doubled} keys more than once; older versions of them are not deleted"
        shard.found(Kind.DUPLICATE_KEYS, lost, directory, text, entry.generation)
        return
    wrong = int(np.count_nonzero(table.lookup(columns) != offsets))
    if wrong:
        text = f"{entry.path}: the key index or the bloom filter is wrong for {wrong} of {len(values)} keys"
        shard.found(Kind.SIDECAR_WRONG, lost, directory, text, entry.generation)


def _check_directories(shard: ShardCheck) -> None:
    listed = {entry.path for entry in shard.manifest.sstables}
    for name in shard.store.list_directories(layout.shard_dir(shard.shard_id)):
        path = layout.sstable_dir(shard.shard_id, name)
        if name in listed or name in _SHARD_DIRECTORIES:
            continue
        generation = layout.parse_sstable_name(name)
        if generation is None:
            text = f"{name} in the shard's directory is neither an SSTable nor anything else known"
            shard.found(Kind.UNKNOWN_DIRECTORY, Severity.WARNING, path, text)
        # What compaction took off the list stays for reads that began before.
        elif name not in shard.once_listed:
            text = f"the manifest does not name {name}; garbage collection removes it"
            shard.found(Kind.ORPHANED_SSTABLE, Severity.INFO, path, text, generation)
