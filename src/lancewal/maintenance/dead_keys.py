"""Deleted keys as a condition of Lance's SQL.

A merge deletes rows of the base table that match a condition. One column becomes a list of
its values. For several columns Lance has no list of tuples, and alternatives joined by OR
cost it a quarter of a millisecond each; so the columns are joined to one text per row, in a way
that no two keys share, and compared with a list of such texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from lancewal.dialect import among, column_name, literal

_SEPARATOR = ":"


def is_dead(names: Sequence[str], columns: Sequence[pa.Array]) -> str:
    """The condition that a row has one of the keys in ``columns``, which are not empty.

    >>> is_dead(["id"], [pa.array([1, 2])])
    '`id` IN (1, 2)'
    >>> is_dead(["a", "b"], [pa.array([1]), pa.array(["x:y"])])
    "concat(cast(`a` as string), ':', cast(octet_length(`b`) as string), ':', `b`, ':') IN ('1:3:x:y:')"
    """
    if len(names) == 1:
        return among(names[0], columns[0])
    expression = ", ".join(_sql_parts(name, column.type) for name, column in zip(names, columns, strict=True))
    parts = [part for column in columns for part in _text_parts(column)]
    texts = pc.binary_join_element_wise(*parts, "", _SEPARATOR)
    return f"concat({expression}) IN ({', '.join(map(literal, texts))})"


def _sql_parts(name: str, type_: pa.DataType) -> str:
    column = column_name(name)
    if _is_text(type_):
        return f"cast(octet_length({column}) as string), '{_SEPARATOR}', {column}, '{_SEPARATOR}'"
    if _is_binary(type_):
        return f"encode({column}, 'hex'), '{_SEPARATOR}'"
    return f"cast({column} as string), '{_SEPARATOR}'"


def _text_parts(column: pa.Array) -> list[pa.Array]:
    """The texts that :func:`_sql_parts` makes, each without the separator after it."""
    if _is_text(column.type):
        return [pc.binary_length(column).cast(pa.string()), column.cast(pa.string())]
    if _is_binary(column.type):
        return [pa.array([value.hex() for value in column.to_pylist()], pa.string())]
    return [column.cast(pa.string())]


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _is_binary(type_: pa.DataType) -> bool:
    return bool(pa.types.is_binary(type_) or pa.types.is_large_binary(type_))
