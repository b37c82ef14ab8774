"""TableReader: takes snapshots of one table and reads from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.errors import ConflictError, InvalidInputError
from lancewal.format import TableSchema
from lancewal.predicate import Predicate
from lancewal.reader.base_source import BaseSource
from lancewal.reader.lookup import LookupResult, lookup
from lancewal.reader.nearest import checked_nearest, nearest
from lancewal.reader.pruning import KeyLocator, ShardIdentity, ShardPruner
from lancewal.reader.scan import Scan
from lancewal.reader.state import ShardReader, Snapshot, WantsShard
from lancewal.reader.tail import SnapshotMovedError
from lancewal.reader.text_search import checked_words, find_words
from lancewal.storage import ObjectStore, check_process, layout, ordered_map
from lancewal.writer import Intake

logger = logging.getLogger(__name__)

#: Each attempt fails only when a flush or a compaction got in between.
_ATTEMPTS = 16
_REMOTE_READERS = 16


class TableReader:
    """Reads one table, merged; keeps handles, keys and WAL tails between reads. Thread-safe.

    What it keeps never decides what is read: every snapshot asks storage for the newest
    manifests, WAL entries and base version.
    """

    def __init__(self, store: ObjectStore, *, live_writers: bool = True) -> None:
        """Without ``live_writers``, writers of this process are read as those of any other: by their WAL."""
        self._store = store
        self._live_writers = live_writers
        self._shards: dict[str, ShardReader] = {}
        self._base: BaseSource | None = None
        self._intake: Intake | None = None

    def base(self) -> BaseTable:
        """The newest version of the base table."""
        return self._newest_base().base

    def _known_base(self) -> BaseSource:
        """A version to interpret a request by; the snapshot that follows tells whether it was the newest."""
        return self._base or self._newest_base()

    def _newest_base(self) -> BaseSource:
        check_process()
        known = self._base
        if known is None or known.base.dataset.latest_version != known.base.version:
            options = self._store.storage_options
            known = BaseSource(BaseTable.open(self._store.uri, options, store=self._store))
            self._base = known
        return known

    def snapshot(self, wants: WantsShard | None = None) -> Snapshot:
        """A consistent state of the table; shards that ``wants`` is false for are left out."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._take_snapshot(wants)
            except SnapshotMovedError as error:
                if attempt == _ATTEMPTS:
                    raise ConflictError(
                        f"the table at {self._store.uri} was flushed or compacted {_ATTEMPTS} times while "
                        "its state was read; read again when less is going on"
                    ) from error
                logger.debug("snapshot started again: %s", error)
        raise AssertionError("the last attempt raises")

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        offset: int | None = None,
        with_row_source: bool = False,
    ) -> Scan:
        """A scan of the state that the table has now."""
        while True:
            source = self._known_base()
            schema = source.base.schema
            try:
                predicate = Predicate.parse(filter, schema.plain) if filter is not None else None
            except InvalidInputError:
                if self._newest_base() is source:
                    raise
                # It may be about a column that the newest version has.
                continue
            wants = None if predicate is None else _matching(source.pruner, predicate)
            snapshot = self.snapshot(wants)
            if predicate is None or _same_columns(snapshot.schema, schema):
                return Scan(snapshot, columns, predicate, limit, offset, with_row_source)

    def lookup(self, keys: Any, columns: Sequence[str] | None = None) -> LookupResult:
        """The newest rows of some keys: one value, a list of values, or Arrow data with the key columns."""
        while True:
            source = self._known_base()
            base = source.base
            if not base.schema.primary_key:
                raise InvalidInputError("this table has no primary key, so no row can be looked up by it")
            asked = _key_columns(keys, base.schema, self._intake_of(base.schema))
            if not len(asked[0]):
                return lookup(self.snapshot(lambda _: False), asked, columns)
            locator = source.pruner.locate(base.schema, asked)
            snapshot = self.snapshot(_holding(locator))
            if _same_columns(snapshot.schema, base.schema):
                try:
                    return lookup(snapshot, asked, columns)
                except SnapshotMovedError as error:
                    logger.debug("lookup started again: %s", error)

    def _intake_of(self, schema: TableSchema) -> Intake:
        intake = self._intake
        if intake is None or intake.schema is not schema:
            intake = self._intake = Intake(schema)
        return intake

    def _take_snapshot(self, wants: WantsShard | None) -> Snapshot:
        pruned: list[UUID] = []
        chosen = [shard for shard in self._readers() if _is_wanted(shard, wants, pruned)]
        workers = 1 if self._store.is_local else min(_REMOTE_READERS, len(chosen))
        schema = self._known_base().base.schema
        states = list(ordered_map(lambda shard: shard.read(schema), chosen, workers))
        base = self._newest_base()
        snapshots = [
            shard.resolve(state, base.base)
            for shard, state in zip(chosen, states, strict=True)
            # Only now is a shard that was read for the first time known well enough to be left out.
            if state is not None and _is_wanted(shard, wants, pruned)
        ]
        return Snapshot(base, tuple(snapshots), tuple(sorted(pruned)), not self._store.is_local)

    def _readers(self) -> list[ShardReader]:
        """The readers of all shards that have a directory."""
        known = self._shards
        found: dict[str, ShardReader] = {}
        for name in self._store.list_directories(layout.MEM_WAL_DIR):
            reader = known.get(name)
            if reader is None and (shard_id := layout.parse_shard_dir(name)) is not None:
                reader = self._shard_reader(shard_id)
            if reader is not None:
                found[name] = reader
        self._shards = found
        return list(found.values())

    def _shard_reader(self, shard_id: UUID) -> ShardReader:
        return ShardReader(self._store, shard_id, live_writers=self._live_writers)


