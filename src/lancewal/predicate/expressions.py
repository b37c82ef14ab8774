"""Split DataFusion's expressions into conditions that Arrow evaluates, and the rest.

A literal gets the type of the column that it is compared with, as in Lance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.predicate.conditions import Among, Compare, Condition, Every, IsNull, Negation, Some

if TYPE_CHECKING:
    from datafusion import Expr

_DISTINCT = {"IS DISTINCT FROM": "!=", "IS NOT DISTINCT FROM": "="}
_MIRRORED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_FORBIDDEN = (
    "Unnest",
    "Subquery",
    "Exists",
    "Aggregate",
    "Window",
    "OuterReference",
    "Placeholder",
    "Wildcard",
)
_LITERAL_GETTERS = {
    "Int64": "value_i64",
    "UInt64": "value_u64",
    "Float64": "value_f64",
    "Utf8": "value_string",
    "Boolean": "value_bool",
}


@dataclass(frozen=True)
class Part:
    """A boolean expression, and the equivalent condition if Arrow can evaluate it."""

    expression: Expr
    condition: Condition | None = None


class ConditionBuilder:
    """Turns DataFusion's expressions into conditions, and gives literals the type of their column."""

    def __init__(self, schema: pa.Schema, sql: str) -> None:
        self._schema = schema
        self._sql = sql

    def conjuncts(self, expression: Expr) -> Iterator[Part]:
        for operand in _operands(expression, "AND"):
            yield self._part(operand)

    def _part(self, expression: Expr, *, strict: bool = True) -> Part:
        """Convert one operand of ``AND``. As in Lance, only literals below ``AND`` and ``OR`` are typed.

        ``strict`` is False below ``NOT``, where Lance leaves the type of literals to DataFusion.
        """
        operator = _operator(expression)
        if operator in ("AND", "OR"):
            parts = [self._part(operand, strict=strict) for operand in _operands(expression, operator)]
            joined = reduce(and_ if operator == "AND" else or_, (part.expression for part in parts))
            conditions = tuple(part.condition for part in parts if part.condition is not None)
            if len(conditions) < len(parts):
                return Part(joined)
            kind = Every if operator == "AND" else Some
            return Part(joined, kind(conditions))
        return self._leaf(expression, strict=strict)

    def _leaf(self, expression: Expr, *, strict: bool) -> Part:
        """Convert an expression that is no ``AND`` or ``OR``."""
        variant = expression.variant_name()
        if variant == "Not":
            (inner,) = expression.rex_call_operands()
            part = self._part(inner, strict=False)
            return Part(~part.expression, None if part.condition is None else Negation(part.condition))
        if variant in ("IsNull", "IsNotNull"):
            path = _path(expression.rex_call_operands()[0])
            if path is None or self._type(path) is None:
                return Part(expression)  # an expression, or a key of a map
            condition = IsNull(path, negated=variant == "IsNotNull")
            return Part(expression, condition)
        if variant == "BinaryExpr" and _operator(expression) in _MIRRORED:
            return self._comparison(expression, strict)
        if variant == "BinaryExpr" and _operator(expression) in _DISTINCT:
            return self._distinction(expression, strict)
        if variant == "InList":
            return self._in_list(expression, strict)
        if variant == "Between":
            return self._between(expression, strict)
        if variant == "ScalarFunction" and _operator(expression) == "regexp_match":
            return Part(expression.is_not_null())
        return Part(expression)

    def _comparison(self, expression: Expr, strict: bool) -> Part:
        left, right = expression.rex_call_operands()
        operator = _operator(expression)
        if left.variant_name() == "Literal":
            left, right, operator = right, left, _MIRRORED[operator]
        path = _path(left)
        if right.variant_name() != "Literal":
            return Part(expression)
        if operator in ("=", "!=") and (zeros := self._zeros(path, [right])):
            # DataFusion makes a list of four or more of such comparisons.
            return Part(_in_list_of(left, zeros, operator == "!="))
        if path is None:
            return Part(expression)
        type_ = self._type(path)
        value = self._typed(right, type_, strict)
        if value is None:
            return Part(expression)
        if not _is_plain(type_):
            return Part(_compared(left, operator, value))
        if operator == "=" and value.is_valid:
            return Part(expression, Among(path, pa.array([value.as_py()], type_)))
        return Part(expression, Compare(path, operator, value))

    def _distinction(self, expression: Expr, strict: bool) -> Part:
        """Convert ``IS [NOT] DISTINCT FROM``, which DataFusion evaluates, with a typed literal."""
        subject, literal = expression.rex_call_operands()
        path = _path(subject)
        if path is None or literal.variant_name() != "Literal" or _is_plain(self._type(path)):
            return Part(expression)
        value = self._typed(literal, self._type(path), strict)
        if value is None or not value.is_valid:
            return Part(expression)
        operator = _DISTINCT[_operator(expression)]
        compared = _compared(subject, operator, value)
        return Part(compared | subject.is_null() if operator == "!=" else compared & subject.is_not_null())

    def _in_list(self, expression: Expr, strict: bool) -> Part:
        subject, *choices = expression.rex_call_operands()
        path = _path(subject)
        negated = bool(expression.to_variant().negated())
        if path is None or any(choice.variant_name() != "Literal" for choice in choices):
            zeros = self._zeros(path, choices)
            return Part(_in_list_of(subject, [*choices, *zeros], negated) if zeros else expression)
        type_ = self._type(path)
        # Lance types the list only for a top-level column, not for a field of a struct.
        values = [self._typed(choice, type_, strict and len(path) == 1) for choice in choices]
        known = [value for value in values if value is not None]
        if type_ is not None and pa.types.is_floating(type_):
            typed = list(map(_literal, known)) if len(known) == len(values) else choices
            return Part(_in_list_of(subject, [*typed, *self._zeros(path, choices)], negated))
        if len(known) < len(values):
            return Part(expression)
        present = [value.as_py() for value in known if value.is_valid]
        return Part(
            expression,
            Among(path, pa.array(present, type_).unique(), negated, with_null=len(present) < len(known)),
        )

    def _between(self, expression: Expr, strict: bool) -> Part:
        subject, low, high = expression.rex_call_operands()
        path = _path(subject)
        if path is None or {low.variant_name(), high.variant_name()} != {"Literal"}:
            return Part(expression)
        type_ = self._type(path)
        least, greatest = (self._typed(bound, type_, strict) for bound in (low, high))
        if least is None or greatest is None:
            return Part(expression)
        negated = bool(expression.to_variant().negated())
        if not _is_plain(type_):
            between = _compared(subject, ">=", least) & _compared(subject, "<=", greatest)
            return Part(~between if negated else between)
        inside = Every((Compare(path, ">=", least), Compare(path, "<=", greatest)))
        return Part(expression, Negation(inside) if negated else inside)

    def _zeros(self, path: Sequence[str] | None, choices: Sequence[Expr]) -> list[Expr]:
        """Both zeros, if one of ``choices`` is a zero for a column of floats or an expression; else none.

        In a list of four or more DataFusion compares the bits, in which the two zeros differ. It also makes
        lists of comparisons with ``=``.
        """
        type_ = pa.float64() if path is None else self._type(path)
        if type_ is None or not pa.types.is_floating(type_):
            return []
        kinds = ("Float64",) if path is None else ("Float64", "Int64")
        for choice in choices:
            if choice.variant_name() == "Literal":
                kind, value = _literal_value(choice)
                if kind in kinds and value == 0:
                    halves = (pa.scalar(np.float16(zero), pa.float16()) for zero in (0.0, -0.0))
                    return [_literal(half.cast(type_)) for half in halves]
        return []

    def _type(self, path: Sequence[str]) -> pa.DataType | None:
        """The type of a (nested) column; ``None`` for a field that its struct does not have."""
        type_: pa.DataType = self._schema.field(path[0]).type
        for name in path[1:]:
            if not pa.types.is_struct(type_) or type_.get_field_index(name) < 0:
                return None
            type_ = type_.field(name).type
        return type_

    def _typed(self, expression: Expr, type_: pa.DataType | None, strict: bool) -> pa.Scalar | None:
        """A literal as a value of the column's type; ``None`` if DataFusion decides on its type.

        With ``strict`` a value that the type cannot hold is refused, as in Lance.
        """
        if type_ is None or not (_is_plain(type_) or pa.types.is_floating(type_)):
            return None
        if pa.types.is_floating(type_) and not strict:
            return None
        kind, value = _literal_value(expression)
        if value is None:
            return pa.scalar(None, type_) if kind == "Null" else None
        if _takes(type_, value):
            try:
                return _number(value, type_) if pa.types.is_floating(type_) else pa.scalar(value, type_)
            except (pa.ArrowInvalid, OverflowError):
                if not strict:
                    return None
        elif not strict:
            return None
        raise InvalidInputError(
            f"the filter {self._sql!r} compares a column of type {type_} with {value!r}, "
            "which that type cannot hold"
        )


