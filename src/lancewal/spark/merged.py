"""The merged read as a Spark source: base fragments and shards as partitions of one snapshot."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeVar

import pyarrow as pa
from pyspark.sql import datasource as ds
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from lancewal.base import BaseTable, fragments_of
from lancewal.errors import InvalidInputError
from lancewal.format import KeySet
from lancewal.predicate import Predicate, column_name
from lancewal.reader import BaseSource, Newer, Request, ShardPlace, TableState, byte_width
from lancewal.spark.columns import arrow_schema, for_spark
from lancewal.spark.options import Options, state_to_read
from lancewal.sstable import held_generation
from lancewal.storage import ObjectStore, Shelf, layout, ordered_map

_COMPARISONS: dict[type[ds.Filter], str] = {
    ds.EqualTo: "=",
    ds.GreaterThan: ">",
    ds.GreaterThanOrEqual: ">=",
    ds.LessThan: "<",
    ds.LessThanOrEqual: "<=",
}
_TEXT_FUNCTIONS: dict[type[ds.Filter], str] = {
    ds.StringStartsWith: "starts_with",
    ds.StringEndsWith: "ends_with",
    ds.StringContains: "contains",
}
#: Longer lists are left to Spark, which looks values up in a hash table.
_MAX_VALUES = 1_000


def split_filters(filters: Iterable[ds.Filter], columns: pa.Schema) -> tuple[list[str], list[ds.Filter]]:
    """The filters that the table can evaluate, as Lance's SQL, and those that are left to Spark."""
    pushed: list[str] = []
    left: list[ds.Filter] = []
    for each in filters:
        sql = to_sql(each, columns)
        if sql is None:
            left.append(each)
        else:
            pushed.append(sql)
    return pushed, left


def to_sql(condition: ds.Filter, columns: pa.Schema) -> str | None:
    """One filter over ``columns``; ``None`` if the table might evaluate it differently from Spark."""
    negated = isinstance(condition, ds.Not)
    inner = condition.child if isinstance(condition, ds.Not) else condition
    path = getattr(inner, "attribute", ())
    type_ = _type_of(path, columns)
    if type_ is None:
        return None
    sql = _condition(inner, ".".join(column_name(part) for part in path), type_, negated)
    if sql is None:
        return None
    try:
        Predicate.parse(sql, columns)
    except InvalidInputError:
        return None
    return sql


def _condition(condition: ds.Filter, column: str, type_: pa.DataType, negated: bool) -> str | None:
    negation = "NOT " if negated else ""
    if isinstance(condition, ds.IsNull | ds.IsNotNull):
        is_null = isinstance(condition, ds.IsNull) != negated
        return f"{column} IS {'' if is_null else 'NOT '}NULL"
    if type(condition) in _TEXT_FUNCTIONS:
        function = _TEXT_FUNCTIONS[type(condition)]
        text = _literal(getattr(condition, "value", None), pa.string()) if _is_text(type_) else None
        return None if text is None else f"{negation}{function}({column}, {text})"
    if isinstance(condition, ds.In):
        literals = [_literal(value, type_) for value in condition.value]
        if not literals or len(literals) > _MAX_VALUES or None in literals:
            return None
        return f"{negation}({column} IN ({', '.join(map(str, literals))}))"
    if isinstance(condition, ds.EqualNullSafe):
        if condition.value is None:
            return f"{column} IS {'NOT ' if negated else ''}NULL"
        literal = _literal(condition.value, type_)
        if literal is None:
            return None
        return f"({column} IS NULL OR {column} != {literal})" if negated else f"{column} = {literal}"
    operator = _COMPARISONS.get(type(condition))
    literal = _literal(getattr(condition, "value", None), type_)
    if operator is None or literal is None:
        return None
    return f"{negation}({column} {operator} {literal})" if negated else f"{column} {operator} {literal}"


def _literal(value: object, type_: pa.DataType) -> str | None:
    """``value`` in Lance's SQL for a column of ``type_``; ``None`` if that is not safe."""
    types = pa.types
    if isinstance(value, bool):
        return ("true" if value else "false") if types.is_boolean(type_) else None
    if isinstance(value, int | Decimal) and types.is_integer(type_):
        return str(int(value)) if value == int(value) else None
    if isinstance(value, Decimal) and types.is_decimal(type_):
        return (
            f"cast('{value:f}' as decimal({type_.precision}, {type_.scale}))" if _fits(value, type_) else None
        )
    if isinstance(value, float) and types.is_floating(type_):
        # In Spark -0.0 equals 0.0 and all NaNs are equal; the table compares their bits.
        return repr(value) if math.isfinite(value) and value != 0 else None
    if isinstance(value, str) and _is_text(type_):
        return "'" + value.replace("'", "''") + "'" if value.isprintable() or value.isspace() else None
    if isinstance(value, bytes | bytearray) and (types.is_binary(type_) or types.is_large_binary(type_)):
        return f"X'{bytes(value).hex()}'"
    if isinstance(value, dt.datetime) and types.is_timestamp(type_):
        return _timestamp(value, type_)
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime) and types.is_date32(type_):
        return f"date '{value.isoformat()}'"
    return None


