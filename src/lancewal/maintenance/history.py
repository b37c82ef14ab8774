"""What this process has done to keep tables in shape, in totals that only grow.

Metrics read them; nothing else does. A few numbers per table, whether anybody looks or not.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from lancewal.storage import in_forked_child

if TYPE_CHECKING:
    from lancewal.maintenance.plan import CompactionReport
    from lancewal.maintenance.retention import GcReport

R = TypeVar("R")

#: By table and name; what is collected has the kind of resource in its name, after a dot.
_totals: dict[str, Counter[str]] = {}
_lock = threading.Lock()


def _start_empty() -> None:
    """A forked child has done nothing; another thread may have held the lock when it was forked."""
    global _lock
    _lock = threading.Lock()
    _totals.clear()


in_forked_child(_start_empty)


@contextmanager
def compaction(table_uri: str) -> Iterator[Callable[[CompactionReport], CompactionReport]]:
    """Count a compaction; the body hands its report over, and an error counts as a failure."""
    with _counted(table_uri, "compaction", _of_compaction) as record:
        yield record


@contextmanager
def collection(table_uri: str) -> Iterator[Callable[[GcReport], GcReport]]:
    """Count a garbage collection; a dry run counts as nothing."""
    with _counted(table_uri, "collection", _of_collection) as record:
        yield record


def totals() -> dict[str, dict[str, float]]:
    """All totals by table.

    >>> with compaction("memory://doctest"):
    ...     raise ValueError
    Traceback (most recent call last):
    ...
    ValueError
    >>> totals()["memory://doctest"]
    {'compaction_failures': 1}
    """
    with _lock:
        return {table: dict(counter) for table, counter in _totals.items()}


@contextmanager
def _counted(
    table_uri: str, kind: str, amounts: Callable[[R], dict[str, float]]
) -> Iterator[Callable[[R], R]]:
    def record(report: R) -> R:
        _add(table_uri, amounts(report))
        return report

    try:
        yield record
    except BaseException:
        _add(table_uri, {f"{kind}_failures": 1})
        raise


def _of_compaction(report: CompactionReport) -> dict[str, float]:
    return {
        "compactions": 1,
        "compaction_seconds": report.seconds,
        "compaction_generations": report.generations,
        "compaction_rows_upserted": report.rows_upserted,
        "compaction_rows_deleted": report.rows_deleted,
        "compaction_bytes": report.num_bytes,
        "compaction_conflicts": report.retries,
    }


def _of_collection(report: GcReport) -> dict[str, float]:
    if report.dry_run:
        return {}
    deleted = {f"collected.{name}": float(number) for name, number in report.counts().items()}
    return {
        "collections": 1,
        "collection_seconds": report.seconds,
        "collection_bytes": report.num_bytes,
        **deleted,
    }


def _add(table_uri: str, amounts: dict[str, float]) -> None:
    with _lock:
        counter = _totals.setdefault(table_uri, Counter())
        for name, amount in amounts.items():
            counter[name] += amount  # type: ignore[assignment]
