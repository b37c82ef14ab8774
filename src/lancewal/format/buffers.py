"""Values at addresses that Lance accepts.

Arrow promises buffers at multiples of 8 bytes, and that is what a batch from an IPC stream has: a WAL
entry, rows from Spark, rows from another process. Lance's engine holds a decimal as one number of
16 bytes, and dies of one that does not begin at a multiple of 16.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

_WIDE_VALUE_BYTES = 16


def has_wide_values(type_: pa.DataType) -> bool:
    """Whether a type holds decimals, itself or below it.

    >>> has_wide_values(pa.list_(pa.decimal128(10, 2))), has_wide_values(pa.float64())
    (True, False)
    """
    if isinstance(type_, pa.BaseExtensionType):
        return has_wide_values(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return has_wide_values(type_.value_type)
    return bool(pa.types.is_decimal(type_)) or any(
        has_wide_values(type_.field(place).type) for place in range(type_.num_fields)
    )


def aligned(array: pa.Array) -> pa.Array:
    """``array``, copied when a buffer of it does not begin where Lance wants it."""
    if all(buffer is None or buffer.address % _WIDE_VALUE_BYTES == 0 for buffer in array.buffers()):
        return array
    return array.take(pa.array(np.arange(len(array))))


def aligned_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """``batch`` with all its decimals where Lance wants them; mostly itself."""
    wide = [place for place, type_ in enumerate(batch.schema.types) if has_wide_values(type_)]
    if not wide:
        return batch
    columns = batch.columns
    for place in wide:
        columns[place] = aligned(columns[place])
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
