"""Which Arrow types a column accepts: the same values in another form, or values of the same kind."""

from __future__ import annotations

import pyarrow as pa

_types = pa.types

#: A timestamp in one of these zones has the same digits as one without a time zone.
UTC_NAMES = frozenset({"UTC", "utc", "Etc/UTC", "GMT", "Z", "+00:00", "-00:00"})


def same_values(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether two types hold the same values in another physical form.

    >>> same_values(pa.large_string(), pa.string()), same_values(pa.int32(), pa.int64())
    (True, False)
    """
    if _types.is_dictionary(given):
        given = given.value_type
    if given.equals(wanted) or _types.is_null(given):
        return True
    for family in (is_text, is_bytes):
        if family(given) and family(wanted):
            return True
    if _is_list(given) and _is_list(wanted):
        return same_values(given.value_type, wanted.value_type)
    if _types.is_fixed_size_list(given) and _types.is_fixed_size_list(wanted):
        return given.list_size == wanted.list_size and same_values(given.value_type, wanted.value_type)
    if _types.is_struct(given) and _types.is_struct(wanted) and given.num_fields == wanted.num_fields:
        pairs = [(given.field(i), wanted.field(i)) for i in range(wanted.num_fields)]
        return all(g.name == w.name and same_values(g.type, w.type) for g, w in pairs)
    return False


def same_kind(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type may equal values of the other: numbers, times, text, and lists of them.

    Booleans are not numbers, and text is not a number even if it spells one.

    >>> same_kind(pa.int64(), pa.float32()), same_kind(pa.string(), pa.int64())
    (True, False)
    """
    given, wanted = _plain(given), _plain(wanted)
    if _types.is_null(given) or given.equals(wanted):
        return True
    for family in (_is_number, _is_moment, _types.is_time, _types.is_duration, is_text, is_bytes):
        if family(given) and family(wanted):
            return True
    if is_list(given) and is_list(wanted):
        return same_kind(given.value_type, wanted.value_type)
    if _types.is_struct(given) and _types.is_struct(wanted):
        present = {field.name: field.type for field in wanted}
        return all(field.name in present and same_kind(field.type, present[field.name]) for field in given)
    if _types.is_map(given) and _types.is_map(wanted):
        return same_kind(given.key_type, wanted.key_type) and same_kind(given.item_type, wanted.item_type)
    return False


def changes_clock(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a conversion changes the digits of timestamps, because only one of the types has a time zone.

    >>> changes_clock(pa.timestamp("us", "Asia/Tokyo"), pa.timestamp("us"))
    True
    >>> changes_clock(pa.timestamp("us", "UTC"), pa.timestamp("us"))
    False
    """
    if _is_moment(given) and _is_moment(wanted):
        zones = {getattr(type_, "tz", None) for type_ in (given, wanted)}
        return None in zones and not zones <= UTC_NAMES | {None}
    if _types.is_struct(given) and _types.is_struct(wanted):
        present = {field.name: field.type for field in wanted}
        return any(changes_clock(field.type, present.get(field.name, field.type)) for field in given)
    if given.num_fields != wanted.num_fields:
        return False
    return any(changes_clock(given.field(i).type, wanted.field(i).type) for i in range(given.num_fields))


def is_float_list(type_: pa.DataType) -> bool:
    """Whether a type is a vector or another list of floats."""
    return is_list(type_) and bool(_types.is_floating(type_.value_type))


def is_list(type_: pa.DataType) -> bool:
    """Whether values are lists, of any number of items or of a fixed one."""
    return _is_list(type_) or bool(_types.is_fixed_size_list(type_))


def is_text(type_: pa.DataType) -> bool:
    return bool(_types.is_string(type_) or _types.is_large_string(type_) or _types.is_string_view(type_))


def is_bytes(type_: pa.DataType) -> bool:
    return bool(_types.is_binary(type_) or _types.is_large_binary(type_) or _types.is_binary_view(type_))


def _is_list(type_: pa.DataType) -> bool:
    return bool(_types.is_list(type_) or _types.is_large_list(type_))


def _is_number(type_: pa.DataType) -> bool:
    return bool(_types.is_integer(type_) or _types.is_floating(type_) or _types.is_decimal(type_))


def _is_moment(type_: pa.DataType) -> bool:
    return bool(_types.is_timestamp(type_) or _types.is_date(type_))


def _plain(type_: pa.DataType) -> pa.DataType:
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    return type_.value_type if _types.is_dictionary(type_) else type_
