"""A round of upkeep: look at the table, decide what is due, and do one task after the other.

Any process may run a round, and two at a time do no harm: every step may run beside writers, readers and
itself. A round needs no state. An :class:`Upkeep` remembers failed work and backs off: later rounds skip it
for a while, twice as long after each failure, and do everything else meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from lancewal.base import BaseTable, lance_errors, open_base
from lancewal.errors import LanceWalError
from lancewal.maintenance import UpkeepSettings, optimize_base, tidy
from lancewal.service import is_done_elsewhere, note_duty, read_duties
from lancewal.status import table_status
from lancewal.storage import ObjectStore, process_totals
from lancewal.upkeep.means import Done, Here, Means
from lancewal.upkeep.plan import UpkeepTask, Work, plan_upkeep

logger = logging.getLogger(__name__)

#: Seconds to back off after the first failure, and at most. The pause doubles with each failure.
_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 3600.0


@dataclass(frozen=True)
class TaskOutcome:
    """The result of a task; ``failed`` has errors by shard, under ``None`` that of the whole table."""

    task: UpkeepTask
    done: str = ""
    seconds: float = 0.0
    failed: Mapping[UUID | None, Exception] = field(default_factory=dict)
    #: Another process was doing the same work.
    left_to_others: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.task.to_dict(),
            "done": self.done,
            "seconds": round(self.seconds, 3),
            "failed": {str(shard or ""): str(error) for shard, error in self.failed.items()},
            "left_to_others": self.left_to_others,
        }

    def __str__(self) -> str:
        if self.left_to_others:
            return f"{self.task.work}: another process is at it"
        text = f"{self.task.work}: {self.done or 'nothing was done'} in {self.seconds:.1f} s"
        errors = [f"{'' if shard is None else f'shard {shard}: '}{e}" for shard, e in self.failed.items()]
        return "\n  ".join([text, *(f"failed: {error}" for error in errors)])


@dataclass(frozen=True)
class UpkeepReport:
    """What a round did, in order.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id")
    >>> report = table.upkeep()
    >>> report.ok, report.to_dict()["ok"]
    (True, True)
    """

    uri: str
    outcomes: tuple[TaskOutcome, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not any(outcome.failed for outcome in self.outcomes)

    @property
    def seconds(self) -> float:
        """Time that the tasks took."""
        return sum(outcome.seconds for outcome in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "uri": self.uri,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
        }

    def __str__(self) -> str:
        return "\n".join(map(str, self.outcomes)) or "nothing was due"


@dataclass
class _Failures:
    in_a_row: int = 0
    until: float = 0.0


class Upkeep:
    """Keeps one table in shape, round by round. One round at a time."""

    def __init__(
        self,
        store: ObjectStore,
        read_base: Callable[[], BaseTable],
        means: Means,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``means`` does the work on shards."""
        self.uri = store.uri
        self._store = store
        self._read_base = read_base
        self._means = means
        self._clock = clock
        self._failures: dict[tuple[Work, UUID | None], _Failures] = {}

    @classmethod
    def here(
        cls,
        store: ObjectStore,
        read_base: Callable[[], BaseTable],
        *,
        clock: Callable[[], float] = time.monotonic,
        **how: Any,
    ) -> Upkeep:
        """An upkeep that does all work in this process; ``how`` are the options of :class:`Here`."""
        return cls(store, read_base, Here(store, read_base, **how), clock=clock)

    def round(
        self,
        settings: UpkeepSettings | Mapping[str, Any] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> UpkeepReport:
        """Do what is due, each kind of work once, until nothing is left or ``stop()`` is true.

        Each task sees what the one before changed: rows that were flushed are compacted in the same round.
        """
        outcomes: list[TaskOutcome] = []
        while not stop():
            outcome, _ = self.do_next({each.task.work for each in outcomes}, settings, stop)
            if outcome is None:
                break
            outcomes.append(outcome)
        return UpkeepReport(self.uri, tuple(outcomes))

    def do_next(
        self,
        tried: Collection[Work],
        settings: UpkeepSettings | Mapping[str, Any] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[TaskOutcome | None, UpkeepSettings]:
        """Do the first work that is due and not in ``tried``; returns its outcome and the settings used."""
        status = table_status(self._store, self._read_base)
        settings = status.upkeep if settings is None else UpkeepSettings.of(settings)
        plan = plan_upkeep(status, settings, self._is_paused)
        task = next((each for each in plan if each.work not in tried), None)
        return (None if task is None else self._do(task, settings, stop)), settings

    def _do(self, task: UpkeepTask, settings: UpkeepSettings, stop: Callable[[], bool]) -> TaskOutcome:
        try:
            if is_done_elsewhere(self._store, read_duties(self._store).get(task.work)):
                logger.info("%s of %s is left to another process", task.work, self.uri)
                return TaskOutcome(task, left_to_others=True)
        except LanceWalError as error:
            logger.debug("whether others are at it is not known: %s", error)
        note_duty(self._store, task.work, under_way=True)
        started = time.perf_counter()
        done = Done()
        try:
            done = _WORK[task.work](self, task, settings, stop)
        except Exception as error:
            done = Done(failed={None: error})
        finally:
            seconds = time.perf_counter() - started
            for shard in done.left:
                self._pause(task.work, shard)
            failures = self._count(task, done.failed)
            note_duty(
                self._store,
                task.work,
                under_way=False,
                seconds=seconds,
                done=done.what,
                failures=failures,
                failed=done.failed,
            )
        totals = {
            f"upkeep.{task.work}.tasks": 1,
            f"upkeep.{task.work}.seconds": seconds,
            f"upkeep.{task.work}.failures": len(done.failed),
        }
        process_totals.add(self.uri, totals)
        outcome = TaskOutcome(task, done.what, seconds, done.failed)
        logger.log(logging.WARNING if done.failed else logging.INFO, "upkeep of %s: %s", self.uri, outcome)
        return outcome

    def _count(self, task: UpkeepTask, failed: Mapping[UUID | None, Exception]) -> int:
        """Back off from what has failed, longer each time; returns the most failures in a row."""
        subjects = task.shards or (None,)
        bad = set(subjects) if None in failed else set(failed)
        for subject in bad:
            self._pause(task.work, subject)
        for subject in set(subjects) - bad:
            if not self._is_paused(task.work, subject):
                self._failures.pop((task.work, subject), None)
        counts = [self._failures[task.work, subject].in_a_row for subject in bad]
        return max(counts, default=0)

    def _pause(self, work: Work, subject: UUID | None) -> None:
        known = self._failures.setdefault((work, subject), _Failures())
        known.until = self._clock() + min(_FIRST_PAUSE * 2.0 ** min(known.in_a_row, 30), _LONGEST_PAUSE)
        known.in_a_row += 1

    def _is_paused(self, work: Work, shard: UUID | None) -> bool:
        known = self._failures.get((work, shard))
        return known is not None and self._clock() < known.until

    def _flush(self, task: UpkeepTask, settings: UpkeepSettings, stop: Callable[[], bool]) -> Done:
        return self._means.flush(task.shards)

    def _compact(self, task: UpkeepTask, settings: UpkeepSettings, stop: Callable[[], bool]) -> Done:
        try:
            return self._means.compact(task.shards, stop)
        except LanceWalError as error:
            if len(task.shards) == 1:
                return Done(failed={task.shards[0]: error})
            # One shard cannot be planned. The others can, one by one.
            logger.info("the shards of %s are compacted one by one: %s", self.uri, error)
        compacted = 0
        failed: dict[UUID | None, Exception] = {}
        for shard in task.shards:
            if not stop():
                try:
                    done = self._means.compact((shard,), stop)
                except LanceWalError as error:
                    done = Done(failed={shard: error})
                failed |= done.failed
                compacted += not done.failed
        return Done(f"{compacted} shards compacted one by one", failed)

    def _index(self, task: UpkeepTask, settings: UpkeepSettings, stop: Callable[[], bool]) -> Done:
        before = open_base(self._store)
        up_to_date, _, _ = tidy(self._store, before, files=False)
        if not up_to_date:
            error = LanceWalError("an index could not be brought up to date; the log says why")
            return Done(failed={None: error})
        left = _uncovered(open_base(self._store))
        if left and left == _uncovered(before):
            # Counts as a failure, or every look would try the same again, with a commit each time.
            error = LanceWalError(f"Lance does not index the rows of {', '.join(sorted(left))} yet")
            return Done(failed={None: error})
        return Done("indexes brought up to date")

    def _files(self, task: UpkeepTask, settings: UpkeepSettings, stop: Callable[[], bool]) -> Done:
        _, removed, added = optimize_base(self._store)
        if not removed:
            # Counts as a failure, or every look would try the same again.
            return Done(failed={None: LanceWalError("Lance found no files that can be joined")})
        return Done(f"{removed} files joined into {added}")

    def _versions(self, task: UpkeepTask, settings: UpkeepSettings, stop: Callable[[], bool]) -> Done:
        return Done(f"{clean_versions(self._store, settings.version_age)} bytes of old versions removed")

    def _collect(self, task: UpkeepTask, settings: UpkeepSettings, stop: Callable[[], bool]) -> Done:
        return self._means.collect(settings.garbage_age if task.min_age is None else task.min_age)


def _uncovered(base: BaseTable) -> dict[str, frozenset[int]]:
    """The files that an index does not cover, for each index that lacks some."""
    manifest = base.manifest
    names = {index.name for index in manifest.indexes}
    missing = {name: manifest.fragment_ids - manifest.covered_fragments(name) for name in names}
    return {name: files for name, files in missing.items() if files}


_WORK: dict[Work, Callable[[Upkeep, UpkeepTask, UpkeepSettings, Callable[[], bool]], Done]] = {
    Work.FLUSH: Upkeep._flush,
    Work.COMPACT: Upkeep._compact,
    Work.INDEX: Upkeep._index,
    Work.FILES: Upkeep._files,
    Work.VERSIONS: Upkeep._versions,
    Work.COLLECT: Upkeep._collect,
}


def clean_versions(store: ObjectStore, age: timedelta) -> int:
    """Remove base versions that are older than ``age`` and have no tag; returns how many bytes were freed."""
    base = open_base(store)
    with lance_errors("clean up old versions of the base table", commits=True):
        stats = base.dataset.cleanup_old_versions(age, error_if_tagged_old_versions=False)
    return int(stats.bytes_removed)
