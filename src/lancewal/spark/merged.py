"""The merged read as a Spark source: base fragments and shards as partitions of one snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import lance
import pyarrow as pa
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from lancewal.base import BaseTable, fragments_of, row_count
from lancewal.errors import InvalidInputError
from lancewal.format import KeySet
from lancewal.predicate import Predicate
from lancewal.reader import (
    BaseSource,
    Level,
    Newer,
    Request,
    Scan,
    ShardPlace,
    Snapshot,
    TableState,
    byte_width,
)
from lancewal.spark.columns import arrow_schema, for_spark
from lancewal.spark.filters import accepted, planned_to_sql, split_filters
from lancewal.spark.options import Options, state_to_read
from lancewal.spark.packed import packed_batches
from lancewal.spark.worker import settle
from lancewal.sstable import held_generation
from lancewal.storage import ObjectStore, Shelf, layout, ordered_map

#: About how much one task reads; small enough to spread tasks evenly.
_PARTITION_BYTES = 32 << 20
#: The most that one task reads of a fragment; a smaller part costs more for its task than it saves.
_MOST_BYTES = 256 << 20
#: A query that needs no more rows, or bytes to read, is answered while it is planned: a task costs more.
_FEW_ROWS = 1_000
_FEW_BYTES = 32 << 20
#: A result of no more bytes, in the columns that a query needs, comes with its plan: a worker costs more.
_SMALL_VIEW_BYTES = 1_000_000
#: The most bytes that are read for such a result, including columns that only hide or filter rows.
_LOOKED_AT_BYTES = 4 << 20
#: Above this many entries, one listing is cheaper than a request for each size.
_FEW_ENTRIES = 8
_REMOTE_READERS = 16

T = TypeVar("T")


@dataclass
class BasePartition(InputPartition):
    """Fragments of the base table; ``None`` is the whole table at once, for a search by its index.

    An empty tuple reads nothing, for an empty table. ``rows`` has the first and the end of the rows to read
    of one large fragment; deleted rows are not counted.
    """

    fragment_ids: tuple[int, ...] | None
    rows: tuple[int, int] | None = None


@dataclass
class ShardPartition(InputPartition):
    """Groups of shards; each key is in one group only."""

    groups: tuple[tuple[int, ...], ...]


@dataclass
class AnsweredPartition(InputPartition):
    """All rows of a small read, as an Arrow stream.

    The planner's front returns them itself, without a Python worker. It finds the stream in the pickle of
    this object, as the one argument of its constructor.
    """

    stream: bytes

    def __reduce__(self) -> tuple[type[AnsweredPartition], tuple[bytes]]:
        return AnsweredPartition, (self.stream,)

    @classmethod
    def of(cls, rows: pa.RecordBatch) -> AnsweredPartition:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_batch(rows)
        return cls(sink.getvalue().to_pybytes())

    def rows(self) -> Iterator[pa.RecordBatch]:
        with pa.ipc.open_stream(self.stream) as stream:
            yield from stream


#: The keys that hide rows of the base, by state and shards; cached for the next task of a query.
_newer_keys: Shelf[tuple[str, int, int, tuple[ShardPlace, ...]], KeySet] = Shelf()


@dataclass(frozen=True)
class Wanted:
    """What a query needs of a table: its columns, a filter in Lance's SQL, and how many rows are enough.

    With ``counts`` it needs only the number of rows.
    """

    columns: tuple[str, ...]
    sql: str | None = None
    limit: int | None = None
    counts: bool = False


class MergedState:
    """Reads partitions of one snapshot of a table; it is sent to every task.

    All tasks open the same SSTables, WAL positions and fragments, whatever is written, flushed or compacted
    in the meantime.
    """

    def __init__(self, options: Options, state: TableState) -> None:
        self._options = options
        self.state = state
        self._sizes: dict[int, int] = {}

    @property
    def columns(self) -> list[str]:
        """All columns of the table."""
        return self._base().base.schema.names

    def partitions(self, wanted: Wanted, *, whole_fragments: bool = False) -> list[InputPartition]:
        """What each task reads. A large fragment is for several tasks, unless ``whole_fragments``."""
        base = self._base()
        predicate = self._predicate(base, wanted.sql)
        chosen = self._chosen(base, predicate)
        groups: list[tuple[int, ...]] = [(number,) for number in chosen]
        if base.base.schema.primary_key:
            numbers = {self.state.shards[number].manifest.identity: number for number in chosen}
            sharing = base.pruner.key_groups(list(numbers))
            groups = [tuple(numbers[shard] for shard in group) for group in sharing]
        width = self._row_bytes(base, wanted, predicate)
        share = width / _whole_width(base.base)
        sizes = self._num_bytes(base, chosen)
        held = (sum(sizes[number] for number in group) for group in groups)
        found: list[InputPartition] = [
            ShardPartition(several) for several in _joined(groups, (int(size * share) for size in held))
        ]
        # Lance reads a range of a fragment's rows without the others, but not if there is a filter.
        whole_fragments |= wanted.counts or predicate is not None
        for fragments in _fragment_groups(base.base, width):
            found += _base_partitions(fragments, width, whole=whole_fragments)
        return found or [BasePartition(())]

    def read(self, partition: InputPartition, wanted: Wanted) -> Iterator[pa.RecordBatch]:
        """The rows of one partition, up to the limit."""
        base = self._base()
        request = Request(list(wanted.columns), self._predicate(base, wanted.sql), wanted.limit)
        left = wanted.limit
        for source, newer in self.levels(partition, request.predicate):
            for batch in source.batches(request, newer):
                if left is not None:
                    batch = batch.slice(0, left)
                    left -= batch.num_rows
                yield batch
                if left == 0:
                    return

    def count(self, partition: InputPartition, wanted: Wanted) -> int:
        """How many rows :meth:`read` would return; reads only keys and the filter's columns."""
        base = self._base()
        predicate = self._predicate(base, wanted.sql)
        total = 0
        for source, newer in self.levels(partition, predicate):
            if not isinstance(source, BaseSource):
                total += source.count(predicate, newer)
            elif predicate is None and not len(newer):
                total += _rows_of_fragments(source.base, partition)
            else:
                schema = source.base.schema
                columns = [*schema.primary_key] or schema.names[:1]
                batches = source.batches(Request(columns, predicate), newer)
                total += sum(batch.num_rows for batch in batches)
        return total

    def answer(self, wanted: Wanted) -> pa.Table | int | None:
        """The whole result of the query, its rows or their number; ``None`` if that is work for tasks."""
        base = self._base()
        schema = base.base.schema
        predicate = self._predicate(base, wanted.sql)
        chosen = self._chosen(base, predicate)
        places = [self.state.shards[number] for number in chosen]
        levels = sum(self._num_bytes(base, chosen).values())
        if levels > _FEW_BYTES or schema.blob_columns:
            return None
        columns = None if wanted.counts else list(wanted.columns)
        scan = Scan(self.state.open(self._options.storage, places), columns, predicate, wanted.limit)
        hidden = bool(places and schema.primary_key)
        looked_at = row_count(base.base.dataset)
        width = _width(schema.plain, schema.primary_key or schema.names[:1])
        if wanted.counts:
            looked_at = looked_at if hidden or predicate is not None else 0
            return scan.count_rows() if looked_at * width <= _FEW_BYTES else None
        if scan.pinned_keys() is None:
            if predicate is not None or wanted.limit is None or wanted.limit > _FEW_ROWS:
                return self._small_view(base, scan, wanted, levels)
            looked_at, width = wanted.limit, _width(schema.plain, wanted.columns)
        return scan.to_table() if looked_at * width <= _FEW_BYTES else None

    def _small_view(self, base: BaseSource, scan: Scan, wanted: Wanted, levels: int) -> pa.Table | None:
        """All rows of ``scan`` if they are small; ``levels`` is the size of the levels above the base.

        The length of texts and lists is known only as they are read, so reading stops if they get too large.
        """
        schema = base.base.schema
        read = {*wanted.columns, *(schema.primary_key if levels else ())}
        if scan.predicate is not None:
            read |= scan.predicate.columns
        width = _width(schema.plain, read)
        looked_at = row_count(base.base.dataset) * width + int(levels * width / _whole_width(base.base))
        if looked_at > _LOOKED_AT_BYTES:
            return None
        batches, held = [], 0
        for batch in scan.to_batches():
            held += batch.nbytes
            if held > _SMALL_VIEW_BYTES:
                return None
            batches.append(batch)
        return pa.Table.from_batches(batches, scan.schema)

    def search_partitions(self, column: str, *, indexed: bool) -> list[InputPartition]:
        """Partitions for a search: those of a read, but an indexed base table is one partition."""
        parts = self.partitions(Wanted((column,)), whole_fragments=True)
        if not indexed:
            return parts
        return [*(part for part in parts if isinstance(part, ShardPartition)), BasePartition(None)]

    def snapshot(self) -> Snapshot:
        """The base table alone, to check a search; :meth:`levels` has what is searched."""
        return self.state.open(self._options.storage, [])

    def predicate(self, sql: str | None) -> Predicate | None:
        return self._predicate(self._base(), sql)

    def levels(self, partition: InputPartition, predicate: Predicate | None) -> Iterator[Level]:
        """The levels of one partition, newest first, each with the keys that are newer than it."""
        base = self._base()
        if isinstance(partition, ShardPartition):
            for group in partition.groups:
                places = [self.state.shards[number] for number in group]
                yield from self.state.open(self._options.storage, places).levels_above_base()
        elif isinstance(partition, BasePartition) and partition.fragment_ids != ():
            chosen = partition.fragment_ids
            part = base if chosen is None else base.of_fragments(frozenset(chosen), partition.rows)
            yield part, Newer([self._newer_than_base(base, predicate)])

    def _newer_than_base(self, base: BaseSource, predicate: Predicate | None) -> KeySet:
        """The keys of all levels above the base whose shards can hold a matching row."""
        if not base.base.schema.primary_key:
            return KeySet.empty()
        places = tuple(self.state.shards[number] for number in self._chosen(base, predicate))

        def read() -> KeySet:
            # One shard at a time, so that the rows of its WAL are released before the next one is read.
            return KeySet.union(
                keys
                for place in places
                for keys in self.state.open(self._options.storage, [place]).newer_than_base.keys
            )

        key = (self.state.uri, self.state.version, self.state.checksum, places)
        return _newer_keys.get_or_make(key, read, lambda keys: keys.nbytes)

    def _chosen(self, base: BaseSource, predicate: Predicate | None) -> list[int]:
        """The shards that can hold a matching row.

        No other shard can hide matching rows of the base: the key rules a shard out, and a row
        that the shard would hide has the same key.
        """
        store = self._store()
        return [
            number
            for number, place in enumerate(self.state.shards)
            if _has_rows(store, base.base, place)
            and base.pruner.may_match(place.manifest.identity, predicate)
        ]

    def _num_bytes(self, base: BaseSource, chosen: Sequence[int]) -> dict[int, int]:
        """About how many bytes the levels of each shard hold."""
        store = self._store()
        unknown = [number for number in chosen if number not in self._sizes]
        found = ordered_map(
            lambda number: _num_bytes(store, base.base, self.state.shards[number]),
            unknown,
            1 if store.is_local else _REMOTE_READERS,
        )
        self._sizes |= dict(zip(unknown, found, strict=True))
        return {number: self._sizes[number] for number in chosen}

    def _row_bytes(self, base: BaseSource, wanted: Wanted, predicate: Predicate | None) -> int:
        """About how many bytes of each row are read."""
        schema = base.base.schema
        key = schema.primary_key
        # A filter on few keys reads few rows in full, and only the key of the others.
        few = predicate is not None and key and predicate.values_of(key[0]) is not None
        return _width(schema.plain, key if wanted.counts or few else wanted.columns)

    def _predicate(self, base: BaseSource, sql: str | None) -> Predicate | None:
        return None if sql is None else Predicate.parse(sql, base.base.schema.plain)

    def _base(self) -> BaseSource:
        return self.state.base(self._options.storage)

    def _store(self) -> ObjectStore:
        return ObjectStore.from_uri(self.state.uri, self._options.storage)


