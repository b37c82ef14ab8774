"""Whether Lance's files can hold the columns of a table, found out by writing some rows in memory.

Lance creates an empty table with columns that its file version cannot store, or cannot read back, and
says so when the first rows come. Through a WAL these come at the first flush, when they are
acknowledged already. Which columns those are depends on Lance and on the file version, so it is asked.
"""

from __future__ import annotations

import secrets
from functools import lru_cache

import lance
import pyarrow as pa

from lancewal.errors import InvalidInputError, StorageError
from lancewal.format.schema import TOMBSTONE, TOMBSTONE_FIELD, TableSchema, without_field_ids
from lancewal.lance_errors import lance_errors
from lancewal.sstable.null_structs import present_values, some_values


def check_storable(schema: TableSchema, storage_version: str) -> None:
    """Refuses a table with columns whose rows could be acknowledged, but not flushed or read again."""
    for field in schema.stored:
        if field.name != TOMBSTONE and not _is_common(field.type):
            alone = pa.schema([without_field_ids(field)])
            problem = _problem(alone.serialize().to_pybytes(), storage_version)
            if problem is not None:
                raise InvalidInputError(
                    f"column {field.name!r} of type {field.type} cannot be written through a WAL: Lance's "
                    f"files of version {storage_version} do not hold such rows ({problem}). Write the table "
                    "without the column, or at another data_storage_version"
                )


def _is_common(type_: pa.DataType) -> bool:
    """Types that every file version is known to hold, nulls included: no need to try."""
    types = pa.types
    if types.is_fixed_size_list(type_) or types.is_list(type_) or types.is_large_list(type_):
        return bool(types.is_integer(type_.value_type) or types.is_floating(type_.value_type))
    return not (
        isinstance(type_, pa.BaseExtensionType) or types.is_nested(type_) or types.is_dictionary(type_)
    )


@lru_cache(maxsize=256)
def _problem(serialized: bytes, storage_version: str) -> str | None:
    """What Lance says against rows with this one column; ``None`` if it takes them."""
    field = pa.ipc.read_schema(pa.py_buffer(serialized)).field(0)
    live = some_values(field.type, 2)
    values = pa.concat_arrays([live, present_values(field, storage_version, 1)])
    marks = pa.array([False, False, True])
    rows = pa.table([values, marks], schema=pa.schema([field.with_nullable(True), TOMBSTONE_FIELD]))
    try:
        with lance_errors("store it"):
            dataset = lance.write_dataset(
                rows,
                f"memory://{secrets.token_hex(16)}",
                mode="create",
                data_storage_version=storage_version,
            )
            dataset.to_table()
            dataset.to_table(filter=f"NOT {TOMBSTONE}")
            dataset.take([2, 0])
    except StorageError as error:
        return str(error)
    return None
