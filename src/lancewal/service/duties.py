"""Duties: which process does a part of a table's upkeep, or did it last.

There is one small record for each kind of work (compaction, collection …), written when the work begins and
when it has ended. The record is advisory: a process that finds a duty in progress elsewhere does something
else. If the record is lost, stale or forged, two processes may do the same work, or one may skip a turn.
Neither does harm.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from lancewal.errors import LanceWalError
from lancewal.format import decode_record, encode_record
from lancewal.service.owners import machine, process_runs, started_at, storage_time
from lancewal.storage import ObjectInfo, ObjectStore, layout

logger = logging.getLogger(__name__)

#: A duty that began longer ago is not waited for: its process is gone, or so slow that a second one may help.
_BELIEVED = timedelta(minutes=5)
_LONGEST_ERROR = 500


@dataclass(frozen=True)
class Duty:
    """One kind of work: which process does it (``under_way``) or did it last, and the result.

    ``at`` is the storage's time stamp of the record. ``failures`` counts failures in a row. ``failed`` has
    the error of each shard that failed ("" for errors that belong to no shard).
    """

    work: str
    host: str
    pid: int
    machine: str
    started: str
    under_way: bool
    at: datetime
    seconds: float = 0.0
    done: str = ""
    failures: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.machine == machine() and self.pid == os.getpid()

    def to_dict(self) -> dict[str, Any]:
        return {
            "work": self.work,
            "host": self.host,
            "pid": self.pid,
            "under_way": self.under_way,
            "at": self.at.isoformat(),
            "seconds": round(self.seconds, 3),
            "done": self.done,
            "failures": self.failures,
            "failed": dict(self.failed),
        }


def duties_in(store: ObjectStore, infos: Iterable[ObjectInfo]) -> list[Duty]:
    """The duties in a listing of the clock's directory, sorted by name."""
    names = sorted(
        (info for info in infos if info.path.startswith(f"{layout.UPKEEP_DIR}/")), key=lambda info: info.path
    )
    found = (_parsed(store, info) for info in names)
    return [duty for duty in found if duty is not None]


def read_duties(store: ObjectStore) -> dict[str, Duty]:
    """All duties, by the name of their work."""
    return {duty.work: duty for duty in duties_in(store, store.list(layout.UPKEEP_DIR))}


def is_done_elsewhere(store: ObjectStore, duty: Duty | None) -> bool:
    """Whether another process seems to do this work now."""
    if duty is None or not duty.under_way or duty.is_ours:
        return False
    if duty.machine == machine() and not process_runs(duty.pid, duty.started):
        return False
    return storage_time(store) - duty.at < _BELIEVED


def note_duty(
    store: ObjectStore,
    work: str,
    *,
    under_way: bool,
    seconds: float = 0.0,
    done: str = "",
    failures: int = 0,
    failed: Mapping[UUID | None, Exception] | None = None,
) -> None:
    """Record what this process does or did; a record that cannot be written is only logged."""
    errors = {str(shard or ""): f"{error}"[:_LONGEST_ERROR] for shard, error in (failed or {}).items()}
    record = encode_record(
        {
            "work": work,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": machine(),
            "started": started_at(os.getpid()) or "",
            "under_way": under_way,
            "seconds": seconds,
            "done": done,
            "failures": failures,
            "failed": errors,
        }
    )
    try:
        store.put(f"{layout.UPKEEP_DIR}/{work}.json", record, durable=False)
    except LanceWalError as error:
        logger.debug("nobody knows of this %s: %s", work, error)


def _parsed(store: ObjectStore, info: ObjectInfo) -> Duty | None:
    try:
        stored = decode_record(store.get(info.path), must_have_checksum=True)
        return Duty(
            work=str(stored["work"]),
            host=str(stored["host"]),
            pid=int(stored["pid"]),
            machine=str(stored["machine"]),
            started=str(stored["started"]),
            under_way=bool(stored["under_way"]),
            at=info.modified,
            seconds=float(stored["seconds"]),
            done=str(stored["done"]),
            failures=int(stored["failures"]),
            failed={str(shard): str(text) for shard, text in stored["failed"].items()},
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, LanceWalError) as error:
        logger.warning("the record %s is passed over: %s", info.path, error)
        return None