#: The metadata key of the first column under which the planner's front puts what a query needs.
REQUEST_KEY = "lancewal.request"


class MergedReader(DataSourceReader):
    """``spark.read.format("lancewal").load(uri)``.

    Spark 4.3 keeps one plan for each ``load``. A filter that one query pushes down also applies to
    every other query of that DataFrame or view, and to every other scan of the same query, which then
    silently lack rows. So filters are accepted only if ``filterPushdown`` says that there is one scan,
    or from the planner's front, which plans each scan by itself.
    """

    def __init__(self, options: Options, schema: st.StructType) -> None:
        # The snapshot is taken here: Spark pickles this object before it asks for partitions.
        self._merged = MergedState(options, state_to_read(options))
        #: The columns as Spark wants them; those in which it wants lists packed are binary.
        self._sent: st.StructType
        request, self._sent = _taken_request(schema)
        self._schema = _unpacked(self._sent, request.get("packed", {}))
        #: Whether the planner's front can return the rows of an answer itself.
        self._may_answer = bool(request.get("answer"))
        self._table_columns = self._merged.state.base(options.storage).base.schema.plain
        self._conditions: list[str] = []
        condition = options.text("filter")
        if condition is not None:
            Predicate.parse(condition, self._table_columns)
            self._conditions.append(condition)
        planned = (planned_to_sql(each, self._table_columns) for each in request.get("conditions", []))
        self._conditions += accepted([sql for sql in planned if sql is not None], self._table_columns)
        limits = [each for each in (options.number("limit"), request.get("limit")) if each is not None]
        self._wanted = Wanted(
            tuple(self._schema.fieldNames()), None, min(limits, default=None), bool(request.get("count"))
        )
        gone = [name for name in self._wanted.columns if name not in self._table_columns.names]
        if gone and not self._wanted.counts:
            raise InvalidInputError(
                f"the table has no column {', '.join(gone)} any more; its columns are "
                f"{', '.join(self._table_columns.names)}. Load it, or make the view, again"
            )
        self._apply_conditions()
        if options.flag("filterPushdown"):
            self.pushFilters = _PushFilters(self)  # type: ignore[method-assign]

    def partitions(self) -> list[InputPartition]:
        rows = self.answer() if self._may_answer else None
        return self._merged.partitions(self._wanted) if rows is None else [AnsweredPartition.of(rows)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        settle()
        if isinstance(partition, AnsweredPartition):
            for rows in partition.rows():
                yield from self._packed(rows)
            return
        schema = arrow_schema(self._schema)
        if self._wanted.counts:
            found = pa.array([self._merged.count(partition, self._wanted)], pa.int64())
            yield pa.RecordBatch.from_arrays([found] * len(schema), schema=schema)
            return
        for batch in self._merged.read(partition, self._wanted):
            if batch.num_rows:
                yield from self._packed(for_spark(batch, schema))

    def answer(self) -> pa.RecordBatch | None:
        """The rows of all partitions together, if they are few; otherwise ``None``."""
        schema = arrow_schema(self._schema)
        found = self._merged.answer(self._wanted)
        if isinstance(found, int):
            return pa.RecordBatch.from_arrays([pa.array([found], pa.int64())] * len(schema), schema=schema)
        if found is None:
            return None
        batches = found.combine_chunks().to_batches()
        rows = batches[0] if batches else pa.RecordBatch.from_pylist([], found.schema)
        return for_spark(rows, schema)

    def _packed(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if self._sent == self._schema:
            return iter([rows])
        return packed_batches(rows, arrow_schema(self._sent))

    def push(self, filters: Iterable[Filter]) -> list[Filter]:
        """Accept the filters that the table can evaluate; returns the rest, for Spark."""
        pushed, left = split_filters(filters, self._table_columns)
        self._conditions += pushed
        self._apply_conditions()
        return left

    def _apply_conditions(self) -> None:
        sql = " AND ".join(f"({each})" for each in self._conditions) or None
        self._wanted = replace(self._wanted, sql=sql)


def _taken_request(schema: st.StructType) -> tuple[dict[str, Any], st.StructType]:
    """The front's request, and the schema without it."""
    first = schema.fields[0].metadata if schema.fields else {}
    asked = json.loads(first.get(REQUEST_KEY, "{}"))
    return asked, st.StructType([st.StructField(f.name, f.dataType, f.nullable) for f in schema.fields])


def _unpacked(schema: st.StructType, packed: dict[str, Any]) -> st.StructType:
    """``schema`` with the types of the columns that the front wants packed."""
    types = {name: st.ArrayType.fromJson(type_) for name, type_ in packed.items()}
    fields = [st.StructField(f.name, types.get(f.name, f.dataType), f.nullable) for f in schema.fields]
    return st.StructType(fields)


class _PushFilters:
    """``pushFilters`` of a reader that also works if Spark's filter pushdown is off.

    If ``spark.sql.python.filterPushdown.enabled`` is off, Spark fails a read whose reader overrides the
    method. It checks the function behind the method. Here that is the inherited one, so Spark continues, and
    never calls this.
    """

    def __init__(self, reader: MergedReader) -> None:
        self._reader = reader
        # Set on the instance: a class attribute would be bound, and would be another object.
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        return self._reader.push(filters)


def _has_rows(store: ObjectStore, base: BaseTable, place: ShardPlace) -> bool:
    if len(place.wal_range):
        return True
    held = held_generation(base, store, place.manifest)
    return any(entry.generation > held for entry in place.manifest.sstables)


def _fragment_groups(base: BaseTable, width: int) -> Iterator[tuple[lance.LanceFragment, ...]]:
    fragments = fragments_of(base.dataset)
    return _joined(fragments, (_fragment_bytes(each, width) for each in fragments))


def _fragment_bytes(fragment: lance.LanceFragment, width: int) -> int:
    return int(fragment.physical_rows) * max(width, 1)


def _base_partitions(
    fragments: Sequence[lance.LanceFragment], width: int, *, whole: bool
) -> Iterator[BasePartition]:
    """The partition for the fragments of a group; several for a single large one, unless ``whole``."""
    ids = tuple(int(fragment.fragment_id) for fragment in fragments)
    parts = -(-_fragment_bytes(fragments[0], width) // _MOST_BYTES)
    if whole or parts < 2 or len(fragments) > 1:
        yield BasePartition(ids)
        return
    ends = [int(fragments[0].count_rows()) * number // parts for number in range(parts + 1)]
    yield from (BasePartition(ids, rows) for rows in pairwise(ends))


def _rows_of_fragments(base: BaseTable, partition: InputPartition) -> int:
    wanted = (isinstance(partition, BasePartition) and partition.fragment_ids) or ()
    chosen = [each for each in base.dataset.get_fragments() if each.fragment_id in wanted]
    return sum(int(each.count_rows()) for each in chosen)


def _width(schema: pa.Schema, columns: Iterable[str]) -> int:
    return sum(byte_width(schema.field(name).type) for name in columns)


def _whole_width(base: BaseTable) -> int:
    return max(_width(base.schema.plain, base.schema.names), 1)


def _num_bytes(store: ObjectStore, base: BaseTable, place: ShardPlace) -> int:
    """About how many bytes a shard's levels hold."""
    held = held_generation(base, store, place.manifest)
    flushed = sum(e.in_memory_bytes or 0 for e in place.manifest.sstables if e.generation > held)
    positions = place.wal_range
    if len(positions) > _FEW_ENTRIES:
        listed = store.list(layout.wal_dir(place.shard_id))
        return flushed + sum(info.size for info in listed)
    found = (store.head(layout.wal_entry(place.shard_id, position)) for position in positions)
    return flushed + sum(info.size for info in found if info is not None)


def _joined(items: Sequence[T], sizes: Iterable[int]) -> Iterator[tuple[T, ...]]:
    """Items in order, in groups that are large enough for a task."""
    group: list[T] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if group and total + size > _PARTITION_BYTES:
            yield tuple(group)
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield tuple(group)
