"""Scan: all rows of a table, each key once, in its newest version.

Levels are read from the newest to the oldest. Each level leaves out the rows whose keys a newer level holds,
deletes included. A filter may be pushed down into a level, because the keys that hide rows are all keys of
the newer levels, not only those of matching rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pyarrow as pa

from lancewal.base import row_count
from lancewal.errors import InvalidInputError
from lancewal.format import checked_columns, labelled, readable_columns, shown_schema
from lancewal.predicate import Predicate
from lancewal.reader.lookup import lookup, lookup_shown
from lancewal.reader.snapshot import ShardSnapshot, Snapshot
from lancewal.reader.source import Request, Source
from lancewal.storage import check_process, read_times

#: A filter that names at most this many keys is answered by looking them up.
MAX_PINNED_KEYS = 1_000
_MOST_ROWS = 1 << 61


class Scan:
    """One read of a snapshot. Every method reads the same state, any number of times.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1, "n": 5}, {"id": 2, "n": 7}], key="id")
    >>> scan = table.scan(columns=["n"], filter="id > 1")
    >>> scan.to_table().to_pylist(), scan.count_rows(), scan.to_batches().read_all().num_rows
    ([{'n': 7}], 1, 1)
    >>> print(scan.explain().splitlines()[1].strip())
    columns: n
    """

    def __init__(
        self,
        snapshot: Snapshot,
        columns: Sequence[str] | None = None,
        predicate: Predicate | None = None,
        limit: int | None = None,
        offset: int | None = None,
        with_row_source: bool = False,
        planned_in: float = 0.0,
    ) -> None:
        """``planned_in`` is how many seconds it took to get the snapshot."""
        for name, number in (("limit", limit), ("offset", offset)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
                raise InvalidInputError(f"{name} must be a number of rows, 0 or more, not {number!r}")
        self.snapshot = snapshot
        self.predicate = predicate
        # Lance takes numbers of 64 bits, and their sum must fit too.
        self.limit = None if limit is None else min(limit, _MOST_ROWS)
        self.offset = min(offset or 0, _MOST_ROWS)
        self._planned_in = planned_in
        # Rows of a table with blobs can be counted, but not be read with all columns.
        self._shows_blobs = columns is None and bool(snapshot.schema.blob_columns)
        shown = snapshot.schema.without_blobs.names if self._shows_blobs else columns
        self._columns = checked_columns(shown, snapshot.schema)
        self._row_source = with_row_source
        self.schema = shown_schema(snapshot.schema, self._columns, with_row_source)

    def to_table(self) -> pa.Table:
        """All rows at once."""
        check_process()
        self._refuse_blobs()
        with read_times.timed(self.snapshot.base.uri, "scan", self._planned_in):
            pinned = self.pinned_keys()
            if pinned is not None and self.limit is None and not self.offset:
                return self._pinned(pinned)
            return pa.Table.from_batches(self._batches(), self.schema)

    def to_pandas(self) -> Any:
        """All rows at once as a pandas DataFrame; pandas must be installed."""
        return self.to_table().to_pandas()

    def to_batches(self) -> pa.RecordBatchReader:
        """The rows as a stream; no more than a few batches are held at a time."""
        self._refuse_blobs()
        rows = read_times.streamed(self.snapshot.base.uri, "scan", self._batches(), self._planned_in)
        return pa.RecordBatchReader.from_batches(self.schema, rows)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_batches().__arrow_c_stream__(requested_schema)

    def count_rows(self) -> int:
        """How many rows there are; reads keys and the filter's columns at most."""
        check_process()
        with read_times.timed(self.snapshot.base.uri, "count", self._planned_in):
            pinned = self.pinned_keys()
            if pinned is not None:
                total = int(self._pinned(pinned).num_rows)
            else:
                found = self.snapshot.ask_levels(lambda source, newer: source.count(self.predicate, newer))
                total = sum(found)
        remaining = max(total - self.offset, 0)
        return remaining if self.limit is None else min(remaining, self.limit)

    def explain(self) -> str:
        """Describe what is read, what was left out, and what is pushed down."""
        return _explained(self)

    def pinned_keys(self) -> list[pa.Array] | None:
        """The key columns of all keys that the filter allows, if it names them and they are few.

        The filter must consist of simple conditions only. Lance evaluates all others, wherever the rows are,
        so that a filter that Lance refuses is refused whether or not a row is in memory.
        """
        names = self.snapshot.schema.primary_key
        if self.predicate is None or not names or not self.predicate.is_simple:
            return None
        choices = []
        for name in names:
            values = self.predicate.values_of(name)
            if values is None:
                return None
            choices.append(values)
        if len(choices) == 1:
            return choices if len(choices[0]) <= MAX_PINNED_KEYS else None
        size = 1
        for values in choices:
            size *= len(values)
        if size > MAX_PINNED_KEYS:
            return None
        combinations = list(product(*(values.to_pylist() for values in choices)))
        return [
            pa.array([key[place] for key in combinations], values.type)
            for place, values in enumerate(choices)
        ]

    def _refuse_blobs(self) -> None:
        if self._shows_blobs:
            readable_columns(self.snapshot.schema, self.snapshot.schema.names)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        check_process()
        pinned = self.pinned_keys()
        rows = self._all() if pinned is None else iter(self._pinned(pinned).to_batches())
        skip, remaining = self.offset, self.limit
        if remaining == 0:
            return
        for batch in rows:
            if skip:
                skipped = min(skip, batch.num_rows)
                skip -= skipped
                batch = batch.slice(skipped)
            if remaining is not None:
                batch = batch.slice(0, remaining)
                remaining -= batch.num_rows
            if batch.num_rows:
                yield batch
            if remaining == 0:
                return

    def _all(self) -> Iterator[pa.RecordBatch]:
        enough = None if self.limit is None else self.limit + self.offset
        for source, batch in self.snapshot.batches(Request(self._columns, self.predicate, enough)):
            rows = labelled(batch, source.name, source.shard_id) if self._row_source else batch
            yield pa.RecordBatch.from_arrays(rows.columns, schema=self.schema)

    def _pinned(self, keys: list[pa.Array]) -> pa.Table:
        assert self.predicate is not None, "only a filter pins keys"
        if self.predicate.only_names_values_of(self.snapshot.schema.primary_key):
            return lookup_shown(
                self.snapshot, keys, self._columns, self.schema, row_source=self._row_source
            ).table
        extra = [name for name in sorted(self.predicate.columns) if name not in self._columns]
        found = lookup(self.snapshot, keys, [*self._columns, *extra], row_source=self._row_source).table
        matching = self.predicate.mask(found)
        if not matching.all():
            found = found.filter(pa.array(matching))
        return found.select(self.schema.names)


