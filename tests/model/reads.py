"""Every way to read a table, compared with its model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pyarrow as pa

from lancewal.reader import Scan, TableReader
from tests.model.table_model import KEY_NUMBERS, Row, TableModel, as_bag

#: Of all filters, so many are tried at a step; the next step goes on with the next ones.
FILTERS_PER_STEP = 3


def check_scans(reader: TableReader, model: TableModel, step: int) -> None:
    """Whole, filtered, paged, by column, and counted."""
    rows = model.rows()
    whole = reader.scan()
    assert whole.schema.equals(model.schema)
    assert as_bag(whole.to_table().to_pylist()) == as_bag(rows)
    assert whole.count_rows() == len(rows)
    filters = model.filters()
    first = step * FILTERS_PER_STEP % len(filters)
    for sql, matches in islice([*filters, *filters], first, first + FILTERS_PER_STEP):
        wanted = [row for row in rows if matches(row)]
        scan = reader.scan(filter=sql)
        assert as_bag(scan.to_batches().read_all().to_pylist()) == as_bag(wanted), sql
        assert scan.count_rows() == len(wanted), sql
    _check_pages(scan, wanted, 1 + step % 4)
    last = model.columns[-1].name
    only = reader.scan([last]).to_table()
    assert as_bag(only.to_pylist()) == as_bag([{last: row[last]} for row in rows])


def check_lookups(reader: TableReader, model: TableModel, step: int) -> None:
    """Every key, some twice, and some that were never there, in an order that changes."""
    numbers = [*range(KEY_NUMBERS + 2), step % KEY_NUMBERS, 77, step % KEY_NUMBERS]
    numbers = numbers[step % 7 :] + numbers[: step % 7]
    keys = [model.keys.columns_of(number) for number in numbers]
    expected = [model.row(model.keys.key(number)) for number in numbers]
    result = reader.lookup(pa.Table.from_pylist(keys, pa.schema(model.keys.fields)))
    assert result.found.tolist() == [row is not None for row in expected]
    assert result.table.to_pylist() == [row for row in expected if row is not None]
    one = reader.lookup(keys[0])
    assert one.table.to_pylist() == [row for row in expected[:1] if row is not None]


def _check_pages(scan: Scan, wanted: Sequence[Row], size: int) -> None:
    pages: list[Row] = []
    for start in range(0, len(wanted) + size, size):
        page = Scan(scan.snapshot, None, scan.predicate, limit=size, offset=start)
        found = page.to_table().to_pylist()
        assert len(found) == page.count_rows() == max(0, min(size, len(wanted) - start))
        pages += found
    assert as_bag(pages) == as_bag(wanted)