def _is_wanted(shard: ShardReader, wants: WantsShard | None, pruned: list[UUID]) -> bool:
    """Whether a shard is to be read; one that is known and not wanted is noted in ``pruned``."""
    if wants is None or shard.identity is None or wants(shard.identity):
        return True
    pruned.append(shard.identity.shard_id)
    return False


def _matching(pruner: ShardPruner, predicate: Predicate) -> WantsShard:
    return lambda shard: pruner.may_match(shard, predicate)


def _holding(locator: KeyLocator) -> WantsShard:
    def holds(shard: ShardIdentity) -> bool:
        possible = locator.keys_in(shard)
        return possible is None or bool(possible.any())

    return holds


def _same_columns(first: TableSchema, second: TableSchema) -> bool:
    return first is second or (
        first.primary_key == second.primary_key
        and bool(first.columns.equals(second.columns, check_metadata=True))
    )


def _key_columns(keys: Any, schema: TableSchema, intake: Intake) -> list[pa.Array]:
    """What a caller passed as keys, as key columns in key order."""
    if isinstance(keys, dict):
        keys = [keys]
    if isinstance(keys, (list, tuple)) and keys and all(isinstance(key, (dict, tuple)) for key in keys):
        keys = _from_records(keys, schema)
    elif isinstance(keys, tuple) and len(schema.primary_key) > 1:
        keys = _from_records([keys], schema)
    batches = intake.key_batches(keys)
    names = schema.primary_key
    if not batches:
        return [pa.array([], schema.plain.field(name).type) for name in names]
    if len(batches) == 1:
        return [batches[0].column(name) for name in names]
    return [pa.concat_arrays([batch.column(name) for batch in batches]) for name in names]


def _from_records(keys: Sequence[Any], schema: TableSchema) -> pa.Table:
    """Composite keys as dictionaries or tuples in key order, as a table."""
    names = schema.primary_key
    columns: list[list[Any]] = [[] for _ in names]
    for key in keys:
        values = [key.get(name) for name in names] if isinstance(key, dict) else list(key)
        if len(values) != len(names):
            raise InvalidInputError(
                f"a key has the columns {', '.join(names)}; {key!r} has {len(values)} values"
            )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    try:
        arrays = [pa.array(c, schema.plain.field(name).type) for name, c in zip(names, columns, strict=True)]
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"the keys do not fit the columns {', '.join(names)}: {error}") from None
    return pa.Table.from_arrays(arrays, list(names))


# Searches of a table as it is now: by vector, and by words.


T = TypeVar("T")


def vector_search(
    reader: TableReader,
    column: str,
    query: Any,
    k: int,
    *,
    filter: str | None = None,
    columns: Sequence[str] | None = None,
    metric: str | None = None,
    nprobes: int | None = None,
    refine_factor: int | None = None,
) -> pa.Table:
    """The ``k`` nearest rows of the newest state; see :meth:`lancewal.Table.vector_search`."""

    def search(snapshot: Snapshot, predicate: Predicate | None) -> pa.Table:
        asked = checked_nearest(snapshot, column, query, k, metric, predicate, nprobes, refine_factor)
        return nearest(snapshot, asked, columns)

    return _in_snapshot(reader, filter, search)


def full_text_search(
    reader: TableReader,
    column: str,
    query: str,
    k: int,
    *,
    filter: str | None = None,
    columns: Sequence[str] | None = None,
    operator: str = "or",
    phrase: bool = False,
) -> pa.Table:
    """The ``k`` best rows of the newest state; see :meth:`lancewal.Table.full_text_search`."""

    def search(snapshot: Snapshot, predicate: Predicate | None) -> pa.Table:
        asked = checked_words(snapshot, column, query, k, operator, phrase, predicate)
        return find_words(snapshot, asked, columns)

    return _in_snapshot(reader, filter, search)


def _in_snapshot(
    reader: TableReader, filter: str | None, search: Callable[[Snapshot, Predicate | None], T]
) -> T:
    """A scan parses the filter and prunes shards by it: its snapshot and predicate serve here too."""
    scan = reader.scan(filter=filter)
    return search(scan.snapshot, scan.predicate)
