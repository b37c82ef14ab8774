"""What is due in a table, why, and in which order: a value, computed from a status and nothing else."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from lancewal.maintenance import UpkeepSettings
from lancewal.status import Lag, ShardState, TableStatus

#: A log whose writer nobody knows is left alone until it was idle for this long: Lance itself may write it.
_IDLE = timedelta(minutes=1)
#: How often something is taken away in the time that it is kept. Not more often than the first of these, nor
#: less often than the second.
_TIMES_IN_AN_AGE = 4
_OFTEN, _SELDOM = timedelta(minutes=1), timedelta(hours=1)


class Work(enum.StrEnum):
    """The kinds of work, in the order in which they are done: each leaves less to the next."""

    FLUSH = "flush"
    COMPACT = "compact"
    INDEX = "index"
    FILES = "files"
    VERSIONS = "versions"
    COLLECT = "collect"


@dataclass(frozen=True)
class UpkeepTask:
    """One thing that is due. ``shards`` is empty where it is about the table as a whole."""

    work: Work
    reason: str
    shards: tuple[UUID, ...] = ()
    #: Of a collection: how long garbage is kept.
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
    """What is due now, in the order in which it would be done; empty where the table is in shape.

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
        """For scripts: what ``lancewal upkeep --dry-run --json`` prints."""
        return {"uri": self.uri, "tasks": [task.to_dict() for task in self.tasks]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.tasks)) or "nothing is due"


#: Whether this work, on a shard or on the table (``None``), is left alone for now.
Paused = Callable[[Work, UUID | None], bool]


def plan_upkeep(
    status: TableStatus,
    settings: UpkeepSettings | Mapping[str, Any] | None = None,
    paused: Paused = lambda work, shard: False,
) -> UpkeepPlan:
    """What is due by ``settings``, by default those of the table, without what is ``paused``."""
    look = _Look(status, status.upkeep if settings is None else UpkeepSettings.of(settings), paused)
    found = (look.flush(), look.compact(), look.index(), look.files(), look.versions(), look.collect())
    return UpkeepPlan(status.uri, tuple(task for task in found if task is not None))


@dataclass(frozen=True)
class _Look:
    status: TableStatus
    settings: UpkeepSettings
    paused: Paused

    def flush(self) -> UpkeepTask | None:
        """Logs that are too long or too old. One that nobody seems to have may belong to a writer of Lance's
        own, which a flush would fence: it has to be idle."""
        limit, age = self.settings.max_unflushed_bytes, self.settings.max_unflushed_age

        def why(shard: ShardState) -> str | None:
            if shard.last_write is None or not (self._is_owned(shard) or self._is_idle(shard)):
                return None
            return self._beyond(shard.unflushed, "in the log", limit, age)

        return self._of_shards(Work.FLUSH, why, lambda shard: False)

    def compact(self) -> UpkeepTask | None:
        """Shards with too many SSTables; then all that have some: they share the commits."""
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
        """Old versions. They stay while rows wait that are as old: something is wrong with these, and an old
        version may be what tells how they belong to the table."""
        versions, age = self.status.versions, self.settings.version_age
        waiting = max(self._age(self.status.unflushed.since), self._age(self.status.uncompacted.since))
        old = self._age(versions.since)
        # One of them is the newest, which stays whatever its age.
        if versions.count < 2 or old <= age or waiting > age or self._was_done(Work.VERSIONS, age):
            return None
        return self._of_table(
            Work.VERSIONS, f"the oldest of {versions.count} versions is {_in_words(old)} old"
        )

    def collect(self) -> UpkeepTask | None:
        """Regularly while there is garbage: what goes has to have been seen by an earlier collection.

        More often while there is too much, because it is kept for less long then. What checkpoints hold would
        stay in any case.
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
        """Whether it was done a short while ago, as measured by how long such things are kept."""
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
        """Whether nobody writes: its last owner is known to be gone, or it was quiet for a while."""
        gone = any(owner.has(shard.shard_id, shard.epoch) and owner.gone for owner in self.status.owners)
        return gone or self._age(shard.last_write) > min(_IDLE, self.settings.max_unflushed_age)


def _and_more(number: int) -> str:
    return f", and {number} more" if number > 0 else ""


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _in_words(age: timedelta) -> str:
    return str(timedelta(seconds=round(age.total_seconds())))
