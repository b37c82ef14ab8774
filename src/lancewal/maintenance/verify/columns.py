"""Whether stored columns are the table's: matched as readers do, by their own code."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from lancewal.errors import ColumnMismatchError
from lancewal.format.align import column_sources
from lancewal.format.schema import TOMBSTONE, TableSchema, field_id
from lancewal.maintenance.verify.findings import Severity


def mismatches(
    stored: pa.Schema, schema: TableSchema, written_for: int | None
) -> Iterator[tuple[Severity, str]]:
    """What a reader would refuse, or get as nulls, in rows with the columns ``stored``.

    Renamed and dropped columns are no mismatch: they keep their ids, or are gone. ``written_for`` is the
    version of the table that had these columns, ``None`` if it is not known.
    """
    try:
        column_sources(stored, schema, written_for)
    except ColumnMismatchError as error:
        yield Severity.ERROR, str(error)
        return
    columns = [field for field in stored if field.name != TOMBSTONE]
    if all(field_id(field) < 0 for field in columns):
        # Written before columns had ids: matched by name.
        return
    by_id = {field_id(field): field for field in schema.columns}
    for field in columns:
        number, known = field_id(field), by_id.get(field_id(field))
        if known is not None and known.name != field.name and field.name in schema.names:
            # Two columns may have swapped their names; whoever numbered columns wrongly looks the same.
            yield Severity.INFO, f"column {field.name!r} has field id {number}, which is now {known.name!r}"
        elif known is None and field.name in schema.names:
            now = field_id(schema.columns.field(field.name))
            yield (
                Severity.WARNING,
                f"column {field.name!r} has field id {number}, in the table {now}; it reads as nulls",
            )