def _is_plain(type_: pa.DataType | None) -> bool:
    """Whether Arrow and DataFusion compare values of this type in the same way."""
    return type_ is not None and bool(
        pa.types.is_integer(type_)
        or pa.types.is_boolean(type_)
        or type_ in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    )


def _takes(type_: pa.DataType, value: object) -> bool:
    if isinstance(value, bool):
        return bool(pa.types.is_boolean(type_))
    if isinstance(value, int):
        return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_))
    if isinstance(value, float):
        return bool(pa.types.is_floating(type_))
    if isinstance(value, str):
        return type_ in (pa.string(), pa.large_string())
    return type_ in (pa.binary(), pa.large_binary())


def _number(value: float, type_: pa.DataType) -> pa.Scalar:
    """A number as the nearest float of a type, as in Lance, which has no infinity for numbers in 16 bits."""
    if type_ != pa.float16():
        return pa.scalar(float(value), type_)
    with np.errstate(over="ignore"):
        half = np.float16(value)
    if np.isinf(half) and not np.isinf(value):
        raise OverflowError
    return pa.scalar(half, type_)


def _literal_value(expression: Expr) -> tuple[str, Any]:
    literal = expression.to_variant()
    kind = str(literal.data_type())
    if kind == "Binary":
        return kind, expression.python_value().as_py()
    getter = _LITERAL_GETTERS.get(kind)
    return kind, None if getter is None else getattr(literal, getter)()


