"""The change feed as a Spark source: a stream, or a batch between two places."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as st
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from lancewal.base import find_manifest
from lancewal.errors import InvalidInputError, StorageError
from lancewal.format import TableSchema
from lancewal.predicate import Predicate
from lancewal.publish import (
    CHANGE_TYPE,
    DELETE,
    FEED_COLUMNS,
    INSERT,
    SHARD_ID,
    UPSERT,
    ChangeFeed,
    ending_before_pointers,
)
from lancewal.reader import BaseSource, ShardPlace, TableState, read_state
from lancewal.shard import ShardManifestStore
from lancewal.spark.columns import arrow_schema, for_spark
from lancewal.spark.merged import MergedState, Wanted
from lancewal.spark.options import (
    EARLIEST,
    LATEST,
    POSITIONS,
    SNAPSHOT,
    OpenTable,
    Options,
    parse_positions,
)
from lancewal.spark.worker import settle
from lancewal.storage import ObjectStore, layout

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxFiles,
        SupportsTriggerAvailableNow,
    )

    HAS_LIMITS = True
except ImportError:
    # Spark 4.1 asks for the latest place without saying where the stream is, so limits are not possible.
    HAS_LIMITS = False

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """A stand-in: Spark 4.1 has no such class. For this trigger it asks once for the latest place."""


if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SNAPSHOT = "snapshot"

Place = str | Mapping[str, int]


def changes(
    spark: SparkSession,
    uri: str,
    *,
    starting_position: Place = "latest",
    max_entries_per_trigger: int | None = None,
    max_bytes_per_trigger: int | None = None,
    shards: Sequence[UUID | str] | None = None,
    change_types: Sequence[str] | None = None,
    filter: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The change feed of a table as a streaming DataFrame.

    ``starting_position`` is "earliest" (everything that is retained), "latest", "snapshot" (the table's rows
    now, then all later changes), or a map from shard id to WAL position. ``shards`` and ``change_types``
    ("upsert", "delete", "insert") limit the feed to these; other shards are not read. ``filter`` is a
    condition on key columns in Lance's SQL, such as ``id >= 1000 AND id < 2000``.

    .. code-block:: python

        feed = changes(spark, "s3://bucket/documents", starting_position="snapshot")
        feed.writeStream.foreachBatch(apply).option("checkpointLocation", "s3://bucket/checkpoints").start()
    """
    place = starting_position if isinstance(starting_position, str) else json.dumps(dict(starting_position))
    reader = spark.readStream.format("lancewal").option("readChangeFeed", "true")
    reader = reader.option("startingPosition", place)
    if max_entries_per_trigger is not None:
        reader = reader.option("maxEntriesPerTrigger", str(max_entries_per_trigger))
    if max_bytes_per_trigger is not None:
        reader = reader.option("maxBytesPerTrigger", str(max_bytes_per_trigger))
    if shards is not None:
        reader = reader.option("shards", ",".join(map(str, shards)))
    if change_types is not None:
        reader = reader.option("changeTypes", ",".join(change_types))
    if filter is not None:
        reader = reader.option("filter", filter)
    for name, value in (storage_options or {}).items():
        reader = reader.option(f"storage.{name}", value)
    return reader.load(uri)


@dataclass
class FeedPartition(InputPartition):
    """WAL positions of one shard, from ``start`` up to ``end`` (exclusive)."""

    shard_id: UUID
    start: int
    end: int


@dataclass
class SnapshotPartition(InputPartition):
    """A part of the snapshot that precedes the feed."""

    merged: MergedState
    part: InputPartition


