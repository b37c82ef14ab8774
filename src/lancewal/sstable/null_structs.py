"""Structs in Lance's file version 2.0, which cannot say that a struct is null.

Lance refuses such rows when it writes the file, which is when a MemTable is flushed:
too late for the caller. So null structs are refused on the way in, and those of
tombstones, whose values nobody reads, are written as structs of nulls.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError
from lancewal.format.schema import TOMBSTONE

_VERSIONS_WITHOUT_NULL_STRUCTS = frozenset(["2.0"])


def needs_present_structs(storage_version: str, schema: pa.Schema) -> bool:
    """Whether rows of ``schema`` may have structs that the file version cannot hold."""
    return storage_version in _VERSIONS_WITHOUT_NULL_STRUCTS and any(map(_has_struct, schema.types))


def refuse_null_structs(batch: pa.RecordBatch, storage_version: str) -> None:
    """Refuses live rows that could not be flushed; call before they are written anywhere."""
    if not needs_present_structs(storage_version, batch.schema):
        return
    live = batch.filter(pc.invert(batch.column(TOMBSTONE))) if TOMBSTONE in batch.schema.names else batch
    for name, column in zip(live.schema.names, live.columns, strict=True):
        if _holds_null_struct(column):
            raise InvalidInputError(
                f"column {name!r} has a null struct, which the table's file version {storage_version} "
                "cannot store; write a struct of nulls, or rewrite the table at version 2.1 or later"
            )


def with_present_dead_structs(batch: pa.RecordBatch) -> pa.RecordBatch:
    """``batch`` with structs of nulls where a tombstone has null structs."""
    dead = np.asarray(batch.column(TOMBSTONE).to_numpy(zero_copy_only=False), np.bool_)
    if not dead.any():
        return batch
    columns = [_present(column, dead) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _present(array: pa.Array, where: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> pa.Array:
    if not pa.types.is_struct(array.type):
        return array
    children = [_present(child, where) for child in array.flatten()]
    still_null = array.is_null().to_numpy(zero_copy_only=False) & ~where
    fields = [array.type.field(i) for i in range(array.type.num_fields)]
    return pa.StructArray.from_arrays(children, fields=fields, mask=pa.array(still_null))


def _has_struct(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_struct(type_) or any(_has_struct(type_.field(i).type) for i in range(type_.num_fields))
    )


def _holds_null_struct(array: pa.Array) -> bool:
    if not _has_struct(array.type):
        return False
    if not pa.types.is_struct(array.type):
        return _holds_null_struct(array.flatten())
    return array.null_count > 0 or any(map(_holds_null_struct, array.flatten()))
