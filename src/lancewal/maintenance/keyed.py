"""Compaction of a table with a primary key: a merge that carries its marker, and its fence.

1. Every commit raises the shard's fence by one (see :mod:`lancewal.base.markers`), from the value in the
   version it was made for. Of two compactors of a shard one commits; the other, however long
   it was stopped, changes nothing and looks at the new state. Deletes are no exception: one that
   came late would take a key away that was written again since.
2. The marker is in the commit with the last rows of its generations. Before that, readers go on
   reading the SSTables, whose rows lie over those of the base.
3. Rows that were committed without a marker, by a compactor that died between two commits, are
   as new as the SSTables they came from: the next compactor replaces or deletes them. Keys
   that were deleted without a marker are hidden by the SSTables' tombstones anyway.
4. A few deleted keys go with the rows, as a condition. Such a condition takes two kilobytes of
   memory for each key, so many keys go by themselves: as the source of a merge that deletes
   what it matches, in parts as large as those of rows.

The rows of a commit are the newest of their keys, found in two passes (:func:`newest_rows`). The first reads
only keys, newest generation first, and notes which rows no newer generation replaces; it keeps keys in
memory, no rows. The second reads the rows, oldest generation first, so that they reach the base table in
the order in which they were written.

Compactors of other makes know nothing of the fence. Beside one of those a key may come back that
was deleted in between; run one kind only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import BaseTable, fence_id, row_count
from lancewal.format import TOMBSTONE, SsTableEntry, TableSchema, key_values, superseded
from lancewal.maintenance.commits import (
    AlreadyCompactedError,
    JoinTooLargeError,
    LostRaceError,
    commit_errors,
    crash_point,
    marked_merge,
    open_base,
    until_won,
)
from lancewal.maintenance.plan import CommitPlan, ShardPlan
from lancewal.maintenance.reports import Progress, ProgressCallback, ShardReport
from lancewal.predicate import among, column_name, literal
from lancewal.sstable import SsTable
from lancewal.storage import ObjectStore, ordered_map

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]

_SEPARATOR = ":"
_REMOTE_READERS = 4
#: Rows are read in batches of about this size.
_BATCH_BYTES = 16 << 20
_MOST_ROWS = 8192
#: Where the base has so many times the rows of the source, an index on the key is faster than
#: reading the key column once.
_INDEX_PAYS_FROM = 500
#: Lance joins through an index within a fixed pool of memory, 300 MB by default.
_INDEXED_BYTES = 64 << 20
#: Deleted keys that go with rows as a condition. More of them take longer than a commit of their own.
_MOST_LISTED = 4096
#: What Lance needs for a key in a condition, about.
_LISTED_KEY_BYTES = 2 << 10


class KeyedCompaction:
    """Brings one shard's generations into a base table that has a key."""

    def __init__(self, plan: ShardPlan, store: ObjectStore, progress: ProgressCallback | None) -> None:
        self._plan = plan
        self._store = store
        self._progress = progress
        self._report = ShardReport(plan.shard_id)

    def run(self) -> ShardReport:
        name = f"compaction of shard {self._plan.shard_id}"
        for commit in self._plan.commits:
            _, lost = until_won(name, partial(self._merge_rest, commit))
            self._report.retries += lost
        return self._report

    def _merge_rest(self, commit: CommitPlan) -> None:
        """Merge what the base does not hold of one commit's generations."""
        base = open_base(self._store)
        held = base.compacted_generation(self._plan.shard_id)
        rest = [entry for entry in commit.sstables if entry.generation > held]
        self._skip([entry for entry in commit.sstables if entry.generation <= held])
        if not rest:
            return
        try:
            self._merge(base, rest)
        except AlreadyCompactedError as error:
            raise LostRaceError(str(error)) from error
        except LostRaceError:
            raise
        except Exception:
            # SSTables that are gone were compacted and collected by others: look again.
            newest = open_base(self._store)
            if newest.compacted_generation(self._plan.shard_id) > held:
                raise LostRaceError("the generations were compacted meanwhile") from None
            if _has_other_columns(newest, base):
                raise LostRaceError("the table's columns were changed meanwhile") from None
            raise

    def _merge(self, base: BaseTable, entries: Sequence[SsTableEntry]) -> None:
        shard_id, through = self._plan.shard_id, entries[-1].generation
        rows = newest_rows(self._store, shard_id, entries, base.schema)
        fence = fence_id(shard_id)
        raised = base.details.compacted.get(fence, 0)
        report = self._report
        changed: Counter[str] = Counter()
        for part in self._parts(rows, base):
            raised += 1
            markers = {fence: raised, **({shard_id: through} if part.is_last else {})}
            crash_point("merge: rows are read")
            # Lance does not see a conflict in a column that has only the id and the name of the one
            # that the rows were read for. Reading takes its time, so it is worth looking again.
            if base.dataset.latest_version != base.dataset.version and _has_other_columns(
                open_base(self._store), base
            ):
                raise LostRaceError("the table's columns were changed meanwhile")
            num_bytes = 0 if part.deletes else int(part.source.nbytes)
            changed.update(self._commit(base, part, markers))
            report.num_bytes += num_bytes
            report.commits += 1
            if not part.is_last:
                crash_point("merge: a part of the rows is committed")
        crash_point("merge: rows and marker are committed")
        report.generations += [entry.generation for entry in entries]
        report.rows_in += rows.rows_in
        report.rows_inserted += changed["num_inserted_rows"]
        report.rows_updated += changed["num_updated_rows"]
        report.rows_deleted += changed["num_deleted_rows"]
        logger.info(
            "compacted generations %d to %d: %d rows, %d keys deleted",
            entries[0].generation,
            through,
            rows.num_rows,
            rows.num_dead,
            extra={"shard": str(shard_id), "generation": through},
        )
        if self._progress is not None:
            self._progress(Progress(shard_id, "merged", through, report.rows_upserted))

    def _parts(self, rows: NewestRows, base: BaseTable) -> Iterator[_Part]:
        """What goes into each commit, deleted keys before rows; at least one part, maybe empty."""
        limit = self._plan.max_commit_bytes
        keys = _key_table(rows, base.schema)
        chunks = _chunks(rows.batches(), base.schema.plain, limit)
        if not rows.num_rows and rows.num_dead:
            for source, is_last in _chunks(keys.to_batches(), keys.schema, min(limit, _INDEXED_BYTES)):
                yield _Part(source, deletes=True, is_last=is_last)
            return
        listed = rows.num_dead <= min(_MOST_LISTED, limit // _LISTED_KEY_BYTES)
        if not listed:
            for source, _ in _chunks(keys.to_batches(), keys.schema, min(limit, _INDEXED_BYTES)):
                yield _Part(source, deletes=True)
        for source, is_last in chunks:
            yield _Part(source, dead=rows.dead if listed and is_last else (), is_last=is_last)

    def _commit(self, base: BaseTable, part: _Part, markers: Mapping[UUID, int]) -> dict[str, int]:
        if not part.deletes and not part.dead and _index_pays(base, part.source):
            try:
                # Lance counts the memory of a slice as that of the array it was cut from.
                combined = replace(part, source=part.source.combine_chunks())
                return self._execute(base, combined, markers, use_index=True)
            except JoinTooLargeError as error:
                logger.debug("joined without the index: %s", error)
        return self._execute(base, part, markers, use_index=False)

    def _execute(
        self, base: BaseTable, part: _Part, markers: Mapping[UUID, int], use_index: bool
    ) -> dict[str, int]:
        key = list(base.schema.primary_key)
        # Any such clause makes Lance read the whole key column, so only where it is needed.
        dead = is_dead(key, part.dead) if part.dead else None
        builder = marked_merge(base.dataset, key, markers).use_index(use_index)
        if part.deletes:
            builder = builder.when_matched_delete()
        else:
            builder = builder.when_matched_update_all().when_not_matched_insert_all()
        if dead is not None:
            builder = builder.when_not_matched_by_source_delete(dead)
        with commit_errors(f"compact shard {self._plan.shard_id}"):
            stats: dict[str, int] = builder.execute(part.source)
        return stats

    def _skip(self, entries: Sequence[SsTableEntry]) -> None:
        known = {*self._report.skipped, *self._report.generations}
        self._report.skipped += [entry.generation for entry in entries if entry.generation not in known]


def _has_other_columns(newest: BaseTable, base: BaseTable) -> bool:
    same = newest.schema.columns.equals(base.schema.columns)
    return not same or bool(newest.schema.replaced_since(base.version))


@dataclass(frozen=True)
class _Part:
    """One commit: rows of ``source``, and the keys that are ``dead``; or keys to delete, as ``source``."""

    source: pa.Table
    dead: Sequence[pa.Array] = ()
    deletes: bool = False
    is_last: bool = False


def _key_table(rows: NewestRows, schema: TableSchema) -> pa.Table:
    """The dead keys as rows with nothing but the key columns."""
    columns = pa.schema([schema.plain.field(name) for name in schema.primary_key])
    return pa.Table.from_arrays(list(rows.dead), schema=columns) if rows.dead else columns.empty_table()


def _chunks(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, limit: int
) -> Iterator[tuple[pa.Table, bool]]:
    """The rows as tables of about ``limit`` bytes, and whether it is the last; at least one, maybe empty."""
    chunk: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        for piece in _pieces(batch, limit):
            if chunk and size + piece.nbytes > limit:
                yield pa.Table.from_batches(chunk, schema), False
                chunk, size = [], 0
            chunk.append(piece)
            size += piece.nbytes
    yield pa.Table.from_batches(chunk, schema), True


def _pieces(batch: pa.RecordBatch, limit: int) -> Iterator[pa.RecordBatch]:
    if batch.nbytes <= limit:
        yield batch
        return
    rows = max(1, limit * batch.num_rows // batch.nbytes)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _index_pays(base: BaseTable, source: pa.Table) -> bool:
    if len(base.schema.primary_key) != 1 or source.nbytes > _INDEXED_BYTES:
        return False
    key_id = base.schema.field_ids[base.schema.primary_key[0]]
    indexed = any(index.field_ids == (key_id,) for index in base.manifest.indexes)
    return indexed and row_count(base.dataset) > _INDEX_PAYS_FROM * source.num_rows


@dataclass(frozen=True)
class _Keys:
    """Keys of one SSTable in the order of its rows, and which rows are tombstones or replaced within it."""

    columns: list[pa.Array]
    values: pa.Array
    tombstones: Mask
    newest: Mask | None


@dataclass(frozen=True)
class NewestRows:
    """Which rows of each SSTable count, oldest generation first.

    ``dead`` are the key columns of keys whose newest version is a tombstone.
    """

    schema: TableSchema
    sstables: Sequence[SsTable]
    kept: Sequence[Mask]
    dead: Sequence[pa.Array]
    rows_in: int

    @property
    def num_rows(self) -> int:
        return sum(int(np.count_nonzero(mask)) for mask in self.kept)

    @property
    def num_dead(self) -> int:
        return len(self.dead[0]) if self.dead else 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The live rows, in the table's current columns."""
        for table, kept in zip(self.sstables, self.kept, strict=True):
            if kept.any():
                yield from _rows(table, self.schema, kept)


def newest_rows(
    store: ObjectStore, shard_id: UUID, entries: Sequence[SsTableEntry], schema: TableSchema
) -> NewestRows:
    """Which rows of ``entries`` (in any order) are the newest of their keys."""
    newest_first = sorted(entries, key=lambda entry: -entry.generation)
    kept: list[Mask] = []
    dead: list[list[pa.Array]] = []
    workers = 1 if store.is_local else _REMOTE_READERS
    levels = list(ordered_map(partial(_read_keys, store, shard_id, schema), newest_first, workers))
    for keys, replaced in zip(levels, superseded([keys.values for keys in levels]), strict=True):
        counts = ~replaced
        if keys.newest is not None:
            counts &= keys.newest
        dying = counts & keys.tombstones
        if dying.any():
            dead.append([column.filter(pa.array(dying)) for column in keys.columns])
        kept.append(counts & ~keys.tombstones)
    return NewestRows(
        schema,
        [SsTable.open(store, shard_id, entry) for entry in reversed(newest_first)],
        kept[::-1],
        [pa.concat_arrays(parts) for parts in zip(*dead, strict=True)],
        sum(len(keys.values) for keys in levels),
    )


def _read_keys(store: ObjectStore, shard_id: UUID, schema: TableSchema, entry: SsTableEntry) -> _Keys:
    table = SsTable.open(store, shard_id, entry)
    columns, offsets, tombstones = table.keys(schema)
    values = key_values(columns)
    newest: Mask | None = None
    if len(pc.unique(values)) != len(values):
        # Written without a deletion vector; which version of a key counts there the lookup knows.
        newest = table.lookup(columns) == offsets
    return _Keys(columns, values, tombstones, newest)


def _rows(table: SsTable, schema: TableSchema, kept: Mask) -> Iterator[pa.RecordBatch]:
    start = 0
    scan = table.scan(schema, schema.names, with_tombstone=True, batch_size=rows_per_batch(table.entry))
    for batch in scan:
        mask = kept[start : start + batch.num_rows]
        start += batch.num_rows
        rows = batch.drop_columns([TOMBSTONE])
        if not mask.all():
            rows = rows.filter(pa.array(mask))
        if rows.num_rows:
            yield rows


def rows_per_batch(entry: SsTableEntry) -> int:
    """How many rows of an SSTable to read at a time, so that wide ones do not come thousands at once."""
    if not entry.in_memory_bytes or not entry.physical_rows:
        return _MOST_ROWS
    row_bytes = max(entry.in_memory_bytes // entry.physical_rows, 1)
    return min(max(_BATCH_BYTES // row_bytes, 1), _MOST_ROWS)


def is_dead(names: Sequence[str], columns: Sequence[pa.Array]) -> str:
    """The condition, in Lance's SQL, that a row has one of the keys in ``columns``, which are not empty.

    One column becomes a list of its values. For several columns Lance has no list of tuples, and
    alternatives joined by OR cost it a quarter of a millisecond each; so the columns are joined to one text
    per row, in a way that no two keys share, and compared with a list of such texts.

    >>> is_dead(["id"], [pa.array([1, 2])])
    '`id` IN (1, 2)'
    >>> is_dead(["a", "b"], [pa.array([1]), pa.array(["x:y"])])
    "concat(cast(`a` as string), ':', cast(octet_length(`b`) as string), ':', `b`, ':') IN ('1:3:x:y:')"
    """
    if len(names) == 1:
        return among(names[0], columns[0])
    expression = ", ".join(_sql_parts(name, column.type) for name, column in zip(names, columns, strict=True))
    parts = [part for column in columns for part in _text_parts(column)]
    texts = pc.binary_join_element_wise(*parts, "", _SEPARATOR)
    return f"concat({expression}) IN ({', '.join(map(literal, texts))})"


def _sql_parts(name: str, type_: pa.DataType) -> str:
    column = column_name(name)
    if _is_text(type_):
        return f"cast(octet_length({column}) as string), '{_SEPARATOR}', {column}, '{_SEPARATOR}'"
    if _is_binary(type_):
        return f"encode({column}, 'hex'), '{_SEPARATOR}'"
    return f"cast({column} as string), '{_SEPARATOR}'"


def _text_parts(column: pa.Array) -> list[pa.Array]:
    """The texts that :func:`_sql_parts` makes, each without the separator after it."""
    if _is_text(column.type):
        return [pc.binary_length(column).cast(pa.string()), column.cast(pa.string())]
    if _is_binary(column.type):
        return [pa.array([value.hex() for value in column.to_pylist()], pa.string())]
    return [column.cast(pa.string())]


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _is_binary(type_: pa.DataType) -> bool:
    return bool(pa.types.is_binary(type_) or pa.types.is_large_binary(type_))
