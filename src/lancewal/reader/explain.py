"""A readable account of what a scan does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lancewal.lance_errors import row_count
from lancewal.predicate import Predicate
from lancewal.reader.memory_source import MemorySource
from lancewal.reader.snapshot import ShardSnapshot, Snapshot
from lancewal.reader.streamed_source import StreamedSource

if TYPE_CHECKING:
    from lancewal.reader.scan import Scan


def explained(scan: Scan) -> str:
    """Sources from the newest to the oldest, pruned shards, and where the filter is evaluated."""
    snapshot = scan.snapshot
    lines = [f"Scan of {snapshot.base.uri} at base version {snapshot.base.version}"]
    lines.append(f"  columns: {', '.join(scan.schema.names)}")
    if scan.predicate is not None:
        lines.append(f"  filter: {scan.predicate.sql}")
    if scan.limit is not None or scan.offset:
        lines.append(f"  limit: {'none' if scan.limit is None else scan.limit}, offset: {scan.offset}")
    pinned = scan.pinned_keys()
    if pinned is not None:
        lines.append(
            f"  the filter names {len(pinned[0])} keys: looked up, newest level first, by the MemTables' key "
            "index, the SSTables' bloom filter and key index, and the base's "
            f"{'BTree' if key_index_name(snapshot) else 'key column'}"
        )
    elif snapshot.schema.primary_key:
        lines.append("  newest version of each key wins, then the filter and the limit apply")
    else:
        lines.append("  append-only: every row of every level is read once")
    for shard in snapshot.shards:
        lines += _shard_lines(scan, shard)
    if snapshot.pruned:
        lines.append(f"  pruned {len(snapshot.pruned)} shards: {', '.join(map(str, snapshot.pruned))}")
    lines.append(f"  base: {row_count(snapshot.base.dataset)} rows{_pushed(scan)}")
    indexed = scan.predicate is not None and _index_names(snapshot, scan.predicate.columns)
    if indexed and pinned is None:
        lines.append(f"    scalar indexes on the filter's columns: {', '.join(indexed)}")
    return "\n".join(lines)


def key_index_name(snapshot: Snapshot) -> str | None:
    """The base's BTree on the first key column, if it has one."""
    names = _index_names(snapshot, frozenset(snapshot.schema.primary_key[:1]))
    return names[0] if names else None


def _shard_lines(scan: Scan, shard: ShardSnapshot) -> list[str]:
    where = "MemTables of the writer in this process" if shard.is_live else "WAL tail"
    lines = [f"  shard {shard.shard_id}: generation {shard.manifest.current_generation}, {where}"]
    for source in shard.sources:
        how = _filtered(source, scan.predicate) if isinstance(source, MemorySource) else _pushed(scan)
        if isinstance(source, StreamedSource):
            how += ", rows fetched from the log"
        lines.append(f"    {source.name}{'' if scan.pinned_keys() is not None else how}")
    return lines


def _filtered(source: MemorySource, predicate: Predicate | None) -> str:
    if predicate is None:
        return ""
    left = source.narrowed(predicate)
    if left is None:
        return ", filtered in memory"
    return f", filtered in memory: BTree on {left.column} leaves {len(left.rows)} of {source.row_count} rows"


def _pushed(scan: Scan) -> str:
    return ", filter pushed down" if scan.predicate is not None and scan.pinned_keys() is None else ""


def _index_names(snapshot: Snapshot, columns: frozenset[str]) -> list[str]:
    ids = {snapshot.schema.field_ids[name] for name in columns}
    return sorted(
        {
            index.name
            for index in snapshot.base.manifest.indexes
            if "BTree" in index.details_type and ids.intersection(index.field_ids[:1])
        }
    )
