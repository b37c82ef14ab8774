"""What is due in a table, why, and in which order; computed from a status alone."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from lancewal.maintenance import UpkeepSettings
from lancewal.status import Lag, ShardState, TableStatus

#: A log without a known writer is left alone until it was idle for this long: Lance itself may write it.
_IDLE = timedelta(minutes=1)
#: Deletions run this many times within the age that things are kept for, but the time between two is at least
#: ``_OFTEN`` and at most ``_SELDOM``.
_TIMES_IN_AN_AGE = 4
_OFTEN, _SELDOM = timedelta(minutes=1), timedelta(hours=1)


class Work(enum.StrEnum):
    """The kinds of work, in the order in which they are done: each leaves less work for the next."""

    FLUSH = "flush"
    COMPACT = "compact"
    INDEX = "index"
    FILES = "files"
    VERSIONS = "versions"
    COLLECT = "collect"


@dataclass(frozen=True)
class UpkeepTask:
    """One piece of work that is due. ``shards`` is empty if it is about the whole table."""

    work: Work
    reason: str
    shards: tuple[UUID, ...] = ()
    #: For a collection: how long garbage is kept.
    min_age: timedelta | None = None

    def to_dict(self) -> dict[str, Any]:
        found = {
            "work": str(self.work),
            "reason": self.reason,
            "shards": [str(shard) for shard in self.shards],
        }
        return found if self.min_age is None else {**found, "min_age": self.min_age.total_seconds()}

    def __str__(self) -> str:
        return f"{self.work}: {self.reason}"


@dataclass(frozen=True)
class UpkeepPlan:
    """What is due now, in the order in which it would be done; empty if the table is in shape.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id")
    >>> plan = table.plan_upkeep()
    >>> len(list(plan)), sorted(plan.to_dict())[:1]
    (0, ['tasks'])
    """

    uri: str
    tasks: tuple[UpkeepTask, ...] = ()

    def __iter__(self) -> Iterator[UpkeepTask]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values, as ``lancewal upkeep --dry-run --json`` prints it."""
        return {"uri": self.uri, "tasks": [task.to_dict() for task in self.tasks]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.tasks)) or "nothing is due"


#: Whether this work, on a shard or on the table (``None``), is paused for now.
Paused = Callable[[Work, UUID | None], bool]


def plan_upkeep(
    status: TableStatus,
    settings: UpkeepSettings | Mapping[str, Any] | None = None,
    paused: Paused = lambda work, shard: False,
) -> UpkeepPlan:
    """What is due by ``settings`` (by default the table's own), without what is ``paused``."""
    look = _Look(status, status.upkeep if settings is None else UpkeepSettings.of(settings), paused)
    found = (look.flush(), look.compact(), look.index(), look.files(), look.versions(), look.collect())
    return UpkeepPlan(status.uri, tuple(task for task in found if task is not None))


