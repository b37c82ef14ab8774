"""Random flushed states, written by either side: Lance's merging scanner and look-up give the same rows."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.reader.support import TableUnderTest, everywhere, looked_up, named, names

KEYS = st.integers(0, 9)
ROWS = st.dictionaries(KEYS, st.sampled_from(["a", "b", "c"]), min_size=1, max_size=6)
FLUSHES = st.lists(st.tuples(ROWS, st.lists(KEYS, max_size=2), st.booleans()), min_size=1, max_size=3)
FILTERS = ["name = 'a'", "id > 3 AND name != 'b'", "name LIKE 'c%' OR id IN (1, 2)", "id = 4"]


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(base=ROWS, flushes=FLUSHES, compacted=st.booleans())
def test_lance_reads_the_same_rows(
    base: dict[int, str], flushes: list[tuple[dict[int, str], list[int], bool]], compacted: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        table = TableUnderTest(Path(directory) / "t", data=named(base))
        model = dict(base)
        for rows, deletes, by_lance in flushes:
            (table.flushed_by_lance if by_lance else table.flushed)(rows, deletes)
            model |= rows
            for key in deletes:
                model.pop(key, None)
        if compacted:
            table.compact(1)
        assert everywhere(table) == model == names(table.lance_scan().to_table())
        assert table.lance_scan().count_rows() == len(model)
        for filter in FILTERS:
            assert everywhere(table, filter=filter) == names(table.lance_scan().filter(filter).to_table())
        for key in (0, 1, 4, 9):
            assert looked_up(table, [key]) == ([row["name"] for row in table.lance_lookup(key)] or [None])
