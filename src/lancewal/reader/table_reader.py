"""TableReader: answers requests from the newest state of one table."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format import TableSchema
from lancewal.predicate import Predicate
from lancewal.reader.lookup import LookupResult, lookup
from lancewal.reader.scan import Scan
from lancewal.reader.search import checked_nearest, checked_words, find_words, nearest
from lancewal.reader.state import StateReader
from lancewal.reader.tail import SnapshotMovedError
from lancewal.storage import ObjectStore
from lancewal.writer import Intake

logger = logging.getLogger(__name__)

#: How old a state may be that a read shows: seconds, or a timedelta; ``None`` for the newest.
MaxStaleness = float | timedelta | None


class TableReader(StateReader):
    """Reads one table, merged. Thread-safe."""

    def __init__(
        self, store: ObjectStore, *, live_writers: bool = True, max_staleness: MaxStaleness = None
    ) -> None:
        super().__init__(store, live_writers=live_writers, max_staleness=_seconds(max_staleness))
        self._intake: Intake | None = None

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
            source = self.known_base()
            schema = source.base.schema
            try:
                predicate = Predicate.parse(filter, schema.plain) if filter is not None else None
            except InvalidInputError:
                if self._newest_base() is source:
                    raise
                # It may be about a column that the newest version has.
                continue
            snapshot = self.snapshot(source.pruner.matching(predicate))
            if predicate is None or _same_columns(snapshot.schema, schema):
                return Scan(snapshot, columns, predicate, limit, offset, with_row_source)

    def lookup(self, keys: Any, columns: Sequence[str] | None = None) -> LookupResult:
        """The newest rows of some keys: one value, a list of values, or Arrow data with the key columns."""
        max_staleness = None
        while True:
            source = self.known_base()
            base = source.base
            if not base.schema.primary_key:
                raise InvalidInputError("this table has no primary key, so no row can be looked up by it")
            asked = _key_columns(keys, base.schema, self._intake_of(base.schema))
            if not len(asked[0]):
                return lookup(self.snapshot(lambda _: False), asked, columns)
            locator = source.pruner.locate(base.schema, asked)
            snapshot = self.snapshot(locator.is_in, max_staleness=max_staleness)
            if _same_columns(snapshot.schema, base.schema):
                try:
                    return lookup(snapshot, asked, columns)
                except SnapshotMovedError as error:
                    logger.debug("lookup started again: %s", error)
                    max_staleness = 0.0

    def vector_search(
        self,
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
        scan = self.scan(filter=filter)
        asked = checked_nearest(
            scan.snapshot, column, query, k, metric, scan.predicate, nprobes, refine_factor
        )
        return nearest(scan.snapshot, asked, columns)

    def full_text_search(
        self,
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
        scan = self.scan(filter=filter)
        asked = checked_words(scan.snapshot, column, query, k, operator, phrase, scan.predicate)
        return find_words(scan.snapshot, asked, columns)

    def _intake_of(self, schema: TableSchema) -> Intake:
        intake = self._intake
        if intake is None or intake.schema is not schema:
            intake = self._intake = Intake(schema)
        return intake


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


def _seconds(max_staleness: MaxStaleness) -> float:
    """A setting as seconds; refuses what is no duration."""
    given: Any = max_staleness
    if isinstance(given, timedelta):
        given = given.total_seconds()
    if given is None:
        return 0.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        raise InvalidInputError(
            f"max_staleness must be a number of seconds, 0 or more, or a timedelta, not {max_staleness!r}"
        )
    return float(given)
