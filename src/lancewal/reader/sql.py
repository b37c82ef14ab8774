"""SQL on one table: DataFusion plans the query, and a merged read supplies the columns that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format import with_nulls_below_in
from lancewal.storage import scrubbed

if TYPE_CHECKING:
    from datafusion import DataFrame, LogicalPlan, SessionContext

#: The name of the table in a query.
TABLE_NAME = "t"


def run_sql(query: str, columns: pa.Schema, read: Callable[[Sequence[str]], pa.Table]) -> pa.Table:
    """The result of ``query`` on the table ``t``; ``read`` returns its rows with the given columns.

    The query is first planned on the table without rows, so that only the columns that it uses are read.

    >>> rows = pa.table({"id": [1, 2, 3], "n": [10, 20, 30]})
    >>> run_sql("SELECT max(n) AS most FROM t WHERE id < 3", rows.schema, rows.select).to_pylist()
    [{'most': 20}]
    """
    plain = columns.remove_metadata()
    needed = _needed(_planned(query, plain.empty_table()), plain.names)
    # A query that needs no column, such as count(*), still needs the number of rows.
    rows = read(needed or plain.names[:1])
    frame = _planned(query, with_nulls_below_in(rows.replace_schema_metadata(None)))
    try:
        return frame.to_arrow_table()
    except Exception as error:
        raise _refused(error) from None


def _planned(query: str, rows: pa.Table) -> DataFrame:
    from datafusion import SQLOptions

    context = _context()
    batches = rows.to_batches() or [pa.RecordBatch.from_pylist([], schema=rows.schema)]
    context.register_record_batches(TABLE_NAME, [batches])
    # Allow reads only: a query must not create or read files, or change settings.
    only_select = SQLOptions().with_allow_ddl(False).with_allow_dml(False).with_allow_statements(False)
    try:
        return context.sql_with_options(query, only_select)
    except Exception as error:
        raise _refused(error) from None


def _context() -> SessionContext:
    from datafusion import SessionConfig, SessionContext

    # Column names keep their case, as in filters.
    return SessionContext(SessionConfig({"datafusion.sql_parser.enable_ident_normalization": "false"}))


def _needed(frame: DataFrame, names: Sequence[str]) -> list[str]:
    """The columns that the optimised plan reads, in the table's order."""
    try:
        plan = frame.optimized_logical_plan()
    except Exception as error:
        raise _refused(error) from None
    shown = plan.display_indent()
    if "Subquery" in shown or shown.startswith("DescribeTable"):
        return list(names)  # subqueries in expressions, and described tables, are not among the plan's inputs
    used = set(_scanned(plan))
    return [name for name in names if name in used]


def _scanned(plan: LogicalPlan) -> Iterator[str]:
    node = plan.to_variant()
    if type(node).__name__ == "TableScan":
        yield from (name for _, name in node.projection())
    for each in plan.inputs():
        yield from _scanned(each)


def _refused(error: Exception) -> InvalidInputError:
    text, *causes = scrubbed(str(error)).removeprefix("DataFusion error: ").splitlines()
    if text.startswith("Optimizer rule") and causes:
        text = causes[-1]
    return InvalidInputError(f"the query was refused: {text}; the table is called {TABLE_NAME}")
