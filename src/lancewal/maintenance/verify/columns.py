"""Whether stored columns are the table's: matched by field id, as readers do."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from lancewal.format.schema import TOMBSTONE, TableSchema, field_id
from lancewal.maintenance.verify.findings import Severity


def mismatches(stored: pa.Schema, schema: TableSchema) -> Iterator[tuple[Severity, str]]:
    """What a reader would get wrong, or as nulls, in rows with the columns ``stored``.

    Renamed and dropped columns are no mismatch: they keep their ids, or are gone.
    """
    columns = [field for field in stored if field.name != TOMBSTONE]
    if all(field_id(field) < 0 for field in columns):
        # Written before columns had ids: matched by name.
        return
    by_id = {field_id(field): field for field in schema.columns}
    stored_ids = {field_id(field) for field in columns}
    for name in schema.primary_key:
        wanted = schema.columns.field(name)
        if field_id(wanted) not in stored_ids:
            yield Severity.ERROR, f"key column {name!r} (field id {field_id(wanted)}) is missing"
    for field in columns:
        number, known = field_id(field), by_id.get(field_id(field))
        if known is not None and field.type.id != known.type.id:
            yield (
                Severity.WARNING,
                f"field id {number} is {field.name!r} of type {field.type}, in the table {known.name!r} "
                f"of type {known.type}; it reads as nulls",
            )
        elif known is not None and known.name != field.name and field.name in schema.names:
            # Two columns may have swapped their names; whoever numbered columns wrongly looks the same.
            yield Severity.INFO, f"column {field.name!r} has field id {number}, which is now {known.name!r}"
        elif known is None and field.name in schema.names:
            now = field_id(schema.columns.field(field.name))
            yield (
                Severity.WARNING,
                f"column {field.name!r} has field id {number}, in the table {now}; it reads as nulls",
            )
