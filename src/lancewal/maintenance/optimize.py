"""The base table after a compaction: its indexes brought up to date, its small files joined."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import lance

from lancewal.base import BaseTable
from lancewal.maintenance.append_only import mark_pending
from lancewal.maintenance.commits import commit_errors, until_won
from lancewal.objects import ObjectStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Optimized:
    """What was done to the base table."""

    indexes_optimized: bool = False
    files_removed: int = 0
    files_added: int = 0


def optimize_base(store: ObjectStore, *, indexes: bool = True, files: bool = True) -> Optimized:
    """Join small files, then bring every index up to date with the rows that came since.

    Files come first: joined ones have to be indexed again where Lance cannot carry the index over.
    The MemWAL index, which has no columns, is left to Lance, which keeps it.
    """
    # A tag must not outlive the fragments it came with for long.
    mark_pending(store)
    removed = added = 0
    if files:
        metrics, _ = until_won("file compaction", lambda: _compact_files(store))
        removed, added = metrics
    has_indexes = bool(_newest(store).manifest.indexes)
    if indexes and has_indexes:
        until_won("index optimisation", lambda: _optimize_indexes(store))
    return Optimized(indexes and has_indexes, removed, added)


def _newest(store: ObjectStore) -> BaseTable:
    return BaseTable.open(store.uri, store.storage_options, store=store)


def _compact_files(store: ObjectStore) -> tuple[int, int]:
    dataset: lance.LanceDataset = _newest(store).dataset
    with commit_errors("compact the files of the base table"):
        metrics = dataset.optimize.compact_files()
    return int(metrics.files_removed), int(metrics.files_added)


def _optimize_indexes(store: ObjectStore) -> None:
    dataset: lance.LanceDataset = _newest(store).dataset
    with commit_errors("bring the indexes of the base table up to date"):
        dataset.optimize.optimize_indices()
