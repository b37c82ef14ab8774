"""Which columns the write path can take; everything else is refused before a row is written.

Lance makes tables with names that its own appends, merges and scans then cannot handle, and rows
of such a table would be stuck on their way to the base. Blob columns are stored beside the rows
that they belong to, where the write path does not bring them yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format.schema import TOMBSTONE, TableSchema, is_blob

#: Lance refuses them for new tables, but lets columns be renamed to some of them.
LANCE_NAMES = frozenset(
    ["_rowid", "_rowaddr", "_rowoffset", "_row_created_at_version", "_row_last_updated_at_version"]
)
#: What reads add to rows. The change feed's columns are not among them: tables that keep what a feed
#: gave have columns of these names, and only a feed of such a table is refused.
ADDED_NAMES = frozenset(["_source", "_distance", "_score"])


def check_new_columns(schema: TableSchema) -> None:
    """Refuse columns with which a table should not get a write path."""
    check_columns(schema)
    added = [name for name in schema.names if name in ADDED_NAMES]
    if added:
        raise InvalidInputError(
            f"column {', '.join(added)} has a name that reads or searches add; "
            "rename it with lance.LanceDataset.alter_columns"
        )


def check_columns(schema: TableSchema) -> None:
    """Refuse columns whose rows could be written, but never read, flushed or compacted."""
    for name in schema.names:
        problem = _problem(name, name in schema.primary_key)
        if problem:
            raise InvalidInputError(
                f"column {name!r} {problem}; rename it with lance.LanceDataset.alter_columns, or write the "
                "table anew"
            )
    for field in schema.columns:
        if any(not child.name for child in _below(field)):
            raise InvalidInputError(
                f"column {field.name!r} has a field without a name, which no filter can mean; rename it"
            )
    if schema.blob_columns:
        raise InvalidInputError(
            f"column {', '.join(schema.blob_columns)} is a blob column, whose values do not go through the "
            "write path yet and would be lost; write such tables with lance.write_dataset and "
            "lance.LanceDataset.merge_insert, or keep the values in a plain large_binary column"
        )


def refuse_added(schema: TableSchema, *names: str) -> None:
    """Refuse to add columns to rows that have some of these names already."""
    taken = [name for name in names if name in schema.field_ids]
    if taken:
        raise InvalidInputError(
            f"the table has columns of its own named {', '.join(taken)}, which are added here; rename them "
            "with lance.LanceDataset.alter_columns"
        )


def readable_columns(schema: TableSchema, names: Iterable[str]) -> list[str]:
    """``names``; refuses blob columns, whose values merged reads cannot show."""
    chosen = list(names)
    blobs = [name for name in chosen if name in schema.blob_columns]
    if blobs:
        others = [name for name in schema.names if name not in schema.blob_columns]
        raise InvalidInputError(
            f"column {', '.join(blobs)} is a blob column, which lancewal does not read yet; select others "
            f"({', '.join(others)}), and read the blobs with lance.LanceDataset.take_blobs"
        )
    return chosen


def refuse_blob_values(batch: pa.RecordBatch) -> None:
    """Refuse rows of another writer that have values in blob columns: they would be left behind."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if is_blob(field) and column.null_count < len(column):
            raise InvalidInputError(
                f"the log holds values of the blob column {field.name}, which lancewal cannot flush yet; "
                "flush the shard with the writer that wrote them"
            )


def _problem(name: str, is_key: bool) -> str | None:
    if not name:
        return "has no name, and Lance cannot append to such a table"
    if name == TOMBSTONE:
        return "has the name that marks deletes"
    if name in LANCE_NAMES:
        return "has a name that Lance keeps for itself"
    if name == "*":
        return "has the name that stands for all columns"
    if "`" in name or "." in name:
        return "has a backtick or a dot in its name, and Lance cannot append to such a table"
    if is_key and '"' in name:
        return "is a key and has a double quote in its name, which Lance cannot merge by"
    return None


def _below(field: pa.Field) -> Iterator[pa.Field]:
    for place in range(field.type.num_fields):
        child = field.type.field(place)
        yield child
        yield from _below(child)