def _timestamp(value: dt.datetime, type_: pa.DataType) -> str | None:
    if type_.unit not in ("us", "ns") or (value.tzinfo is None) != (type_.tz is None):
        return None
    if value.tzinfo is not None:
        value = value.astimezone(dt.UTC).replace(tzinfo=None)
    zone = "" if type_.tz is None else "Z"
    return f"timestamp '{value.isoformat(sep=' ', timespec='microseconds')}{zone}'"


def _fits(value: Decimal, type_: pa.DataType) -> bool:
    try:
        pa.scalar(value, pa.decimal128(type_.precision, type_.scale))
    except (pa.ArrowException, ValueError):
        return False
    return True


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _type_of(path: Sequence[str], columns: pa.Schema) -> pa.DataType | None:
    """The type of a column, or of a field of a struct; ``None`` for a nested type."""
    if not path or columns.get_field_index(path[0]) < 0:
        return None
    type_ = columns.field(path[0]).type
    for name in path[1:]:
        if not pa.types.is_struct(type_) or type_.get_field_index(name) < 0:
            return None
        type_ = type_.field(name).type
    return None if type_.num_fields else type_


#: About how much one task reads: small enough for an even spread.
_PARTITION_BYTES = 32 << 20
#: Above this many entries one listing is cheaper than a request for each size.
_FEW_ENTRIES = 8
_REMOTE_READERS = 16

T = TypeVar("T")


@dataclass
class BasePartition(InputPartition):
    """Fragments of the base table; without fragments it reads nothing, for an empty table."""

    fragment_ids: tuple[int, ...]


@dataclass
class ShardPartition(InputPartition):
    """Groups of shards; a key is in one group only."""

    groups: tuple[tuple[int, ...], ...]


#: The keys that hide rows of the base, by their shards; kept for the next task of a query.
_newer_keys: Shelf[tuple[str, int, int, tuple[ShardPlace, ...]], KeySet] = Shelf()


