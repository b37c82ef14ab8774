"""Compaction: flushed generations into the base table, shard by shard.

Compaction claims no shard and fences no writer; it reads manifests and SSTables, and commits to
the base table. It may run beside writers, readers, other compactors and direct writes to the
table, may be killed anywhere, and may be run again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import lance

from lancewal.base import BaseTable, store_column_history
from lancewal.errors import InvalidInputError, LanceWalError, PartialWriteError
from lancewal.maintenance.append_only import AppendOnlyCompaction
from lancewal.maintenance.commits import commit_errors, mark_pending, remove_tags, until_won
from lancewal.maintenance.gc import collect_garbage
from lancewal.maintenance.keyed import KeyedCompaction
from lancewal.maintenance.plan import (
    DEFAULT_COMMIT_BYTES,
    CompactionPlan,
    CompactionReport,
    ProgressCallback,
    ShardPlan,
    ShardReport,
    plan_compaction,
)
from lancewal.maintenance.retention import Resource
from lancewal.storage import ObjectStore, ordered_map

logger = logging.getLogger(__name__)

# The base table after a compaction: its indexes brought up to date, its small files joined.


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


#: Shards that are compacted side by side; each needs memory for one commit.
DEFAULT_WORKERS = 2


@dataclass(frozen=True)
class _Failed:
    shard_id: UUID
    error: Exception


def execute_shard(
    plan: ShardPlan,
    storage_options: Mapping[str, str] | None = None,
    *,
    store: ObjectStore | None = None,
    progress: ProgressCallback | None = None,
) -> ShardReport:
    """Carry out one shard's part of a plan; in any process, at any time, any number of times.

    Takes nothing that cannot be pickled, so that it can be a task of a distributed job. Generations
    that the base holds by now are skipped. Raises :class:`~lancewal.errors.ConflictError` when
    other commits to the table kept coming first.
    """
    started = time.perf_counter()
    store = store or ObjectStore.from_uri(plan.uri, storage_options)
    base = BaseTable.open(store.uri, store.storage_options, store=store)
    kind = KeyedCompaction if base.schema.primary_key else AppendOnlyCompaction
    report = kind(plan, store, progress).run()
    report.seconds = time.perf_counter() - started
    return report


def finish_compaction(store: ObjectStore) -> None:
    """Tidy up after all shards of a table; harmless if it is left out."""
    mark_pending(store)
    remove_tags(store)
    base = BaseTable.open(store.uri, store.storage_options, store=store)
    store_column_history(store, base.version)
    prune_compacted(base, store)


def prune_compacted(base: BaseTable, store: ObjectStore, shards: Sequence[UUID] | None = None) -> None:
    """Take the generations that the base holds, and that nobody else needs, out of the shards' manifests.

    Only markers say that such a generation is compacted, and they are gone when the MemWAL index is
    dropped: its rows would then lie over newer ones. Directories stay for garbage collection.
    A failure is only logged, because garbage collection does the same later.
    """
    try:
        collect_garbage(base, store, resources=[Resource.MANIFEST_ENTRIES], shards=shards)
    except LanceWalError as error:
        logger.warning("compacted generations are still listed: %s", error)


def compact(
    base: BaseTable,
    store: ObjectStore | None = None,
    shards: Sequence[UUID | str] | None = None,
    *,
    plan: CompactionPlan | None = None,
    max_commit_bytes: int = DEFAULT_COMMIT_BYTES,
    max_workers: int = DEFAULT_WORKERS,
    optimize_indexes: bool = False,
    compact_files: bool = False,
    progress: ProgressCallback | None = None,
) -> CompactionReport:
    """Bring all flushed generations (of some ``shards``, or as in ``plan``) into the base table.

    ``optimize_indexes`` then brings the table's indexes up to date, ``compact_files`` joins its
    small files. Raises :class:`~lancewal.errors.PartialWriteError` when some shards failed; what
    the others did stays.
    """
    if max_workers < 1:
        raise InvalidInputError(f"max_workers must be at least 1, got {max_workers}")
    started = time.perf_counter()
    store = store or ObjectStore.from_uri(base.uri, base.storage_options)
    if plan is None:
        plan = plan_compaction(base, store, shards, max_commit_bytes=max_commit_bytes)
    report = CompactionReport(base.uri)
    execute = _executor(store, progress)
    # Without a key shards would only refuse each other's commits.
    workers = max_workers if plan.has_key else 1
    failed: dict[UUID, Exception] = {}
    done: dict[UUID, ShardReport] = {}
    for outcome in (each for outcomes in ordered_map(execute, plan.units, workers) for each in outcomes):
        if isinstance(outcome, _Failed):
            failed[outcome.shard_id] = outcome.error
        elif outcome.shard_id in done:
            done[outcome.shard_id].add(outcome)
        else:
            done[outcome.shard_id] = outcome
    report.shards += done.values()
    if not plan.has_key:
        mark_pending(store)
        remove_tags(store)
    if failed:
        raise PartialWriteError("compaction", failed, {s.shard_id: s.rows_upserted for s in report.shards})
    if optimize_indexes or compact_files:
        optimized = optimize_base(store, indexes=optimize_indexes, files=compact_files)
        report.indexes_optimized = optimized.indexes_optimized
        report.files_removed, report.files_added = optimized.files_removed, optimized.files_added
    base = BaseTable.open(base.uri, base.storage_options, store=store)
    report.base_version = base.version
    store_column_history(store, report.base_version)
    if report.shards:
        prune_compacted(base, store, [shard.shard_id for shard in report.shards])
    report.seconds = time.perf_counter() - started
    return report


def _executor(
    store: ObjectStore, progress: ProgressCallback | None
) -> Callable[[Sequence[ShardPlan]], list[ShardReport | _Failed]]:
    def execute(unit: Sequence[ShardPlan]) -> list[ShardReport | _Failed]:
        outcomes: list[ShardReport | _Failed] = []
        for plan in unit:
            try:
                outcomes.append(execute_shard(plan, store=store, progress=progress))
            except Exception as error:
                logger.warning("compaction failed: %s", error, extra={"shard": str(plan.shard_id)})
                # What comes after it would lie below it.
                return [*outcomes, _Failed(plan.shard_id, error)]
        return outcomes

    return execute
