"""Searches of a table as it is now: by vector, and by words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from lancewal.predicate import Predicate
from lancewal.reader.nearest import checked_nearest, nearest
from lancewal.reader.snapshot import Snapshot
from lancewal.reader.table_reader import TableReader
from lancewal.reader.words import checked_words, find_words

T = TypeVar("T")


def vector_search(
    reader: TableReader,
    column: str,
    query: Any,
    k: int,
    *,
    filter: str | None = None,
    columns: Sequence[str] | None = None,
    metric: str | None = None,
    nprobes: int | None = None,
    refine_factor: int | None = None,
) -> pa.Table:
    """The ``k`` nearest rows of the newest state; see :meth:`lancewal.Table.vector_search`."""

    def search(snapshot: Snapshot, predicate: Predicate | None) -> pa.Table:
        asked = checked_nearest(snapshot, column, query, k, metric, predicate, nprobes, refine_factor)
        return nearest(snapshot, asked, columns)

    return _in_snapshot(reader, filter, search)


def full_text_search(
    reader: TableReader,
    column: str,
    query: str,
    k: int,
    *,
    filter: str | None = None,
    columns: Sequence[str] | None = None,
    operator: str = "or",
    phrase: bool = False,
) -> pa.Table:
    """The ``k`` best rows of the newest state; see :meth:`lancewal.Table.full_text_search`."""

    def search(snapshot: Snapshot, predicate: Predicate | None) -> pa.Table:
        asked = checked_words(snapshot, column, query, k, operator, phrase, predicate)
        return find_words(snapshot, asked, columns)

    return _in_snapshot(reader, filter, search)


def _in_snapshot(
    reader: TableReader, filter: str | None, search: Callable[[Snapshot, Predicate | None], T]
) -> T:
    """A scan parses the filter and prunes shards by it: its snapshot and predicate serve here too."""
    scan = reader.scan(filter=filter)
    return search(scan.snapshot, scan.predicate)
