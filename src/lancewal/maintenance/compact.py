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

from lancewal.base import BaseTable, store_column_history
from lancewal.errors import InvalidInputError, PartialWriteError
from lancewal.maintenance.append_only import AppendOnlyCompaction, mark_pending, remove_tags
from lancewal.maintenance.commits import open_base
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
from lancewal.maintenance.tidy import optimize_base, tidy
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
    optimize_indexes: bool = True,
    compact_files: bool | None = None,
    progress: ProgressCallback | None = None,
) -> CompactionReport:
    """Bring all flushed generations (of some ``shards``, or as in ``plan``) into the base table.

    Then the table's indexes are brought up to date, unless ``optimize_indexes`` is false, and some of its
    small files are joined where that pays; with ``compact_files`` all of them, or none if it is false. Raises
    :class:`~lancewal.errors.PartialWriteError` when some shards failed; what the others did stays.
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
    if base is None or report.commits:
        base = open_base(store)
    done_to_base = _shape(store, base, optimize_indexes, compact_files)
    if compact_files:
        base = open_base(store)
    report.indexes_optimized, report.files_removed, report.files_added = done_to_base
    report.base_version = base.version
    store_column_history(store, report.base_version)
    if report.shards:
        prune_compacted(store, [shard.shard_id for shard in report.shards], base)
    if done.failed:
        written = [each for each in report.shards if each.generations or each.shard_id not in done.failed]
        raise PartialWriteError("compaction", done.failed, {s.shard_id: s.rows_upserted for s in written})
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


def _shape(
    store: ObjectStore, base: BaseTable, optimize_indexes: bool, compact_files: bool | None
) -> tuple[bool, int, int]:
    """Bring indexes and files of the newest version, ``base``, into shape, as :func:`compact` was told."""
    if compact_files:
        return optimize_base(store, indexes=optimize_indexes)
    return tidy(store, base, indexes=optimize_indexes, files=compact_files is None)


def finish_compaction(
    store: ObjectStore, *, optimize_indexes: bool = True, compact_files: bool | None = None
) -> None:
    """What follows the packs of a plan that tasks carried out; harmless if it is left out.

    ``optimize_indexes`` and ``compact_files`` are those of :func:`compact`.
    """
    base = open_base(store)
    if not base.schema.primary_key:
        mark_pending(store)
        remove_tags(store)
        base = open_base(store)
    _shape(store, base, optimize_indexes, compact_files)
    if compact_files:
        base = open_base(store)
    store_column_history(store, base.version)
    prune_compacted(store, base=base)
