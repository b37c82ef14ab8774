"""Compaction: flushed generations into the base table, many shards in a commit.

Compaction claims no shard and fences no writer; it reads manifests and SSTables, and commits to
the base table. It may run beside writers, readers, other compactors and direct writes to the
table, may be killed anywhere, and may be run again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from uuid import UUID

import lance

from lancewal.base import BaseTable, store_column_history
from lancewal.errors import InvalidInputError, PartialWriteError
from lancewal.maintenance.append_only import AppendOnlyCompaction, mark_pending, remove_tags
from lancewal.maintenance.commits import commit_errors, open_base, until_won
from lancewal.maintenance.gc import prune_compacted
from lancewal.maintenance.keyed import KeyedCompaction
from lancewal.maintenance.plan import DEFAULT_COMMIT_BYTES, CompactionPlan, Pack, ShardPlan, planned
from lancewal.maintenance.reports import (
    PACK_SUMS,
    CompactionReport,
    PackReport,
    ProgressCallback,
    ShardReport,
)
from lancewal.storage import ObjectStore, ordered_map

logger = logging.getLogger(__name__)

#: Commits that are prepared side by side; each needs memory for its rows.
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
    base: BaseTable | None = None
    if plan is None:
        plan, base = planned(store, shards, max_commit_bytes=max_commit_bytes)
    # Without a key commits would only refuse each other.
    workers = max_workers if plan.has_key else 1
    bases = iter([base])
    done = PackReport()

    def execute(pack: Pack) -> PackReport:
        # The first commits move the table on: whoever comes later opens it again.
        return execute_pack(pack, store=store, progress=progress, base=next(bases, None))

    for each in ordered_map(execute, plan.packs, workers):
        done.add(each)
    report = CompactionReport(store.uri, list(done.shards.values()))
    for name in PACK_SUMS:
        setattr(report, name, getattr(done, name))
    if not plan.has_key:
        mark_pending(store)
        remove_tags(store)
    if done.failed:
        written = [each for each in report.shards if each.generations or each.shard_id not in done.failed]
        raise PartialWriteError("compaction", done.failed, {s.shard_id: s.rows_upserted for s in written})
    if optimize_indexes or compact_files:
        done_to_base = optimize_base(store, indexes=optimize_indexes, files=compact_files)
        report.indexes_optimized, report.files_removed, report.files_added = done_to_base
    report.base_version = open_base(store).version
    store_column_history(store, report.base_version)
    if report.shards:
        prune_compacted(store, [shard.shard_id for shard in report.shards])
    report.seconds = time.perf_counter() - started
    return report


def execute_pack(
    pack: Pack,
    storage_options: Mapping[str, str] | None = None,
    *,
    store: ObjectStore | None = None,
    progress: ProgressCallback | None = None,
    base: BaseTable | None = None,
) -> PackReport:
    """Carry out one pack of a plan; in any process, at any time, any number of times.

    Takes nothing that cannot be pickled, so that it can be a task of a distributed job. Generations
    that the base holds by now are skipped. What fails is in the report; a
    :class:`~lancewal.errors.ConflictError` says that other commits to the table kept coming first.
    """
    started = time.perf_counter()
    store = store or ObjectStore.from_uri(pack.parts[0].uri, storage_options)
    base = base or open_base(store)
    kind = KeyedCompaction if base.schema.primary_key else AppendOnlyCompaction
    report = PackReport()
    for parts in [[part] for part in pack.parts] if pack.in_order else [pack.parts]:
        done = kind(parts, store, progress, base).run()
        base = None
        for shard in done.shards.values():
            shard.seconds = time.perf_counter() - started
        report.add(done)
        for shard_id, error in done.failed.items():
            logger.warning("compaction failed: %s", error, extra={"shard": str(shard_id)})
        if done.failed:
            # What comes after it in order would lie below it.
            break
    return report


def execute_shard(
    plan: ShardPlan,
    storage_options: Mapping[str, str] | None = None,
    *,
    store: ObjectStore | None = None,
    progress: ProgressCallback | None = None,
) -> ShardReport:
    """:func:`execute_pack` for one shard's part of a plan; raises if it fails."""
    done = execute_pack(Pack((plan,)), storage_options, store=store, progress=progress)
    for error in done.failed.values():
        raise error
    return done.shards[plan.shard_id]


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