class MergedState:
    """Reads partitions of one snapshot of a table; it is sent to every task.

    The driver reads no rows. All tasks open the same SSTables, WAL positions and fragments, whatever
    is written, flushed or compacted in the meantime.
    """

    def __init__(self, options: Options, state: TableState) -> None:
        self._options = options
        self.state = state
        self.sql: str | None = None

    def partitions(self) -> list[InputPartition]:
        base = self._base()
        chosen = self._chosen(base, self._predicate(base))
        groups: list[tuple[int, ...]] = [(number,) for number in chosen]
        if base.base.schema.primary_key:
            numbers = {self.state.shards[number].identity: number for number in chosen}
            sharing = base.pruner.key_groups(list(numbers))
            groups = [tuple(numbers[shard] for shard in group) for group in sharing]
        store = self._store()
        sizes = ordered_map(
            lambda group: sum(_num_bytes(store, base.base, self.state.shards[number]) for number in group),
            groups,
            1 if store.is_local else _REMOTE_READERS,
        )
        found: list[InputPartition] = [
            ShardPartition(several) for several in _joined(groups, sizes) if several
        ]
        found += [BasePartition(ids) for ids in _fragment_groups(base.base)]
        return found or [BasePartition(())]

    def read(self, partition: InputPartition, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        base = self._base()
        request = Request(list(columns), self._predicate(base))
        if isinstance(partition, ShardPartition):
            for group in partition.groups:
                places = [self.state.shards[number] for number in group]
                snapshot = self.state.open(self._options.storage, places)
                for source, newer in snapshot.levels_above_base():
                    yield from source.batches(request, newer)
        elif isinstance(partition, BasePartition) and partition.fragment_ids:
            part = base.of_fragments(frozenset(partition.fragment_ids))
            yield from part.batches(request, Newer([self._newer_than_base(base, request.predicate)]))

    def _newer_than_base(self, base: BaseSource, predicate: Predicate | None) -> KeySet:
        """The keys of all levels above the base whose shards can hold a matching row."""
        if not base.base.schema.primary_key:
            return KeySet.empty()
        places = tuple(self.state.shards[number] for number in self._chosen(base, predicate))

        def read() -> KeySet:
            # One shard at a time: the rows of its WAL are released before the next one is read.
            return KeySet.union(
                keys
                for place in places
                for keys in self.state.open(self._options.storage, [place]).newer_than_base.keys
            )

        key = (self.state.uri, self.state.version, self.state.checksum, places)
        return _newer_keys.get_or_make(key, read, lambda keys: keys.nbytes)

    def _chosen(self, base: BaseSource, predicate: Predicate | None) -> list[int]:
        """The shards that can hold a matching row.

        No other shard can hide matching rows of the base: a shard is ruled out by the key, and a row
        that it would hide has the same key.
        """
        store = self._store()
        return [
            number
            for number, place in enumerate(self.state.shards)
            if _has_rows(store, base.base, place) and base.pruner.may_match(place.identity, predicate)
        ]

    def _predicate(self, base: BaseSource) -> Predicate | None:
        return None if self.sql is None else Predicate.parse(self.sql, base.base.schema.plain)

    def _base(self) -> BaseSource:
        return self.state.base(self._options.storage)

    def _store(self) -> ObjectStore:
        return ObjectStore.from_uri(self.state.uri, self._options.storage)


class MergedReader(DataSourceReader):
    """``spark.read.format("lancewal").load(uri)``.

    Spark 4.3 keeps one plan for each ``load``, and a filter that one query pushes down also applies to
    every other query, and to every other scan of the same query, of that DataFrame or view: they
    silently lack rows. So filters are accepted only if ``filterPushdown`` says that there is one scan.
    """

    def __init__(self, options: Options, schema: st.StructType) -> None:
        # The snapshot is taken here: Spark pickles this object before it asks for partitions.
        self._merged = MergedState(options, state_to_read(options))
        self._columns = schema.fieldNames()
        self._schema = schema
        self._conditions: list[str] = []
        self._table_columns = self._merged.state.base(options.storage).base.schema.plain
        condition = options.text("filter")
        if condition is not None:
            Predicate.parse(condition, self._table_columns)
            self._conditions.append(condition)
            self._apply_conditions()
        if options.flag("filterPushdown"):
            self.pushFilters = _PushFilters(self)  # type: ignore[method-assign]

    def partitions(self) -> list[InputPartition]:
        return self._merged.partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        wanted = arrow_schema(self._schema)
        for batch in self._merged.read(partition, self._columns):
            if batch.num_rows:
                yield for_spark(batch, wanted)

    def push(self, filters: Iterable[Filter]) -> list[Filter]:
        """Accept the filters that the table can evaluate; returns the rest, for Spark."""
        pushed, left = split_filters(filters, self._table_columns)
        self._conditions += pushed
        self._apply_conditions()
        return left

    def _apply_conditions(self) -> None:
        self._merged.sql = " AND ".join(f"({sql})" for sql in self._conditions) or None


class _PushFilters:
    """``pushFilters`` of a reader that also works if Spark's filter pushdown is off.

    Spark fails a read whose reader overrides the method while
    ``spark.sql.python.filterPushdown.enabled`` is off. It looks at the function behind the method:
    if that is the inherited one it continues, and never calls this.
    """

    def __init__(self, reader: MergedReader) -> None:
        self._reader = reader
        # On the instance: a class attribute would be bound, and so be another object.
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        return self._reader.push(filters)


def _has_rows(store: ObjectStore, base: BaseTable, place: ShardPlace) -> bool:
    if len(place.wal_range):
        return True
    held = held_generation(base, store, place.manifest)
    return any(entry.generation > held for entry in place.manifest.sstables)


def _fragment_groups(base: BaseTable) -> Iterator[tuple[int, ...]]:
    width = max(sum(byte_width(field.type) for field in base.schema.plain), 1)
    fragments = fragments_of(base.dataset)
    sizes = (int(fragment.physical_rows) * width for fragment in fragments)
    return _joined([int(fragment.fragment_id) for fragment in fragments], sizes)


def _num_bytes(store: ObjectStore, base: BaseTable, place: ShardPlace) -> int:
    """About how much a shard's levels hold."""
    held = held_generation(base, store, place.manifest)
    flushed = sum(e.in_memory_bytes or 0 for e in place.manifest.sstables if e.generation > held)
    positions = place.wal_range
    if len(positions) > _FEW_ENTRIES:
        listed = store.list(layout.wal_dir(place.shard_id))
        return flushed + sum(info.size for info in listed)
    found = (store.head(layout.wal_entry(place.shard_id, position)) for position in positions)
    return flushed + sum(info.size for info in found if info is not None)


def _joined(items: Sequence[T], sizes: Iterable[int]) -> Iterator[tuple[T, ...]]:
    """Items in their order, joined until a group has enough for a task."""
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
