"""Translates Spark's filters to Lance's SQL, if a table evaluates them exactly as Spark does.

Filters come as objects of Spark's Python data sources, or as JSON from the planner's front, which can join
them by AND, OR and NOT.
"""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, getcontext
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import datasource as ds

from lancewal.errors import InvalidInputError
from lancewal.predicate import Predicate, column_name

_COMPARISONS: dict[type[ds.Filter], str] = {
    ds.EqualTo: "=",
    ds.GreaterThan: ">",
    ds.GreaterThanOrEqual: ">=",
    ds.LessThan: "<",
    ds.LessThanOrEqual: "<=",
}
_TEXT_FUNCTIONS: dict[type[ds.Filter], str] = {
    ds.StringStartsWith: "starts_with",
    ds.StringEndsWith: "ends_with",
    ds.StringContains: "contains",
}
#: Longer lists are left to Spark, which looks values up in a hash table.
_MAX_VALUES = 1_000


def split_filters(filters: Iterable[ds.Filter], columns: pa.Schema) -> tuple[list[str], list[ds.Filter]]:
    """The filters that the table can evaluate, as Lance's SQL, and the filters that are left to Spark."""
    pushed: list[str] = []
    left: list[ds.Filter] = []
    for each in filters:
        sql = None if _may_be_rounded(each) else to_sql(each, columns)
        if sql is None:
            left.append(each)
        else:
            pushed.append(sql)
    return pushed, left


def _may_be_rounded(condition: ds.Filter) -> bool:
    """Whether PySpark may have rounded a decimal on its way into a filter.

    It makes decimals by a multiplication, which keeps as many digits as the context of Python's decimals
    says, 28 of up to 38. The planner's front passes them as text.
    """
    inner = condition.child if isinstance(condition, ds.Not) else condition
    value = getattr(inner, "value", None)
    values = value if isinstance(value, tuple | list) else (value,)
    most = getcontext().prec
    return any(isinstance(each, Decimal) and len(each.as_tuple().digits) >= most for each in values)


def to_sql(condition: ds.Filter, columns: pa.Schema) -> str | None:
    """One filter as Lance's SQL; ``None`` if the table might evaluate it differently from Spark."""
    negated = isinstance(condition, ds.Not)
    inner = condition.child if isinstance(condition, ds.Not) else condition
    path = getattr(inner, "attribute", ())
    type_ = _type_of(path, columns)
    if type_ is None:
        return None
    sql = _condition(inner, ".".join(column_name(part) for part in path), type_, negated)
    if sql is None:
        return None
    try:
        Predicate.parse(sql, columns)
    except InvalidInputError:
        return None
    return sql


def _condition(condition: ds.Filter, column: str, type_: pa.DataType, negated: bool) -> str | None:
    negation = "NOT " if negated else ""
    if isinstance(condition, ds.IsNull | ds.IsNotNull):
        is_null = isinstance(condition, ds.IsNull) != negated
        return f"{column} IS {'' if is_null else 'NOT '}NULL"
    if type(condition) in _TEXT_FUNCTIONS:
        function = _TEXT_FUNCTIONS[type(condition)]
        text = _literal(getattr(condition, "value", None), pa.string()) if _is_text(type_) else None
        return None if text is None else f"{negation}{function}({column}, {text})"
    if isinstance(condition, ds.In):
        literals = [_literal(value, type_) for value in condition.value]
        if not literals or len(literals) > _MAX_VALUES or None in literals:
            return None
        return f"{negation}({column} IN ({', '.join(map(str, literals))}))"
    if isinstance(condition, ds.EqualNullSafe):
        if condition.value is None:
            return f"{column} IS {'NOT ' if negated else ''}NULL"
        literal = _literal(condition.value, type_)
        if literal is None:
            return None
        return f"({column} IS NULL OR {column} != {literal})" if negated else f"{column} = {literal}"
    operator = _COMPARISONS.get(type(condition))
    literal = _literal(getattr(condition, "value", None), type_)
    if operator is None or literal is None:
        return None
    if operator != "=" and pa.types.is_floating(type_):
        # In Spark every NaN is above all numbers. The table puts one whose sign is set below them.
        is_above = operator in (">", ">=")
        beside = f"OR isnan({column})" if is_above else f"AND NOT isnan({column})"
        return f"{negation}({column} {operator} {literal} {beside})"
    return f"{negation}({column} {operator} {literal})" if negated else f"{column} {operator} {literal}"


def _literal(value: object, type_: pa.DataType) -> str | None:
    """``value`` in Lance's SQL for a column of ``type_``; ``None`` if that is not safe."""
    types = pa.types
    if isinstance(value, bool):
        return ("true" if value else "false") if types.is_boolean(type_) else None
    if isinstance(value, int | Decimal) and types.is_integer(type_):
        return str(int(value)) if value == int(value) else None
    if isinstance(value, Decimal) and types.is_decimal(type_):
        return (
            f"cast('{value:f}' as decimal({type_.precision}, {type_.scale}))" if _fits(value, type_) else None
        )
    if isinstance(value, float) and types.is_floating(type_):
        return _float(value, type_)
    if isinstance(value, str) and _is_text(type_):
        return "'" + value.replace("'", "''") + "'" if value.isprintable() or value.isspace() else None
    if isinstance(value, bytes | bytearray) and (types.is_binary(type_) or types.is_large_binary(type_)):
        return f"X'{bytes(value).hex()}'"
    if isinstance(value, dt.datetime) and types.is_timestamp(type_):
        return _timestamp(value, type_)
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime) and types.is_date32(type_):
        return f"date '{value.isoformat()}'"
    return None


