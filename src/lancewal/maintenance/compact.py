"""Compaction: flushed generations into the base table, shard by shard.

Compaction claims no shard and fences no writer; it reads manifests and SSTables, and commits to
the base table. It may run beside writers, readers, other compactors and direct writes to the
table, may be killed anywhere, and may be run again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from uuid import UUID

import lance

from lancewal.base import store_column_history
from lancewal.errors import InvalidInputError, PartialWriteError
from lancewal.maintenance.append_only import AppendOnlyCompaction, mark_pending, remove_tags
from lancewal.maintenance.commits import commit_errors, open_base, until_won
from lancewal.maintenance.gc import prune_compacted
from lancewal.maintenance.keyed import KeyedCompaction
from lancewal.maintenance.plan import DEFAULT_COMMIT_BYTES, CompactionPlan, ShardPlan, plan_compaction
from lancewal.maintenance.reports import CompactionReport, ProgressCallback, ShardReport
from lancewal.storage import ObjectStore, ordered_map

logger = logging.getLogger(__name__)

#: Shards that are compacted side by side; each needs memory for one commit.
DEFAULT_WORKERS = 2


def compact(
    store: ObjectStore,
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
    if plan is None:
        plan = plan_compaction(store, shards, max_commit_bytes=max_commit_bytes)
    # Without a key shards would only refuse each other's commits.
    workers = max_workers if plan.has_key else 1
    report = CompactionReport(store.uri)
    failed: dict[UUID, Exception] = {}
    done: dict[UUID, ShardReport] = {}
    for reports, failure in ordered_map(partial(_execute_unit, store, progress), plan.units, workers):
        failed.update(failure)
        for each in reports:
            if each.shard_id in done:
                done[each.shard_id].add(each)
            else:
                done[each.shard_id] = each
    report.shards += done.values()
    if not plan.has_key:
        mark_pending(store)
        remove_tags(store)
    if failed:
        raise PartialWriteError("compaction", failed, {s.shard_id: s.rows_upserted for s in report.shards})
    if optimize_indexes or compact_files:
        done_to_base = optimize_base(store, indexes=optimize_indexes, files=compact_files)
        report.indexes_optimized, report.files_removed, report.files_added = done_to_base
    report.base_version = open_base(store).version
    store_column_history(store, report.base_version)
    if report.shards:
        prune_compacted(store, [shard.shard_id for shard in report.shards])
    report.seconds = time.perf_counter() - started
    return report


def _execute_unit(
    store: ObjectStore, progress: ProgressCallback | None, unit: Sequence[ShardPlan]
) -> tuple[list[ShardReport], dict[UUID, Exception]]:
    """Carry out parts that follow each other: their reports, and the shard that failed with its error."""
    reports: list[ShardReport] = []
    for plan in unit:
        try:
            reports.append(execute_shard(plan, store=store, progress=progress))
        except Exception as error:
            logger.warning("compaction failed: %s", error, extra={"shard": str(plan.shard_id)})
            # What comes after it would lie below it.
            return reports, {plan.shard_id: error}
    return reports, {}


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
    kind = KeyedCompaction if open_base(store).schema.primary_key else AppendOnlyCompaction
    report = kind(plan, store, progress).run()
    report.seconds = time.perf_counter() - started
    return report


def finish_compaction(store: ObjectStore) -> None:
    """Tidy up after all shards of a table; harmless if it is left out."""
    mark_pending(store)
    remove_tags(store)
    store_column_history(store, open_base(store).version)
    prune_compacted(store)


def optimize_base(store: ObjectStore, *, indexes: bool = True, files: bool = True) -> tuple[bool, int, int]:
    """Bring every index up to date with the rows that came since, and join small files.

    Returns whether there were indexes, and how many files were removed and added.

    Indexes come first: Lance joins no file that an index covers with one that it does not. They come
    last too, because Lance forgets how far they had caught up when files are joined. The MemWAL
    index, which has no columns, is left to Lance, which keeps it.
    """
    # A tag must not outlive the fragments it came with for long.
    mark_pending(store)
    indexes = indexes and bool(open_base(store).manifest.indexes)
    removed = added = 0
    if indexes:
        until_won("index optimisation", lambda: _optimize_indexes(store))
    if files:
        (removed, added), _ = until_won("file compaction", lambda: _compact_files(store))
        if indexes and removed:
            until_won("index optimisation", lambda: _optimize_indexes(store))
    return indexes, removed, added


def _compact_files(store: ObjectStore) -> tuple[int, int]:
    dataset: lance.LanceDataset = open_base(store).dataset
    with commit_errors("compact the files of the base table"):
        metrics = dataset.optimize.compact_files()
    return int(metrics.files_removed), int(metrics.files_added)


def _optimize_indexes(store: ObjectStore) -> None:
    dataset: lance.LanceDataset = open_base(store).dataset
    with commit_errors("bring the indexes of the base table up to date"):
        dataset.optimize.optimize_indices()