@dataclass(frozen=True)
class _Look:
    status: TableStatus
    settings: UpkeepSettings
    paused: Paused

    def flush(self) -> UpkeepTask | None:
        """Logs that are too large or too old.

        A log without a known owner must also be idle: a flush would fence one of Lance's own writers.
        """
        limit, age = self.settings.max_unflushed_bytes, self.settings.max_unflushed_age

        def why(shard: ShardState) -> str | None:
            if shard.last_write is None or not (self._is_owned(shard) or self._is_idle(shard)):
                return None
            return self._beyond(shard.unflushed, "in the log", limit, age)

        return self._of_shards(Work.FLUSH, why, lambda shard: False)

    def compact(self) -> UpkeepTask | None:
        """Shards with too many SSTables; if there is one, all shards with SSTables, to share its commits."""
        settings = self.settings

        def why(shard: ShardState) -> str | None:
            waiting = shard.uncompacted
            if waiting.count > settings.max_sstables:
                return f"{waiting.count} SSTables, at most {settings.max_sstables} are wanted"
            return self._beyond(
                waiting, "in SSTables", settings.max_uncompacted_bytes, settings.max_uncompacted_age
            )

        return self._of_shards(Work.COMPACT, why, lambda shard: shard.uncompacted.count > 0)

    def index(self) -> UpkeepTask | None:
        most = self.settings.max_index_lag
        behind = [index for index in self.status.indexes if index.rows_behind > most]
        if not behind:
            return None
        worst = max(behind, key=lambda index: index.rows_behind)
        reason = f"index {worst.name!r} lacks {worst.rows_behind} rows, at most {most} are wanted"
        return self._of_table(Work.INDEX, reason + _and_more(len(behind) - 1))

    def files(self) -> UpkeepTask | None:
        small, most = self.status.small_files, self.settings.max_small_files
        if small <= most:
            return None
        return self._of_table(
            Work.FILES, f"the base table has {small} small files, at most {most} are wanted"
        )

    def versions(self) -> UpkeepTask | None:
        """Old versions of the base table.

        They stay while rows of that age wait in a shard. Something is wrong with those rows, and an old
        version may be needed to find out how they belong to the table.
        """
        versions, age = self.status.versions, self.settings.version_age
        waiting = max(self._age(self.status.unflushed.since), self._age(self.status.uncompacted.since))
        old = self._age(versions.since)
        # One of the versions is the newest, which always stays.
        if versions.count < 2 or old <= age or waiting > age or self._was_done(Work.VERSIONS, age):
            return None
        return self._of_table(
            Work.VERSIONS, f"the oldest of {versions.count} versions is {_in_words(old)} old"
        )

    def collect(self) -> UpkeepTask | None:
        """Garbage. Collected regularly, because an earlier collection must have seen what one deletes.

        Collected more often while there is too much, because it is then kept for a shorter time. Files that
        checkpoints need do not count, because they stay in any case.
        """
        garbage, most = self.status.garbage, self.settings.max_garbage_bytes
        free = garbage.num_bytes - self.status.held.num_bytes
        age = self.settings.kept_for(free)
        if not garbage.count or self._was_done(Work.COLLECT, age):
            return None
        reason = f"{garbage.count} files ({_size(garbage.num_bytes)}) that no newest state needs"
        if most is not None and free > most:
            reason += f", at most {_size(most)} are wanted"
        task = self._of_table(Work.COLLECT, reason)
        return None if task is None else replace(task, min_age=age)

    def _was_done(self, work: Work, age: timedelta) -> bool:
        """Whether the work was done recently, relative to the ``age`` that things are kept for."""
        every = min(max(age / _TIMES_IN_AN_AGE, _OFTEN), _SELDOM)
        return any(duty.work == work and self._age(duty.at) < every for duty in self.status.duties)

    def _of_shards(
        self,
        work: Work,
        why: Callable[[ShardState], str | None],
        goes_along: Callable[[ShardState], bool],
    ) -> UpkeepTask | None:
        shards = [shard for shard in self.status.shards if not self.paused(work, shard.shard_id)]
        due = {shard.shard_id: reason for shard in shards if (reason := why(shard)) is not None}
        if not due:
            return None
        shard_id, reason = next(iter(due.items()))
        along = [shard.shard_id for shard in shards if shard.shard_id not in due and goes_along(shard)]
        return UpkeepTask(work, f"shard {shard_id}: {reason}{_and_more(len(due) - 1)}", (*due, *along))

    def _of_table(self, work: Work, reason: str) -> UpkeepTask | None:
        return None if self.paused(work, None) else UpkeepTask(work, reason)

    def _beyond(self, lag: Lag, where: str, most: int, age: timedelta) -> str | None:
        if not lag.count:
            return None
        if lag.num_bytes > most:
            return f"{_size(lag.num_bytes)} {where}, at most {_size(most)} are wanted"
        waited = self._age(lag.since)
        return f"rows wait {where} for {_in_words(waited)}" if waited > age else None

    def _age(self, since: datetime | None) -> timedelta:
        return timedelta(0) if since is None else self.status.taken_at - since

    def _is_owned(self, shard: ShardState) -> bool:
        return any(owner.has(shard.shard_id, shard.epoch) and not owner.gone for owner in self.status.owners)

    def _is_idle(self, shard: ShardState) -> bool:
        """Whether nobody writes to the shard: its owner is known to be gone, or it was idle for a while."""
        gone = any(owner.has(shard.shard_id, shard.epoch) and owner.gone for owner in self.status.owners)
        return gone or self._age(shard.last_write) > min(_IDLE, self.settings.max_unflushed_age)


def _and_more(number: int) -> str:
    return f", and {number} more" if number > 0 else ""


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _in_words(age: timedelta) -> str:
    return str(timedelta(seconds=round(age.total_seconds())))
