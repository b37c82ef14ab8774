"""Finds the rows that match a condition and prepares what changes them: their keys, or rows with new values.

All rows are read from one snapshot of the table. Writers of this process and gateway clients use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.predicate import Expression
from lancewal.writer.intake import Intake

#: Reads the given columns of all rows that match a condition, from the newest snapshot.
Find = Callable[[str, Sequence[str]], Iterable[pa.RecordBatch]]


def _values(name: str, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInputError(f"{name} is {given!r}; pass a dict of columns and their values")
    return given or {}


class Matching:
    """Finds rows of one table; ``intake`` knows its columns."""

    def __init__(self, intake: Intake, find: Find | None) -> None:
        self._intake = intake
        self._find = find

    def keys_to_delete(self, keys: Any, where: str | None) -> Any:
        """The given keys, or the keys of the rows that match ``where``; ``None`` if no row matches."""
        if (keys is None) == (where is None):
            raise InvalidInputError("delete takes keys, or where with a condition")
        if where is None:
            return keys
        names = self._intake.schema.primary_key
        found = pa.Table.from_batches(
            [batch for batch in self._matching(where, names) if batch.num_rows],
            pa.schema([self._intake.plain.field(name) for name in names]),
        )
        return found if found.num_rows else None

    def updated(
        self, where: str, set: Mapping[str, Any] | None, set_sql: Mapping[str, str] | None
    ) -> Iterator[pa.Table]:
        """The matching rows with new values, batch by batch; refuses at once what cannot be set."""
        set, set_sql = _values("set", set), _values("set_sql", set_sql)
        columns = self._intake.plain
        for name in (*set, *set_sql):
            if name not in columns.names:
                raise InvalidInputError(
                    f"the table has no column {name}; its columns are {', '.join(columns.names)}"
                )
            if name in self._intake.schema.primary_key:
                raise InvalidInputError(f"column {name} is part of the key, which an update cannot change")
        if not set and not set_sql:
            raise InvalidInputError("set is empty; name at least one column and its value")
        if both := sorted(set.keys() & set_sql.keys()):
            raise InvalidInputError(f"{', '.join(both)} has a value in set and set_sql; choose one")
        given = self._intake.batches(dict(set)) if set else []
        values = {name: batch.column(name) for batch in given for name in set}
        expressions = {name: Expression.parse(sql, columns) for name, sql in set_sql.items()}
        return self._with_values(self._matching(where, columns.names), values, expressions)

    def _with_values(
        self,
        found: Iterable[pa.RecordBatch],
        values: Mapping[str, pa.Array],
        expressions: Mapping[str, Expression],
    ) -> Iterator[pa.Table]:
        for number, batch in enumerate(found):
            if number == 0:
                # Only now: the first batch fixes the snapshot from which all batches are read.
                self._intake.refuse_newer_columns()
            rows = pa.Table.from_batches([batch])
            new = {name: each.evaluate(rows) for name, each in expressions.items()}
            for name, value in values.items():
                new[name] = value.take(pa.array([0] * batch.num_rows))
            for name, column in new.items():
                rows = rows.set_column(rows.schema.get_field_index(name), name, column)
            yield rows

    def _matching(self, where: str, columns: Sequence[str]) -> Iterable[pa.RecordBatch]:
        if not self._intake.schema.primary_key:
            raise InvalidInputError(
                "this table has no primary key, so its rows cannot be changed through the WAL; "
                "change the base table with lance.LanceDataset.update or delete"
            )
        if self._find is None:
            raise InvalidInputError("this writer cannot read; open one with Table.writer")
        if not isinstance(where, str):
            # A scan reads None as no condition, so all rows would be changed.
            raise InvalidInputError(f'where is {where!r}; pass an SQL condition, "true" for all rows')
        return self._find(where, columns)