class _FeedRows:
    """Reads partitions of either kind as the feed's columns."""

    def __init__(self, options: Options, schema: st.StructType) -> None:
        if not options.flag("readChangeFeed"):
            raise InvalidInputError(
                'a stream from a table is its change feed; set the option readChangeFeed to "true", which '
                f"adds the columns {', '.join(FEED_COLUMNS)}"
            )
        options.refuse(["filterPushdown"], "does not apply to the change feed; filter in Spark")
        options.refuse(["limit"], "does not apply to the change feed; maxEntriesPerTrigger bounds a stream")
        options.refuse(["versionAsOf"], "does not apply to the change feed; read the checkpoint without it")
        self._options = options
        self._schema = schema
        self._shards = wanted_shards(options)
        self._kinds = wanted_changes(options)
        self._filter = options.text("filter")
        self._opened: tuple[BaseSource, Predicate] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state that is sent to tasks, which open the table themselves."""
        return {**self.__dict__, "_opened": None}

    def feed(self) -> ChangeFeed:
        return ChangeFeed.open(self._options.uri, self._options.storage)

    def rows(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        settle()
        wanted = arrow_schema(self._schema)
        for batch in self._changes(partition):
            # A snapshot is filtered as it is read, and need not have the key among its columns.
            if self._filter is not None and isinstance(partition, FeedPartition):
                source, predicate = self._keys(self._filter)
                keys = pa.Table.from_batches([batch.select([*source.base.schema.primary_key])])
                batch = batch.filter(pa.array(predicate.mask(keys)))
            if self._kinds is not None:
                kinds = pa.array(self._kinds, batch.column(CHANGE_TYPE).type)
                batch = batch.filter(pc.is_in(batch.column(CHANGE_TYPE), value_set=kinds))
            if batch.num_rows:
                yield for_spark(batch, wanted)

    def ranges(self, start: Mapping[UUID, int], end: Mapping[UUID, int]) -> list[InputPartition]:
        pairs = [
            FeedPartition(shard, start.get(shard, layout.FIRST_WAL_POSITION), stop)
            for shard, stop in end.items()
            if (self._shards is None or shard in self._shards) and self._may_match(shard)
        ]
        return [pair for pair in pairs if pair.start < pair.end]

    def snapshot(self, merged: MergedState) -> list[InputPartition]:
        """The parts of a snapshot that precedes the feed."""
        wanted = Wanted(tuple(merged.columns), self._filter)
        return [SnapshotPartition(merged, part) for part in merged.partitions(wanted)]

    def _may_match(self, shard: UUID) -> bool:
        if self._filter is None:
            return True
        source, predicate = self._keys(self._filter)
        identity = source.pruner.identity_of(shard)
        return identity is None or source.pruner.may_match(identity, predicate)

    def _keys(self, sql: str) -> tuple[BaseSource, Predicate]:
        """The table, and the filter on its keys."""
        if self._opened is None:
            source = BaseSource(OpenTable.open(self._options).base)
            self._opened = source, key_filter(sql, source.base.schema)
        return self._opened

    def _changes(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, FeedPartition):
            yield from self.feed().read(partition.shard_id, partition.start, partition.end)
        elif isinstance(partition, SnapshotPartition):
            columns = [name for name in self._schema.fieldNames() if name not in FEED_COLUMNS]
            keyed = partition.merged.state.base(self._options.storage).base.schema.primary_key
            kind = pa.scalar(UPSERT if keyed else INSERT)
            for batch in partition.merged.read(partition.part, Wanted(tuple(columns), self._filter)):
                yield _as_changes(batch, kind)


class FeedReader(DataSourceReader):
    """``spark.read.format("lancewal").option("readChangeFeed", "true").load(uri)``."""

    def __init__(self, options: Options, schema: st.StructType) -> None:
        self._rows = _FeedRows(options, schema)
        self._options = options

    def partitions(self) -> list[InputPartition]:
        feed = self._rows.feed()
        start = _resolved(feed, self._options.position("startingPosition", EARLIEST), "startingPosition")
        end = _resolved(feed, self._options.position("endingPosition", LATEST), "endingPosition")
        # If the list is empty, Spark makes up a partition that :meth:`read` does not expect.
        return self._rows.ranges(start, end) or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._rows.rows(partition)


class FeedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """``spark.readStream.format("lancewal").option("readChangeFeed", "true").load(uri)``.

    An offset is a map from shard to the WAL position that is read next. A stream that starts
    with a snapshot begins with another kind of offset: the state of that snapshot.
    """

    def __init__(self, options: Options, schema: st.StructType) -> None:
        # Options are not checked here, because Spark loses the errors of a constructor.
        self._options = options
        self._schema = schema
        self._target: dict[UUID, int] | None = None
        self._opened: ChangeFeed | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state that is sent to tasks, which open a feed of their own."""
        return {**self.__dict__, "_opened": None}

    @property
    def _feed(self) -> ChangeFeed:
        """One feed for all triggers, because it remembers where each log ended."""
        rows = self._rows
        if self._opened is None:
            self._opened = rows.feed()
        return self._opened

    @property
    def _rows(self) -> _FeedRows:
        if not HAS_LIMITS:
            self._options.refuse(
                ["maxEntriesPerTrigger", "maxBytesPerTrigger"],
                "needs Spark 4.2, which asks for limits",
            )
        self._options.refuse(
            ["endingPosition"], "has no meaning for a stream, which has no end; read a batch"
        )
        return _FeedRows(self._options, self._schema)

    @property
    def _max_entries(self) -> int | None:
        return self._options.number("maxEntriesPerTrigger")

    @property
    def _max_bytes(self) -> int | None:
        return self._options.number("maxBytesPerTrigger")

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        rows = self._rows
        start = self._options.position("startingPosition", LATEST)
        if start == SNAPSHOT:
            store = ObjectStore.from_uri(self._options.uri, self._options.storage)
            return {_SNAPSHOT: _encode_state(ending_before_pointers(store, read_state(store)))}
        return _encode(_resolved(rows.feed(), start, "startingPosition"))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._max_entries is not None:
            return ReadMaxFiles(self._max_entries)
        return ReadAllAvailable() if self._max_bytes is None else ReadMaxBytes(self._max_bytes)

    def latestOffset(  # noqa: N802
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        if start is None:
            return _encode(self._feed.latest())
        if _SNAPSHOT in start:
            return _encode(parse_positions(start[_SNAPSHOT][POSITIONS], "the stream's offset"))
        unlimited = isinstance(limit, ReadAllAvailable)
        place = self._feed.advance(
            _decode(start),
            until=self._target,
            max_entries=None if unlimited else self._max_entries,
            max_bytes=None if unlimited else self._max_bytes,
        )
        return _encode(place)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return _encode(self._feed.latest())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._feed.latest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        if _SNAPSHOT not in start:
            return self._rows.ranges(_decode(start), _decode(end))
        store = ObjectStore.from_uri(self._options.uri, self._options.storage)
        merged = MergedState(self._options, _decode_state(store, start[_SNAPSHOT]))
        rows = self._rows
        # If Spark does not tell ``latestOffset`` that the stream begins with the snapshot, ``end`` is later
        # than the snapshot, and the changes in between belong to this batch too.
        return rows.snapshot(merged) + rows.ranges(_decode(start[_SNAPSHOT]), _decode(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._rows.rows(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: the log is retained for other readers."""

    def stop(self) -> None:
        """Nothing to release."""


def wanted_shards(options: Options) -> frozenset[UUID] | None:
    """The shards that the option ``shards`` names; ``None`` for all."""
    names = options.names("shards")
    if names is None:
        return None
    if not names:
        raise InvalidInputError("option shards names nothing; leave it out, to read all of them")
    if options.position("startingPosition", LATEST) == SNAPSHOT:
        raise InvalidInputError("option shards excludes a snapshot, which is not kept by shard")
    return frozenset(layout.parse_shard_id(name) for name in names)


def key_filter(sql: str, schema: TableSchema) -> Predicate:
    """A filter for changes. It may use key columns only, because a delete has no other values."""
    predicate = Predicate.parse(sql, schema.plain)
    others = sorted(set(predicate.columns) - set(schema.primary_key))
    if others:
        raise InvalidInputError(
            f"option filter of the change feed can name key columns only, not {', '.join(others)}: of a "
            "delete nothing else is known; filter in Spark"
        )
    return predicate


def wanted_changes(options: Options) -> list[str] | None:
    """The change types that the option ``changeTypes`` names; ``None`` for all."""
    names = options.names("changeTypes")
    if names == []:
        raise InvalidInputError("option changeTypes names nothing; leave it out, to read all of them")
    unknown = [name for name in names or () if name not in (UPSERT, DELETE, INSERT)]
    if unknown:
        raise InvalidInputError(
            f"option changeTypes names {', '.join(unknown)}; there are {UPSERT}, {DELETE} and {INSERT}"
        )
    return names


def _resolved(feed: ChangeFeed, place: str | dict[UUID, int], option: str) -> dict[UUID, int]:
    if isinstance(place, dict):
        return _existing(feed, place, option)
    if place == SNAPSHOT:
        raise InvalidInputError('only a stream can start with a "snapshot"; read the table itself instead')
    return feed.earliest() if place == EARLIEST else feed.latest()


def _existing(feed: ChangeFeed, place: dict[UUID, int], option: str) -> dict[UUID, int]:
    """``place``; refuses a place beyond the end of a log, because a feed from there would miss rows."""
    latest = feed.latest()
    for shard, position in place.items():
        if shard not in latest:
            raise InvalidInputError(f"option {option} names shard {shard}, which the table does not have")
        if position > latest[shard]:
            raise InvalidInputError(
                f"option {option} is position {position} of shard {shard}, beyond its end at {latest[shard]}"
            )
    return place


def _as_changes(batch: pa.RecordBatch, kind: pa.Scalar) -> pa.RecordBatch:
    """Rows of a snapshot in the feed's form; they have no position in the log."""
    count = batch.num_rows
    rows = batch.append_column(CHANGE_TYPE, pa.repeat(kind, count))
    rows = rows.append_column(SHARD_ID, pa.nulls(count, pa.string()))
    for name in FEED_COLUMNS[2:]:
        rows = rows.append_column(name, pa.nulls(count, pa.int64()))
    return rows


def _encode(place: Mapping[UUID, int]) -> dict[str, Any]:
    return {POSITIONS: {str(shard): place[shard] for shard in sorted(place)}}


def _decode(offset: Mapping[str, Any]) -> dict[UUID, int]:
    return parse_positions(offset.get(POSITIONS), "the stream's offset")


def _encode_state(state: TableState) -> dict[str, Any]:
    return {
        "base_version": state.version,
        "manifest_versions": {str(place.shard_id): place.manifest.version for place in state.shards},
        **_encode(state.positions()),
    }


def _decode_state(store: ObjectStore, stored: Mapping[str, Any]) -> TableState:
    ends = parse_positions(stored[POSITIONS], "the stream's offset")
    places = []
    for shard, version in stored["manifest_versions"].items():
        shard_id = UUID(shard)
        try:
            manifest = ShardManifestStore(store, shard_id).read_version(int(version))
        except FileNotFoundError:
            raise StorageError(
                f"the snapshot that this stream began with is gone: version {version} of the manifest of "
                f"shard {shard} was collected. Start again with a new checkpoint"
            ) from None
        places.append(ShardPlace(manifest, ends[shard_id]))
    version = int(stored["base_version"])
    base = find_manifest(store, version)
    # If the version was cleaned up, opening it raises the error.
    return TableState(store.uri, version, tuple(places), 0 if base is None else base.checksum)