def _timestamp(value: dt.datetime, type_: pa.DataType) -> str | None:
    if type_.unit not in ("us", "ns") or (value.tzinfo is None) != (type_.tz is None):
        return None
    if value.tzinfo is not None:
        value = value.astimezone(dt.UTC).replace(tzinfo=None)
    zone = "" if type_.tz is None else "Z"
    return f"timestamp '{value.isoformat(sep=' ', timespec='microseconds')}{zone}'"


def _float(value: float, type_: pa.DataType) -> str | None:
    """``value`` with all digits, if the column can hold it: a table may round a literal."""
    if not math.isfinite(value) or value == 0:
        # In Spark -0.0 equals 0.0 and all NaNs are equal; the table compares their bits.
        return None
    try:
        stored = float(pa.scalar(value, type_).as_py())
    except (pa.ArrowException, ValueError, OverflowError):
        return None
    return repr(value) if stored == value else None


def _fits(value: Decimal, type_: pa.DataType) -> bool:
    try:
        pa.scalar(value, pa.decimal128(type_.precision, type_.scale))
    except (pa.ArrowException, ValueError):
        return False
    return True


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _type_of(path: Sequence[str], columns: pa.Schema) -> pa.DataType | None:
    """The type of a column or of a struct's field; ``None`` if it is unknown or nested."""
    if not path or columns.get_field_index(path[0]) < 0:
        return None
    type_ = columns.field(path[0]).type
    for name in path[1:]:
        if not pa.types.is_struct(type_) or type_.get_field_index(name) < 0:
            return None
        type_ = type_.field(name).type
    return None if type_.num_fields else type_


#: The names of conditions on one column in Spark's planner.
_BY_NAME: dict[str, type[ds.Filter]] = {
    "=": ds.EqualTo,
    "<=>": ds.EqualNullSafe,
    ">": ds.GreaterThan,
    ">=": ds.GreaterThanOrEqual,
    "<": ds.LessThan,
    "<=": ds.LessThanOrEqual,
    "IS_NULL": ds.IsNull,
    "IS_NOT_NULL": ds.IsNotNull,
    "STARTS_WITH": ds.StringStartsWith,
    "ENDS_WITH": ds.StringEndsWith,
    "CONTAINS": ds.StringContains,
}
_EPOCH = dt.datetime(1970, 1, 1)


def planned_to_sql(condition: Mapping[str, Any], columns: pa.Schema) -> str | None:
    """A predicate of Spark's planner, as the front sends it, as SQL; ``None`` if it is left to Spark.

    A part that cannot be evaluated is left out of an AND. That is allowed, because Spark evaluates
    the whole predicate again. An OR with such a part is left to Spark.
    """
    name, children = condition["name"], condition["children"]
    if name == "AND":
        found = [sql for sql in (planned_to_sql(child, columns) for child in children) if sql is not None]
        return " AND ".join(f"({sql})" for sql in found) or None
    if name == "OR":
        parts = [planned_to_sql(child, columns) for child in children]
        return None if None in parts else " OR ".join(f"({sql})" for sql in parts)
    negated = name == "NOT"
    leaf = _planned_leaf(children[0] if negated else condition)
    if leaf is None:
        return None
    return to_sql(ds.Not(leaf) if negated else leaf, columns)


def accepted(planned: Sequence[str], columns: pa.Schema) -> Sequence[str]:
    """``planned``, or nothing if the table refuses it all together, as it does very long chains of OR.

    That is allowed for predicates of the planner, because Spark evaluates them again.
    """
    try:
        if planned:
            Predicate.parse(" AND ".join(f"({sql})" for sql in planned), columns)
    except InvalidInputError:
        return []
    return planned


def _planned_leaf(condition: Mapping[str, Any]) -> ds.Filter | None:
    operands = condition.get("children", [])
    if not operands or "field" not in operands[0] or any("type" not in each for each in operands[1:]):
        return None
    attribute = tuple(operands[0]["field"])
    values = [_planned_value(each) for each in operands[1:]]
    if condition["name"] == "IN":
        return None if None in values else ds.In(attribute, tuple(values))
    kind = _BY_NAME.get(condition["name"])
    if kind is None:
        return None
    made: Any = kind
    if kind in (ds.IsNull, ds.IsNotNull):
        return made(attribute)  # type: ignore[no-any-return]
    unknown = operands[1]["value"] is not None and values[0] is None
    return None if len(values) != 1 or unknown else made(attribute, values[0])


def _planned_value(literal: Mapping[str, Any]) -> Any:
    """A constant as Spark's data sources would pass it; ``None`` for a null and for an unknown type."""
    text, type_ = literal["value"], str(literal["type"])
    if text is None:
        return None
    if type_ in ("tinyint", "smallint", "int", "bigint"):
        return int(text)
    if type_.startswith("decimal"):
        return Decimal(text)
    if type_ == "float":
        # The text has as many digits as tell floats apart, which is another double.
        return float(np.float32(text))
    if type_ == "double":
        return float(text)
    if type_ == "boolean":
        return text == "true"
    if type_ == "string":
        return text
    if type_ == "binary":
        return base64.b64decode(text)
    try:
        if type_ == "date":
            return _EPOCH.date() + dt.timedelta(days=int(text))
        if type_ in ("timestamp", "timestamp_ntz"):
            moment = _EPOCH + dt.timedelta(microseconds=int(text))
            return moment.replace(tzinfo=dt.UTC) if type_ == "timestamp" else moment
    except OverflowError:
        # Spark's years are not only those from 1 to 9999.
        return None
    return None
