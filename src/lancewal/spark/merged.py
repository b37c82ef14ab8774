"""The merged read by format: base fragments and shards as partitions, one state for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from lancewal import layout
from lancewal.base import BaseTable
from lancewal.format.keys import key_values
from lancewal.lineage import held_generation
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map
from lancewal.predicate import Predicate
from lancewal.reader.key_set import KeySet
from lancewal.reader.pruning import ShardPruner
from lancewal.reader.source import Request, Source
from lancewal.spark.columns import arrow_schema, for_spark
from lancewal.spark.filters import split_filters
from lancewal.spark.options import Options
from lancewal.spark.snapshot import (
    ShardPlace,
    TableState,
    base_of,
    newer_than_base,
    read_state,
    resolved_shard,
)
from lancewal.sstable.lance_errors import lance_errors

#: What one task reads, by a rough estimate: small enough to be spread evenly.
_PARTITION_BYTES = 32 << 20
_BATCH_ROWS = 16_384
#: Beyond so many entries one listing is cheaper than asking for each one's size.
_FEW_ENTRIES = 8
_REMOTE_READERS = 16

T = TypeVar("T")


@dataclass
class BasePartition(InputPartition):
    """Fragments of the base table; none of them stands for an empty table."""

    fragment_ids: tuple[int, ...]


@dataclass
class ShardPartition(InputPartition):
    """Groups of shards; a key is in one group only."""

    groups: tuple[tuple[int, ...], ...]


class MergedState:
    """Reads partitions of one state of a table; goes to every task as a part of its function."""

    def __init__(self, options: Options, state: TableState) -> None:
        self._options = options
        self.state = state
        self.sql: str | None = None

    def partitions(self) -> list[InputPartition]:
        base = self._base()
        chosen = self._chosen(base, self._predicate(base))
        identities = [self.state.shards[number].identity for number in chosen]
        groups: list[tuple[int, ...]] = [(number,) for number in chosen]
        pruner = ShardPruner(base.details, base.schema)
        if base.schema.primary_key and not pruner.keys_have_one_shard(identities):
            groups = [tuple(chosen)]
        store = ObjectStore.from_uri(self.state.uri, self._options.storage)
        sizes = ordered_map(
            lambda group: sum(_num_bytes(store, base, self.state.shards[number]) for number in group),
            groups,
            1 if store.is_local else _REMOTE_READERS,
        )
        found: list[InputPartition] = [
            ShardPartition(several) for several in _joined(groups, sizes) if several
        ]
        found += [BasePartition(ids) for ids in _fragment_groups(base)]
        return found or [BasePartition(())]

    def read(self, partition: InputPartition, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        base = self._base()
        request = Request(list(columns), self._predicate(base))
        if isinstance(partition, ShardPartition):
            for group in partition.groups:
                yield from self._read_shards(base, group, request)
        elif isinstance(partition, BasePartition) and partition.fragment_ids:
            yield from self._read_base(base, partition, request)

    def _read_shards(
        self, base: BaseTable, group: Sequence[int], request: Request
    ) -> Iterator[pa.RecordBatch]:
        store = ObjectStore.from_uri(self.state.uri, self._options.storage)
        places = [self.state.shards[number] for number in group]
        sources = [s for place in places for s in resolved_shard(store, base, place).sources]
        if len(places) > 1:
            sources.sort(key=_newest_first)
        newer = KeySet.empty()
        for source in sources:
            yield from source.batches(request, newer)
            if base.schema.primary_key:
                newer |= source.keys()

    def _read_base(
        self, base: BaseTable, partition: BasePartition, request: Request
    ) -> Iterator[pa.RecordBatch]:
        chosen = self._chosen(base, request.predicate)
        places = tuple(self.state.shards[number] for number in chosen)
        newer = newer_than_base(self.state, places, self._options.storage)
        key = list(base.schema.primary_key) if len(newer) else []
        wanted = set(partition.fragment_ids)
        scanner = base.dataset.scanner(
            columns=[*request.columns, *(name for name in key if name not in request.columns)],
            filter=request.sql,
            fragments=[f for f in base.dataset.get_fragments() if f.fragment_id in wanted],
            batch_size=_BATCH_ROWS,
        )
        with lance_errors("read the base table"):
            for batch in scanner.to_batches():
                rows = batch.select(list(request.columns))
                if key:
                    hidden = newer.contains(key_values([batch.column(name) for name in key]))
                    rows = rows.filter(pa.array(~hidden)) if hidden.any() else rows
                yield rows

    def _chosen(self, base: BaseTable, predicate: Predicate | None) -> list[int]:
        """The shards that can hold a matching row.

        Those can also hide rows of the base, and no others: a shard is ruled out by its part of
        the key, and the row that it would hide has the same key.
        """
        pruner = ShardPruner(base.details, base.schema)
        store = ObjectStore.from_uri(self.state.uri, self._options.storage)
        return [
            number
            for number, place in enumerate(self.state.shards)
            if _has_rows(store, base, place) and pruner.may_match(place.identity, predicate)
        ]

    def _predicate(self, base: BaseTable) -> Predicate | None:
        return None if self.sql is None else Predicate.parse(self.sql, base.schema.plain)

    def _base(self) -> BaseTable:
        return base_of(self.state, self._options.storage)


class MergedReader(DataSourceReader):
    """``spark.read.format("lancewal").load(uri)``.

    Spark 4.3 keeps one plan for each ``load``, and what one query pushes down also applies to every
    other query, and every other scan of the same query, of that DataFrame or view: they silently
    lack rows. So filters are taken over only where ``filterPushdown`` says that there is but one.
    """

    def __init__(self, options: Options, schema: st.StructType) -> None:
        # The state is taken here: Spark pickles this object before it asks for partitions.
        store = ObjectStore.from_uri(options.uri, options.storage)
        self._merged = MergedState(options, read_state(store))
        self._columns = schema.fieldNames()
        self._schema = schema
        self._conditions: list[str] = []
        self._table_columns = base_of(self._merged.state, options.storage).schema.plain
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
        """Take over what the table can evaluate; the rest is left to Spark."""
        pushed, left = split_filters(filters, self._table_columns)
        self._conditions += pushed
        self._apply_conditions()
        return left

    def _apply_conditions(self) -> None:
        self._merged.sql = " AND ".join(f"({sql})" for sql in self._conditions) or None


class _PushFilters:
    """``pushFilters`` of a reader that also works where Spark's filter pushdown is off.

    Spark fails a read whose reader overrides the method while
    ``spark.sql.python.filterPushdown.enabled`` is off. It tells by the function behind the
    method; with the inherited one there it goes on, and never calls this.
    """

    def __init__(self, reader: MergedReader) -> None:
        self._reader = reader
        # On the instance: as a class attribute it would be bound, and no longer the same.
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        return self._reader.push(filters)


def _has_rows(store: ObjectStore, base: BaseTable, place: ShardPlace) -> bool:
    if len(place.wal_range):
        return True
    held = held_generation(base, store, place.manifest)
    return any(entry.generation > held for entry in place.manifest.sstables)


def _newest_first(source: Source) -> tuple[bool, int, str]:
    """The order of levels whose shards say nothing about which is newer, as everywhere in lancewal."""
    return not source.in_memory, -source.generation, str(source.shard_id)


def _fragment_groups(base: BaseTable) -> Iterator[tuple[int, ...]]:
    width = max(sum(_byte_width(field.type) for field in base.schema.plain), 1)
    fragments = base.dataset.get_fragments()
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


def _byte_width(type_: pa.DataType) -> int:
    if pa.types.is_fixed_size_list(type_):
        return int(type_.list_size) * _byte_width(type_.value_type)
    if type_.num_fields:
        return sum(_byte_width(type_.field(i).type) for i in range(type_.num_fields))
    try:
        return max(int(type_.bit_width) // 8, 1)
    except ValueError:
        return 64
