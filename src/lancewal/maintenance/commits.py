"""Commits to the base table: their errors, their retries, and the points at which tests kill them.

Lance has one class for most of its errors, so the texts of its errors have to be matched. This is
the only place that does.

A crash point is a named moment between two steps that change the storage. Tests stop or kill a process
there. Then they check that readers see no difference, and that the next run finishes what this one began.
Nothing else happens at crash points.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import TypeVar
from uuid import UUID

import lance
import pyarrow as pa
from lance.commit import CommitConflictError
from lance.mem_wal import CompactedSsTable

from lancewal.base import lance_errors, open_base
from lancewal.errors import ConflictError, LanceWalError, OutcomeUnknownError, StorageError
from lancewal.format import no_rows
from lancewal.storage import ObjectStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How often Lance itself retries after a conflict, by merging again into the newest version.
_LANCE_RETRIES = 10
_LANCE_RETRY_TIMEOUT = timedelta(minutes=10)
#: How often we retry after Lance gave up, or if it cannot retry by itself.
_ATTEMPTS = 32
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 2.0

_STALE = "Stale SSTable compaction"
_CONFLICTS = ("Too many concurrent writers", "commit conflict", "Incompatible transaction", "preempted by")
_EXHAUSTED = "Resources exhausted"


class AlreadyCompactedError(LanceWalError):
    """A marker is not above the stored one, because another compactor was faster. Nothing was written."""


class LostRaceError(LanceWalError):
    """Another commit came first. Nothing was written."""


class JoinTooLargeError(LanceWalError):
    """A join needs more than Lance's memory pool has. Nothing was written."""


@contextmanager
def commit_errors(action: str, *, commits: bool = True) -> Iterator[None]:
    """Turns what pylance raises in a commit into the errors of this module or of lancewal.

    ``commits=False`` is for a step before the commit. After an unknown outcome it is safe to compact again.
    """
    try:
        with lance_errors(action, commits=commits):
            yield
    except (StorageError, OutcomeUnknownError) as error:
        cause = error.__cause__
        text = str(cause)
        if _STALE in text:
            raise AlreadyCompactedError(text) from error
        if isinstance(cause, CommitConflictError) or any(each in text for each in _CONFLICTS):
            raise LostRaceError(text) from error
        if _EXHAUSTED in text:
            raise JoinTooLargeError(text) from error
        raise


def marked_merge(
    dataset: lance.LanceDataset, columns: list[str], markers: Mapping[UUID, int]
) -> lance.dataset.MergeInsertBuilder:
    """A merge on ``columns`` that sets ``markers`` in the same commit, all of them or nothing."""
    builder = dataset.merge_insert(columns)
    builder = builder.conflict_retries(_LANCE_RETRIES).retry_timeout(_LANCE_RETRY_TIMEOUT)
    return builder.mark_sstables_as_compacted([CompactedSsTable(str(k), v) for k, v in markers.items()])


def commit_markers(dataset: lance.LanceDataset, markers: Mapping[UUID, int]) -> None:
    """Set markers without changing any row, with a merge that has no rows; the join column is arbitrary."""
    schema: pa.Schema = dataset.schema
    builder = marked_merge(dataset, [schema.names[0]], markers)
    some = ", ".join(
        f"{generation} of shard {shard_id}" for shard_id, generation in islice(markers.items(), 3)
    )
    with commit_errors(f"mark generation {some}" + (" and others" if len(markers) > 3 else "")):
        builder.when_matched_update_all().use_index(False).execute(no_rows(schema))


def mark(store: ObjectStore, shard_id: UUID, generation: int) -> None:
    """Commit a marker to the newest version; retries while other commits come first."""
    until_won(
        f"marking shard {shard_id}",
        lambda: commit_markers(open_base(store).dataset, {shard_id: generation}),
    )


def until_won(what: str, attempt: Callable[[], T]) -> tuple[T, int]:
    """Call ``attempt`` until it loses no race; returns its result, and how many races it lost.

    ``attempt`` must read the newest state of the table itself, every time.
    """
    for lost in range(_ATTEMPTS):
        try:
            return attempt(), lost
        except LostRaceError as error:
            logger.debug("%s lost a race (%d so far): %s", what, lost + 1, error)
            failure = error
        pause = min(_FIRST_PAUSE_SECONDS * 2**lost, _LONGEST_PAUSE_SECONDS)
        time.sleep(pause * random.uniform(0.5, 1.0))
    raise ConflictError(
        f"{what} lost {_ATTEMPTS} races in a row against other commits to the table; nothing of it was "
        f"written, try again when there are fewer: {failure}"
    ) from failure


#: Crash points of a compaction with a key, in the order in which it passes them.
MERGE_POINTS = (
    "merge: rows are read",
    "merge: a part of the rows is committed",
    "merge: rows and marker are committed",
)
#: Of a compaction without a key.
APPEND_POINTS = (
    "append: files are written",
    "append: rows and tag are committed",
    "append: the marker is committed",
    "append: the tag is removed",
)
#: Of what follows either of them.
TIDY_POINTS = ("tidy: files are written",)
#: Of a garbage collection.
COLLECT_POINTS = (
    "collect: nothing is deleted yet",
    "collect: manifest entries are pruned",
    "collect: a WAL entry is deleted",
    "collect: an SSTable is half deleted",
    "collect: an SSTable is deleted",
    "collect: an old manifest is deleted",
)

_hook: Callable[[str], object] | None = None


def crash_point(name: str) -> None:
    """Called at every crash point; does nothing unless a test has set a hook."""
    if _hook is not None:
        _hook(name)


def at_crash_points(hook: Callable[[str], object] | None) -> None:
    """Call ``hook`` with the name of every crash point that this process reaches from now on."""
    global _hook
    _hook = hook
