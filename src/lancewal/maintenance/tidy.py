"""Tidies the base table's indexes and files after a compaction, at a bounded cost.

Every compaction leaves rows that no index covers, a small file, and deleted rows in older files. Otherwise
a lookup or a text search would read all uncovered rows, and every read would open every file. So a
compaction also

- gives each index a new segment for the rows that it lacks, at a cost in proportion to those rows;
- joins the newest files once there are a few of which each is not larger than all newer ones together. A
  row is rewritten only when its file is joined with at least as many other rows. So a row is rewritten
  about as often as the table doubles, and the number of files is about that number plus a few. The indexes'
  segments of these files are merged first, because Lance joins no files that different segments cover;
- rewrites a file when most of its rows are deleted, so that fewer rows are copied than removed. Small
  files wait until there are a few: a few of them cost a read little, and a commit has its price.

Lance brings one index after the other up to date, and reads the heads of its files first. On remote storage
these are read while the rows are still being merged (:func:`open_indexes`).

Nothing depends on this work: if it fails or loses a race, the next compaction does it.
"""

from __future__ import annotations

import copy
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import lance
from lance.optimize import Compaction

from lancewal.base import (
    BaseTable,
    fragments_of,
    lance_errors,
    manifest_info,
    open_base,
    unmarked_tags,
)
from lancewal.errors import LanceWalError, OutcomeUnknownError, StorageError
from lancewal.format import MEM_WAL_INDEX_NAME, BaseIndex
from lancewal.maintenance.append_only import mark_pending
from lancewal.maintenance.commits import LostRaceError, commit_errors, crash_point, until_won
from lancewal.storage import ObjectStore, ordered_map

logger = logging.getLogger(__name__)

#: Fewer files are not worth joining.
_FEWEST_JOINED = 4
#: A file with fewer rows waits for others before it is rewritten.
SMALL_FILE_ROWS = 1 << 16
#: How many rows Lance puts into a file. Larger files are left as they are.
_MOST_ROWS = 1 << 20
_MOSTLY_DEAD = 0.5
#: The most versions that others may commit while files are rewritten.
_MOST_VERSIONS = 64


@dataclass(frozen=True)
class File:
    """A fragment of the base table."""

    number: int
    rows: int
    deleted: int

    @property
    def live(self) -> int:
        return self.rows - self.deleted


@dataclass(frozen=True)
class Tidying:
    """What is due.

    ``segments`` gives for each index how many of its newest segments are merged with the new rows; 0 means a
    new segment. ``files`` are rewritten, and joined where that is possible.
    """

    segments: Mapping[str, int]
    files: frozenset[int]

    @classmethod
    def due(cls, files: Sequence[File], indexes: Sequence[BaseIndex]) -> Tidying:
        """What is due for a table with these files, oldest first, and indexes.

        >>> small = [File(number, 10, 0) for number in range(1, 5)]
        >>> Tidying.due([File(0, 1000, 0), *small], []).files
        frozenset({1, 2, 3, 4})
        >>> Tidying.due([File(0, 1000, 0), *small[:3]], []).files
        frozenset()
        """
        joined = _newest_run(files)
        dead = [file for file in files if file.deleted > _MOSTLY_DEAD * file.rows]
        rewritten = joined | {file.number for file in dead}
        if len(rewritten) < _FEWEST_JOINED and all(file.rows < SMALL_FILE_ROWS for file in dead):
            rewritten = set()
        present = {file.number for file in files}
        segments = {}
        for name, parts in _segments(indexes).items():
            merged = _newest_within(parts, present, joined)
            covered = frozenset().union(*(part.fragments or () for part in parts))
            if merged > 1 or not present <= covered:
                segments[name] = merged
        return cls(segments, frozenset(rewritten))

    def __bool__(self) -> bool:
        return bool(self.segments or self.files)


def _newest_run(files: Sequence[File]) -> set[int]:
    """The newest files, as long as each is not larger than all newer ones together; none if they are few."""
    run: set[int] = set()
    total = 0
    for file in reversed(files):
        if file.live > _MOST_ROWS or (run and file.live > total):
            break
        run.add(file.number)
        total += file.live
    return run if len(run) >= _FEWEST_JOINED else set()


def _newest_within(segments: Sequence[BaseIndex], present: set[int], files: set[int]) -> int:
    """How many of the newest segments cover only these ``files``."""
    count = 0
    for segment in reversed(segments):
        if segment.fragments is None or not files.issuperset(segment.fragments & present):
            break
        count += 1
    return count


def tidy(
    store: ObjectStore, base: BaseTable, *, indexes: bool = True, files: bool = True
) -> tuple[bool, int, int]:
    """Do what is due in the newest version, ``base``.

    Returns whether all indexes are up to date, and how many files were removed and added.
    """
    # A copy, because only one thread at a time may use a handle, and others may use this one.
    dataset = copy.copy(base.dataset)
    has_indexes = indexes and bool(base.manifest.indexes)
    is_indexed = has_indexes
    removed = added = 0
    try:
        due = Tidying.due(
            [
                File(each.fragment_id, each.physical_rows, each.num_deletions)
                for each in fragments_of(dataset)
            ],
            base.manifest.indexes if indexes else (),
        )
        if due and unmarked_tags(base.details.compacted, base.schema.columns):
            # A tag must not long outlive the fragments that it came with, so set its marker first.
            mark_pending(store)
            return False, removed, added
        for merged in sorted(set(due.segments.values())):
            names = [name for name, count in due.segments.items() if count == merged]
            is_indexed &= _index_each(dataset, merged, names)
        if files and due.files:
            others = [each.fragment_id for each in fragments_of(dataset) if each.fragment_id not in due.files]
            removed, added = join_files(
                store, dataset, excluded_fragment_ids=others, materialize_deletions_threshold=_MOSTLY_DEAD
            )
            if is_indexed and removed:
                # Some kinds of index do not keep track of rows that move to other files.
                index_rows(dataset, num_indices_to_merge=0)
    except LanceWalError as error:
        logger.info("the indexes or files of %s are left to the next compaction: %s", base.uri, error)
        return False, removed, added
    return is_indexed, removed, added