def _path(expression: Expr) -> tuple[str, ...] | None:
    """The column, or field of a struct column, that an expression names; ``None`` if it is something else."""
    variant = expression.variant_name()
    if variant == "Column":
        return (str(expression.to_variant().name()),)
    if variant == "ScalarFunction" and _operator(expression) == "get_field":
        parent, *names = expression.rex_call_operands()
        path = _path(parent)
        if path is not None and all(name.variant_name() == "Literal" for name in names):
            return (*path, *(str(_literal_value(name)[1]) for name in names))
    return None


def _operands(expression: Expr, operator: str) -> list[Expr]:
    """The operands of a chain such as ``a OR b OR c``. A loop, because a chain may have thousands."""
    found: list[Expr] = []
    left = [expression]
    while left:
        last = left.pop()
        if _operator(last) == operator:
            left += last.rex_call_operands()
        else:
            found.append(last)
    return found[::-1]


def _operator(expression: Expr) -> str:
    if expression.variant_name() in ("BinaryExpr", "ScalarFunction"):
        return str(expression.rex_call_operator())
    return ""


def _compared(subject: Expr, operator: str, value: pa.Scalar) -> Expr:
    from datafusion import Expr

    literal = Expr.literal(value)
    return {
        "=": subject.__eq__,
        "!=": subject.__ne__,
        "<": subject.__lt__,
        "<=": subject.__le__,
        ">": subject.__gt__,
        ">=": subject.__ge__,
    }[operator](literal)


def _literal(value: pa.Scalar) -> Expr:
    from datafusion import Expr

    return Expr.literal(value)


def _in_list_of(subject: Expr, choices: Sequence[Expr], negated: bool) -> Expr:
    from datafusion.functions import in_list

    return in_list(subject, list(choices), negated)


def columns_of(expression: Expr, sql: str, what: str = "filter") -> Iterator[str]:
    """The columns that an expression reads; refuses one that needs more than the row, such as a window."""
    left = [expression]
    while left:
        part = left.pop()
        variant = part.variant_name()
        if any(kind in variant for kind in _FORBIDDEN):
            raise InvalidInputError(
                f"the {what} {sql!r} is no {'predicate' if what == 'filter' else what} over single rows: "
                f"it has a {variant}"
            )
        if variant == "Column":
            yield str(part.to_variant().name())
        elif variant != "Literal":
            left += part.rex_call_operands()
