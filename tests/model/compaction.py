"""Changes to the base table by hand: compaction as the format asks for it, and direct writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable

from lancewal.base.table import BaseTable
from lancewal.format.schema import TOMBSTONE
from lancewal.format.shard_manifest import ShardManifest
from lancewal.predicate.dialect import among
from lancewal.sstable import SsTable
from lancewal.storage import ObjectStore

Row = dict[str, Any]


def merge_by_hand(store: ObjectStore, manifest: ShardManifest, generation: int) -> None:
    """One commit: newest rows merged by key, dead keys deleted, the marker set."""
    base = BaseTable.open(store.uri)
    names = list(base.schema.primary_key)
    newest: dict[tuple[Any, ...], Row] = {}
    for row in _stored_rows(store, base, manifest, generation):
        newest[tuple(row[name] for name in names)] = row
    live = [row for row in newest.values() if not row.pop(TOMBSTONE)]
    dead = [key for key in newest if newest[key] not in live]
    merge = base.dataset.merge_insert(names).when_matched_update_all().when_not_matched_insert_all()
    if dead:
        fields = [base.schema.plain.field(name) for name in names]
        keys = (
            " AND ".join(among(f.name, pa.array([v], f.type)) for f, v in zip(fields, key, strict=True))
            for key in dead
        )
        merge = merge.when_not_matched_by_source_delete(" OR ".join(f"({key})" for key in keys))
    merge = merge.mark_sstables_as_compacted([CompactedSsTable(str(manifest.shard_id), generation)])
    merge.execute(pa.Table.from_pylist(live, base.schema.plain))


def append_by_hand(store: ObjectStore, manifest: ShardManifest, generation: int) -> None:
    """Without a key: rows first, then a marked merge of nothing. Nobody may read in between."""
    base = BaseTable.open(store.uri)
    rows = [
        {name: row[name] for name in base.schema.names}
        for row in _stored_rows(store, base, manifest, generation)
    ]
    plain = base.schema.plain
    dataset = base.dataset
    dataset.insert(pa.Table.from_pylist(rows, plain), mode="append")
    merge = dataset.merge_insert(plain.names[0]).when_not_matched_insert_all()
    merge = merge.mark_sstables_as_compacted([CompactedSsTable(str(manifest.shard_id), generation)])
    merge.execute(plain.empty_table())


def upsert_into_base(uri: str, rows: pa.Table, key: Sequence[str]) -> None:
    merge = lance.dataset(uri).merge_insert(list(key))
    merge.when_matched_update_all().when_not_matched_insert_all().execute(rows)


def delete_from_base(uri: str, key: Mapping[str, Any]) -> None:
    schema = lance.dataset(uri).schema
    wanted = (among(name, pa.array([value], schema.field(name).type)) for name, value in key.items())
    lance.dataset(uri).delete(" AND ".join(wanted))


def _stored_rows(store: ObjectStore, base: BaseTable, manifest: ShardManifest, generation: int) -> list[Row]:
    """The rows of all SSTables up to ``generation`` that the base does not hold, oldest first."""
    marker = base.compacted_generation(manifest.shard_id)
    found: list[Row] = []
    for entry in sorted(manifest.sstables, key=lambda e: e.generation):
        if marker < entry.generation <= generation:
            sstable = SsTable.open(store, manifest.shard_id, entry)
            for batch in sstable.scan(base.schema, base.schema.names, with_tombstone=True):
                found += batch.to_pylist()
    return found