def open_indexes(dataset: lance.LanceDataset, indexes: Iterable[BaseIndex]) -> None:
    """Let Lance read the heads of all indexes in parallel; it caches them for all later versions.

    They are needed to bring the indexes up to date. Errors are ignored here: that step raises them.
    """

    def read(index: BaseIndex) -> None:
        with suppress(StorageError), lance_errors(f"open index {index.name!r}"):
            if "Vector" in index.details_type:
                dataset.get_ivf_model(index.name)
            else:
                dataset.stats.index_stats(index.name)

    by_name = {index.name: index for index in indexes if index.name != MEM_WAL_INDEX_NAME}
    for _ in ordered_map(read, by_name.values(), len(by_name)):
        pass


def _index_each(dataset: lance.LanceDataset, merged: int, names: Sequence[str]) -> bool:
    """Bring these indexes up to date, in one commit if possible; returns whether all are."""
    try:
        index_rows(dataset, num_indices_to_merge=merged, index_names=names)
    except (StorageError, OutcomeUnknownError) as error:
        # Lance says no more of an index that it cannot update than of a commit whose reply was lost.
        if len(names) > 1:
            # Otherwise one index that always fails would keep the others from being updated, and files from
            # being joined.
            done = [_index_each(dataset, merged, [name]) for name in names]
            return all(done)
        logger.info("index %r of %s is left to the next compaction: %s", names[0], dataset.uri, error)
        return False
    return True


def optimize_base(store: ObjectStore, *, indexes: bool = True) -> tuple[bool, int, int]:
    """Bring every index up to date, and join all small files.

    Returns whether there are indexes and all are up to date, and how many files were removed and added. An
    index that cannot be brought up to date keeps neither the others nor the files.

    Indexes are updated first, and the segments of files that are not full are merged, because Lance does not
    join files that different segments cover. Indexes are updated again at the end, because Lance forgets how
    far they had caught up when files are joined. Lance itself keeps the MemWAL index, which has no columns.
    """
    # A tag must not long outlive the fragments that it came with, so set its marker first.
    mark_pending(store)
    up_to_date = has_indexes = indexes and bool(open_base(store).manifest.indexes)
    if has_indexes:
        up_to_date, _ = until_won("index optimisation", lambda: _index_all(open_base(store), joins=True))
    (removed, added), _ = until_won("file compaction", lambda: join_files(store, open_base(store).dataset))
    if has_indexes and removed:
        up_to_date, _ = until_won("index optimisation", lambda: _index_all(open_base(store), joins=False))
    return up_to_date, removed, added


def _index_all(base: BaseTable, *, joins: bool) -> bool:
    """Bring every index up to date, before a join with the segments of files that are not full as one.

    Returns whether all are up to date.
    """
    dataset = copy.copy(base.dataset)
    files = fragments_of(dataset)
    present = {each.fragment_id for each in files}
    open_files = {each.fragment_id for each in files if each.physical_rows < _MOST_ROWS} if joins else set()
    names: dict[int, list[str]] = defaultdict(list)
    for name, parts in _segments(base.manifest.indexes).items():
        names[max(1, _newest_within(parts, present, open_files))].append(name)
    done = [_index_each(dataset, merged, names[merged]) for merged in sorted(names)]
    return all(done)


def _segments(indexes: Iterable[BaseIndex]) -> Mapping[str, Sequence[BaseIndex]]:
    """The segments of each index, oldest first."""
    by_name: dict[str, list[BaseIndex]] = defaultdict(list)
    for index in indexes:
        by_name[index.name].append(index)
    return by_name


def join_files(store: ObjectStore, dataset: lance.LanceDataset, **how: object) -> tuple[int, int]:
    """Rewrite files as Lance's ``compact_files`` does; returns how many were removed and added.

    Lance compares the commit only with those versions since ``dataset`` that still exist. If somebody has
    cleaned up a version that replaced rows of these files, the old rows would come back beside the new
    ones. So the commit is given up if a version is missing.
    """
    options: Any = how
    with commit_errors("compact the files of the base table", commits=False):
        tasks = Compaction.plan(dataset, options).tasks
        # Lance divides the machine among its own tasks in the same way.
        rewrites = list(ordered_map(lambda task: task.execute(dataset), tasks, os.cpu_count() or 1))
    if not rewrites:
        return 0, 0
    crash_point("tidy: files are written")
    with commit_errors("compact the files of the base table"):
        since = range(dataset.version + 1, dataset.latest_version + 1)
        if len(since) > _MOST_VERSIONS or any(manifest_info(store, version) is None for version in since):
            raise LostRaceError(
                f"versions since {dataset.version} are cleaned up, or too many to compare with"
            )
        metrics = Compaction.commit(dataset, rewrites, options)
    return int(metrics.files_removed), int(metrics.files_added)


def index_rows(dataset: lance.LanceDataset, **how: object) -> None:
    with commit_errors("bring the indexes of the base table up to date"):
        dataset.optimize.optimize_indices(**how)
