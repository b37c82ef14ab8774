"""The base table after a compaction: its indexes brought up to date, its small files joined."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import lance

from lancewal.base import BaseTable
from lancewal.maintenance.commits import commit_errors, until_won
from lancewal.maintenance.tags import mark_pending
from lancewal.objects import ObjectStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Optimized:
    """What was done to the base table."""

    indexes_optimized: bool = False
    files_removed: int = 0
    files_added: int = 0


def optimize_base(store: ObjectStore, *, indexes: bool = True, files: bool = True) -> Optimized:
    """Bring every index up to date with the rows that came since, and join small files.

    Indexes come first: Lance joins no file that an index covers with one that it does not. They come
    last too, because Lance forgets how far they had caught up when files are joined. The MemWAL
    index, which has no columns, is left to Lance, which keeps it.
    """
    # A tag must not outlive the fragments it came with for long.
    mark_pending(store)
    indexes = indexes and bool(_newest(store).manifest.indexes)
    removed = added = 0
    if indexes:
        until_won("index optimisation", lambda: _optimize_indexes(store))
    if files:
        (removed, added), _ = until_won("file compaction", lambda: _compact_files(store))
        if indexes and removed:
            until_won("index optimisation", lambda: _optimize_indexes(store))
    return Optimized(indexes, removed, added)


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