def _explained(scan: Scan) -> str:
    """Describe the sources, newest first, the pruned shards, and where the filter is evaluated."""
    snapshot = scan.snapshot
    lines = [f"Scan of {snapshot.base.uri} at base version {snapshot.base.version}"]
    lines.append(f"  columns: {', '.join(scan.schema.names)}")
    if scan.predicate is not None:
        lines.append(f"  filter: {scan.predicate.sql}")
    if scan.limit is not None or scan.offset:
        lines.append(f"  limit: {'none' if scan.limit is None else scan.limit}, offset: {scan.offset}")
    pinned = scan.pinned_keys()
    if pinned is not None:
        has_btree = _index_names(snapshot, frozenset(snapshot.schema.primary_key[:1]))
        lines.append(
            f"  the filter names {len(pinned[0])} keys: looked up, newest level first, by the MemTables' key "
            "index, the SSTables' bloom filter and key index, and the base's "
            f"{'BTree' if has_btree else 'key column'}"
        )
    elif snapshot.schema.primary_key:
        lines.append("  newest version of each key wins, then the filter and the limit apply")
    else:
        lines.append("  append-only: every row of every level is read once")
    for shard in snapshot.shards:
        lines += _shard_lines(scan, shard)
    if snapshot.pruned:
        lines.append(f"  pruned {len(snapshot.pruned)} shards: {', '.join(map(str, snapshot.pruned))}")
    lines.append(f"  base: {row_count(snapshot.base.dataset)} rows{_how(scan, snapshot.base_source)}")
    indexed = scan.predicate is not None and _index_names(snapshot, scan.predicate.columns)
    if indexed and pinned is None:
        lines.append(f"    scalar indexes on the filter's columns: {', '.join(indexed)}")
    return "\n".join(lines)


def _shard_lines(scan: Scan, shard: ShardSnapshot) -> list[str]:
    where = "MemTables of the writer in this process" if shard.is_live else "WAL tail"
    lines = [f"  shard {shard.shard_id}: generation {shard.manifest.current_generation}, {where}"]
    return lines + [f"    {source.name}{_how(scan, source)}" for source in shard.sources]


def _how(scan: Scan, source: Source) -> str:
    return "" if scan.pinned_keys() is not None else source.explain(scan.predicate)


def _index_names(snapshot: Snapshot, columns: frozenset[str]) -> list[str]:
    ids = {snapshot.schema.field_ids[name] for name in columns}
    return sorted(
        {
            index.name
            for index in snapshot.base.manifest.indexes
            if "BTree" in index.details_type and ids.intersection(index.field_ids[:1])
        }
    )
