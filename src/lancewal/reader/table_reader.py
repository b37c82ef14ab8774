"""TableReader: answers requests from the newest state of one table."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pyarrow as pa

from lancewal.errors import InvalidInputError, LanceWalError
from lancewal.format import TableSchema, from_python
from lancewal.memtable import checked_columns
from lancewal.predicate import Predicate
from lancewal.reader.base_source import BaseSource
from lancewal.reader.lookup import LookupResult, lookup
from lancewal.reader.merge import Snapshot
from lancewal.reader.scan import Scan
from lancewal.reader.source import Found
from lancewal.reader.state import StateReader
from lancewal.reader.tail import SnapshotMovedError
from lancewal.sstable import KeyProbe
from lancewal.storage import ObjectStore, both, span
from lancewal.writer import Intake, is_key_sequence, is_tabular

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
        *,
        max_staleness: float | None = None,
    ) -> Scan:
        """A scan of the state that the table has now, or had up to ``max_staleness`` seconds ago."""
        began = time.perf_counter()
        with span("lancewal.plan", table=self._store.uri):
            snapshot, predicate = self._planned(filter, max_staleness)
        return Scan(snapshot, columns, predicate, limit, offset, with_row_source, time.perf_counter() - began)

    def _planned(self, filter: str | None, max_staleness: float | None) -> tuple[Snapshot, Predicate | None]:
        """The state that a scan is about, and the filter for its columns."""
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
            snapshot = self.snapshot(source.pruner.matching(predicate), max_staleness=max_staleness)
            if predicate is None or _same_columns(snapshot.schema, schema):
                return snapshot, predicate

    def lookup(self, keys: Any, columns: Sequence[str] | None = None) -> LookupResult:
        """The newest rows of some keys: one value, a list of values, or Arrow data with the key columns."""
        max_staleness = None
        while True:
            source = self.known_base()
            base = source.base
            if not base.schema.primary_key:
                raise InvalidInputError("this table has no primary key, so no row can be looked up by it")
            asked = asked_keys(keys, base.schema, self._intake_of(base.schema))
            if not len(asked[0]):
                return lookup(Snapshot(self._newest_base(), ()), asked, columns)
            locator = source.pruner.locate(base.schema, asked)
            snapshot, ahead = self._with_base_rows(
                source, asked, columns, partial(self.snapshot, locator, max_staleness=max_staleness)
            )
            if _same_columns(snapshot.schema, base.schema):
                try:
                    return lookup(snapshot, asked, columns, ahead=ahead)
                except SnapshotMovedError as error:
                    logger.debug("lookup started again: %s", error)
                    max_staleness = 0.0

    def _with_base_rows(
        self,
        source: BaseSource,
        keys: Sequence[pa.Array],
        columns: Sequence[str] | None,
        take: Callable[[], Snapshot],
    ) -> tuple[Snapshot, Found | None]:
        """The snapshot, and what the base says of a key, which far away is asked at the same time.

        A newer version may turn up meanwhile: then nobody has asked. Nor where the key is likely to be found
        without a request, or only by reading all keys of the base.
        """
        is_far = not self._store.is_local and not self._max_staleness
        if len(keys[0]) > 1 or not is_far or not source.finds_keys_fast:
            return take(), None

        def ask() -> Found | None:
            try:
                return source.look_up(KeyProbe(keys), checked_columns(columns, source.base.schema))
            except LanceWalError:
                return None  # whoever needs the answer asks again, and hears why there is none

        snapshot, found = both(take, ask, at_once=True)
        return snapshot, found if snapshot.base_source is source else None

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


def is_one_key(keys: Any, schema: TableSchema) -> bool:
    """Whether a caller asks for one key, and so for one row."""
    if isinstance(keys, tuple):
        several = not keys or any(isinstance(each, dict | tuple) for each in keys)
        return not several and len(schema.primary_key) > 1
    return not (is_key_sequence(keys) or is_tabular(keys))


def asked_keys(keys: Any, schema: TableSchema, intake: Intake) -> list[pa.Array]:
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
        arrays = [
            from_python(c, schema.plain.field(name).type) for name, c in zip(names, columns, strict=True)
        ]
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
