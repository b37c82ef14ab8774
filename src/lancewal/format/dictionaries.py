"""Dictionary columns whose dictionaries say that a word is null.

Arrow allows a null to be told in two ways: by a row without a number, and by a number whose word is
null. It does not join arrays of the second kind ("cannot yet unify dictionaries with nulls").
Lance gives such arrays out of files of version 2.0, and callers may pass some; here they become
arrays of the first kind.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.format.align import with_items

_Rows = TypeVar("_Rows", pa.RecordBatch, pa.Table)


def has_dictionary(type_: pa.DataType) -> bool:
    """Whether a type is a dictionary or holds some.

    >>> has_dictionary(pa.list_(pa.dictionary(pa.int8(), pa.string()))), has_dictionary(pa.string())
    (True, False)
    """
    if pa.types.is_dictionary(type_):
        return True
    return any(has_dictionary(type_.field(place).type) for place in range(type_.num_fields))


def without_null_words(array: pa.Array) -> pa.Array:
    """``array`` with no null in its dictionaries, nested ones included; itself where there is none.

    >>> given = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), pa.array(["a", None, "b"]))
    >>> joinable = without_null_words(given)
    >>> joinable.to_pylist(), joinable.dictionary.to_pylist()
    (['a', None, 'b'], ['a', 'b'])
    """
    type_ = array.type
    if not has_dictionary(type_):
        return array
    if pa.types.is_dictionary(type_):
        return _renumbered(array) if array.dictionary.null_count else array
    if pa.types.is_struct(type_):
        children = [without_null_words(array.field(place)) for place in range(type_.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=array.is_null())
    if pa.types.is_map(type_):
        return array
    return with_items(array, type_, without_null_words)


def without_null_words_in(rows: _Rows) -> _Rows:
    """``rows`` with :func:`without_null_words` for every column."""
    if isinstance(rows, pa.RecordBatch):
        return pa.RecordBatch.from_arrays(list(map(without_null_words, rows.columns)), schema=rows.schema)
    columns = [
        pa.chunked_array([without_null_words(chunk) for chunk in column.chunks], column.type)
        for column in rows.columns
    ]
    return pa.Table.from_arrays(columns, schema=rows.schema)


def _renumbered(array: pa.DictionaryArray) -> pa.DictionaryArray:
    present = array.dictionary.is_valid().to_numpy(zero_copy_only=False)
    numbers = pa.array(np.cumsum(present) - 1, array.type.index_type, mask=~present)
    return pa.DictionaryArray.from_arrays(
        pc.take(numbers, array.indices), array.dictionary.drop_null(), ordered=array.type.ordered
    )
