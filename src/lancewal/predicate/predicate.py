"""SQL predicates in Lance's dialect over Arrow rows that are not in a Lance dataset.

Arrow evaluates comparisons of integers, booleans, text and binary with literals, and their
combinations by ``AND``, ``OR`` and ``NOT``. DataFusion, the engine that Lance uses, evaluates
everything else. Literals take the column's type as in Lance: ``f = 0.1`` finds
a 32-bit 0.1, and ``id = 1.5`` is refused if ``id`` is an integer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, reduce
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.errors import InvalidInputError
from lancewal.format import hashable, with_nulls_below_in
from lancewal.predicate import dialect
from lancewal.predicate.conditions import Among, Condition
from lancewal.predicate.expressions import ConditionBuilder, columns_of
from lancewal.storage import Shelf

# DataFusion is loaded with the first filter that needs it, because puts do not need it.
if TYPE_CHECKING:
    from datafusion import DataFrame, Expr, SessionContext

Mask = npt.NDArray[np.bool_]

#: If less than this share of the rows remains, it pays to copy them before DataFusion filters them.
_FEW = 0.5
#: Chunks below this many rows are joined if more than this share of the rows is wanted: a copy costs less
#: than a kernel call per chunk, here and in the caller's next steps.
_SMALL_CHUNK_ROWS, _MANY = 256, 0.05

_EQUALITY = re.compile(
    r"\s*(?P<column>[^\W\d]\w*)\s*=\s*(?:(?P<number>-?[0-9]+)|'(?P<text>(?:[^']|'')*)')\s*"
)


class Predicate:
    """One parsed predicate; immutable, usable from any thread."""

    def __init__(
        self, sql: str, conditions: Sequence[Condition], rest: Expr | None, rest_columns: frozenset[str]
    ) -> None:
        """A row must meet all ``conditions`` and the expression ``rest``."""
        self.sql = sql
        self.conditions = tuple(conditions)
        self._rest = rest
        self._rest_columns = rest_columns

    @classmethod
    def parse(cls, sql: str, schema: pa.Schema) -> Predicate:
        """Parse ``sql`` over the columns of ``schema``; refuse anything that is not a predicate over them.

        >>> rows = pa.table({"id": [1, 2, 3], "name": ["a", None, "b"]})
        >>> Predicate.parse("id > 1 AND name IS NOT NULL", rows.schema).mask(rows).tolist()
        [False, False, True]
        """
        _refuse_other_than_text(sql)
        dialect.refuse_deep(sql)
        single = _single_equality(sql, schema)
        if single is not None:
            return cls(dialect.with_readable_integers(sql), [single], None, frozenset())
        sql = dialect.with_readable_integers(sql)
        frame = _frame(hashable(schema))
        expression = _parse(frame, sql, schema)
        conditions: list[Condition] = []
        rest: list[Expr] = []
        for part in ConditionBuilder(schema, sql).conjuncts(expression):
            if part.condition is None:
                rest.append(part.expression)
            else:
                conditions.append(part.condition)
        if not rest:
            return cls(sql, conditions, None, frozenset())
        combined = reduce(lambda left, right: left & right, rest)
        columns = frozenset(columns_of(combined, sql))
        _check_boolean(frame, combined, sql)
        return cls(sql, conditions, combined, columns)

    @property
    def is_simple(self) -> bool:
        """Whether Arrow can evaluate all of it."""
        return self._rest is None

    @property
    def columns(self) -> frozenset[str]:
        """The top-level columns that it reads."""
        return self._rest_columns.union(*(condition.columns for condition in self.conditions))

    def values_of(self, column: str) -> pa.Array | None:
        """All distinct values that ``column`` can have in a matching row; ``None`` if it can have any.

        >>> schema = pa.schema({"id": pa.int64()})
        >>> Predicate.parse("id IN (1, 1, 2) AND id != 9", schema).values_of("id").to_pylist()
        [1, 2]
        """
        found: pa.Array | None = None
        for condition in self.conditions:
            if isinstance(condition, Among) and condition.path == (column,) and not condition.negated:
                values = condition.values
                found = values if found is None else found.filter(pc.is_in(found, value_set=values))
        return found

    def only_names_values_of(self, columns: Sequence[str]) -> bool:
        """Whether the predicate only requires that some of ``columns`` have listed values."""
        return self._rest is None and all(
            isinstance(each, Among) and not each.negated and len(each.path) == 1 and each.path[0] in columns
            for each in self.conditions
        )

    def mask(self, rows: pa.Table | pa.RecordBatch) -> Mask:
        """A mask of the rows for which the predicate is true; null does not count as true."""
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        mask = np.ones(table.num_rows, np.bool_)
        for condition in self.conditions:
            mask &= _true(condition.evaluate(table))
        if self._rest is None:
            return mask
        kept = int(np.count_nonzero(mask))
        if kept == 0:
            return mask
        needed = table.select(sorted(self._rest_columns))
        if not self._rest_columns:
            # A table without columns has no rows for DataFusion.
            needed = pa.table({"row": pa.nulls(table.num_rows)})
        if kept < _FEW * table.num_rows:
            mask[mask] = _true(_evaluate(self._rest, needed.filter(pa.array(mask)), self.sql))
        else:
            mask &= _true(_evaluate(self._rest, needed, self.sql))
        return mask


def _single_equality(sql: str, schema: pa.Schema) -> Among | None:
    """Read ``column = number`` and ``column = 'text'``, the most common filters, without a parser."""
    match = _EQUALITY.fullmatch(sql)
    if match is None or (place := schema.get_field_index(match["column"])) < 0:
        return None
    type_ = schema.field(place).type
    if match["number"] is not None and pa.types.is_integer(type_):
        value: int | str = int(match["number"])
    elif match["text"] is not None and type_ in (pa.string(), pa.large_string()):
        value = match["text"].replace("''", "'")
    else:
        return None
    try:
        return Among((match["column"],), pa.array([value], type_))
    except (pa.ArrowInvalid, OverflowError):
        # The number is too large; the parser then refuses it with a message.
        return None


@lru_cache(maxsize=1)
def _context() -> SessionContext:
    """The DataFusion context of the process; it may be used from any thread."""
    from datafusion import SessionConfig, SessionContext

    config = SessionConfig({"datafusion.sql_parser.enable_ident_normalization": "false"})
    # Rows come in small pieces; more partitions only add overhead.
    return SessionContext(config.with_target_partitions(1))


#: For each schema, an empty table against which filters are parsed.
_frames: Shelf[pa.Schema, DataFrame] = Shelf()
#: The approximate memory that DataFusion needs for a column.
_COLUMN_BYTES = 1024


def _frame(schema: pa.Schema) -> DataFrame:
    return _frames.get_or_make(schema, lambda: _new_frame(schema), lambda _: _COLUMN_BYTES * len(schema))


def _new_frame(schema: pa.Schema) -> DataFrame:
    nothing = [pa.nulls(0, type_) for type_ in schema.types]
    return _context().read_batches([pa.RecordBatch.from_arrays(nothing, schema=schema.remove_metadata())])


def _parse(frame: DataFrame, sql: str, schema: pa.Schema, what: str = "filter") -> Expr:
    # Try without translating first: that is faster, and most filters mean the same in both dialects.
    if '"' not in sql:
        with suppress(Exception):
            return frame.parse_sql_expr(sql)
    try:
        return frame.parse_sql_expr(dialect.for_datafusion(sql, schema.names))
    except Exception as error:
        raise _refusal(sql, error, what) from error


def _check_boolean(frame: DataFrame, expression: Expr, sql: str) -> None:
    try:
        type_ = frame.select(expression.alias("matches")).to_arrow_table().schema.field(0).type
    except Exception as error:
        raise _refusal(sql, error) from error
    if type_ != pa.bool_():
        raise InvalidInputError(f"the filter {sql!r} gives {type_}, not true or false")


def _evaluate(expression: Expr, rows: pa.Table, sql: str, what: str = "filter") -> pa.ChunkedArray:
    batches = with_nulls_below_in(rows.combine_chunks()).to_batches()
    if not batches:
        return pa.chunked_array([], pa.bool_())
    try:
        return _context().read_batches(batches).select(expression.alias("matches")).to_arrow_table().column(0)
    except Exception as error:
        raise _refusal(sql, error, what) from error


def _refusal(sql: str, error: Exception, what: str = "filter") -> InvalidInputError:
    words = str(error).removeprefix("DataFusion error: ").replace('"?table?".', "").replace("?table?.", "")
    words = " ".join(words.split())
    return InvalidInputError(f"the {what} {sql!r} is refused: {words}")


def selected(
    rows: pa.Table, mask: Mask, columns: Sequence[str], predicate: Predicate | None = None
) -> pa.Table:
    """``columns`` of the rows that ``mask`` marks and for which ``predicate`` is true."""
    if predicate is not None:
        mask = mask & predicate.mask(rows)
    kept = int(np.count_nonzero(mask))
    chosen = rows.select(list(columns))
    if kept == 0:
        return chosen.slice(0, 0)
    chunks: int = rows.column(0).num_chunks
    if chunks > 1 and rows.num_rows < chunks * _SMALL_CHUNK_ROWS and kept > _MANY * len(mask):
        chosen = chosen.combine_chunks()
    return chosen if kept == len(mask) else chosen.filter(pa.array(mask))


def sql_of(predicate: Predicate | None) -> str | None:
    """A filter in the form that Lance accepts."""
    return None if predicate is None else predicate.sql


class Expression:
    """One parsed SQL expression over the columns of a row, such as ``n + 1``; immutable."""

    def __init__(self, sql: str, parsed: Expr) -> None:
        self.sql = sql
        self._parsed = parsed

    @classmethod
    def parse(cls, sql: str, schema: pa.Schema) -> Expression:
        """Parse ``sql`` over the columns of ``schema``; refuse anything that is not an expression over them.

        >>> rows = pa.table({"id": [1, 2], "n": [10, None]})
        >>> Expression.parse("n + id", rows.schema).evaluate(rows).to_pylist()
        [11, None]
        """
        _refuse_other_than_text(sql)
        dialect.refuse_deep(sql, "expression")
        frame = _frame(hashable(schema))
        parsed = _parse(frame, sql, schema, "expression")
        # Rows come in batches: a window or an aggregate would be one of some of the rows.
        set(columns_of(parsed, sql, "expression"))
        try:
            frame.select(parsed.alias("value")).to_arrow_table()
        except Exception as error:
            raise _refusal(sql, error, "expression") from error
        return cls(sql, parsed)

    def evaluate(self, rows: pa.Table) -> pa.ChunkedArray:
        """The value for each row; refuses rows without one, as in a division by zero."""
        return _evaluate(self._parsed, rows, self.sql, "expression")


def _refuse_other_than_text(sql: object) -> None:
    if not isinstance(sql, str):
        raise InvalidInputError(f'{sql!r} is no SQL; pass a text, such as "n > 1"')


def _true(matches: pa.Array | pa.ChunkedArray) -> Mask:
    known = matches.fill_null(False) if matches.null_count else matches
    return np.asarray(known.to_numpy(zero_copy_only=False))
