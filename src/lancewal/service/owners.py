"""Owners: a record for each process that writes to a table, and the rule by which a shard changes owners.

**Only the epoch gives safety.** A claim fences the previous writer, with or without records. Records are
advisory: they say which writer a claim would stop. If records are lost, stale, forged, damaged or from the
future, a process may wait without need, or stop a live writer. But no row is lost, duplicated or acknowledged
by two writers.

The protocol:

1. A process has one record for each table that it writes to. It names the process, its open shards with the
   epochs of their claims, its lease, and its address if it has one. The record is written after the claim,
   with every heartbeat (three per lease) and when a shard is closed. It is deleted with the last shard.
2. Only the storage's clock gives the age of a record: its time stamp is compared with that of an object that
   was written just now. Clocks of different machines are never compared.
3. A process that wants a shard reads the records and the shard's manifest. A record counts if it names the
   shard with the manifest's epoch or a later one: an owner with an earlier epoch was fenced.
4. An owner is **gone** if its process is dead on this host, if its record was not written for a lease, or if
   the record no longer names the shard. It **lives** if its record is written while we watch, or if the
   record is fresh and the process runs on this host. Until one of the two is known we wait, at most for a
   lease. A fresh record alone proves nothing: on another host the process may have died a moment ago.
5. If the owner is gone: claim. If it lives: :class:`~lancewal.errors.ShardOwnedError`, or a request
   (``requests``).

Races, and what they cost:

- Two processes claim a shard without an owner: both look before either record is written. The later claim
  wins.
- An owner stalls for a lease, loses the shard, and continues: the epoch fences it. Its record names an old
  epoch, so it does not count. A ``TableWriter`` claims the shard again when the other owner is gone.
- An owner closes while another process waits for it: the shard is flushed, then the record is changed, then
  close returns. The other process sees that with its next look.
- A process deletes the record of an owner that was not gone: the owner's next heartbeat writes it again.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args
from uuid import UUID

from lancewal.errors import InvalidInputError, LanceWalError, ShardOwnedError
from lancewal.format import decode_record, encode_record
from lancewal.storage import ObjectInfo, ObjectStore, host_clock, layout, ordered_map

logger = logging.getLogger(__name__)

#: When a writer may take a shard from another owner: when that owner is gone, at once, or never.
TakeOver = Literal["when_gone", "now", "never"]

#: How many records are read at a time on a remote store, where each read is a network round trip.
_READS = 16
#: A longer lease in a record counts as this one.
_LONGEST_LEASE = timedelta(minutes=10)
#: Time stamps of object stores are whole seconds.
_STAMP_SECONDS = 1.0
#: How often per lease a waiting process looks at the owner's record.
_LOOKS_IN_A_LEASE = 20
#: The least seconds between two looks, so that a very short lease does not cause a flood of requests.
_SHORTEST_PAUSE = 0.02
#: Heartbeats per lease.
BEATS = 3


@dataclass(frozen=True)
class Owner:
    """A process that writes to a table, from its record; ``shards`` gives the epoch of each shard.

    ``last_beat`` is the storage's time stamp of the record, and ``now`` is the storage's time when it was
    read. Compare these only with each other, not with another clock.
    """

    owner_id: str
    host: str
    pid: int
    machine: str
    started: str
    shards: Mapping[UUID, int]
    lease: timedelta
    address: str | None
    last_beat: datetime
    now: datetime

    @property
    def age(self) -> timedelta:
        """The time since the owner's last heartbeat."""
        return max(self.now - self.last_beat, timedelta(0))

    @property
    def gone(self) -> bool:
        """Whether its shards may be taken: the lease has expired, or its process is dead on this host."""
        return is_dead_here(self) or self.age > self.lease

    def has(self, shard_id: UUID, epoch: int) -> bool:
        """Whether it owns the shard, whose manifest has ``epoch``."""
        return self.shards.get(shard_id, -1) >= max(epoch, 1)

    def error(self, shard_id: UUID, why: str = "") -> ShardOwnedError:
        return ShardOwnedError(shard_id, self.owner_id, self.host, self.pid, self.address, why)

    def to_dict(self) -> dict[str, Any]:
        return {
            "owner_id": self.owner_id,
            "host": self.host,
            "pid": self.pid,
            "address": self.address,
            "shards": {str(shard): epoch for shard, epoch in self.shards.items()},
            "lease_seconds": self.lease.total_seconds(),
            "age_seconds": round(self.age.total_seconds(), 3),
            "gone": self.gone,
        }


def checked_take_over(value: str) -> TakeOver:
    """Return ``value``; refuses anything but the three allowed texts."""
    if value not in get_args(TakeOver):
        raise InvalidInputError(f'take_over is "when_gone", "now" or "never", not {value!r}')
    return value  # type: ignore[return-value]


def read_owners(store: ObjectStore, *, except_for: str | None = None) -> list[Owner]:
    """Read all valid records, without a new reading of the storage's clock, so ages may be too small."""
    return _read(store, store.list(layout.OWNERS_DIR), except_for)


def look_at_owners(store: ObjectStore) -> list[Owner]:
    """Like :func:`read_owners`, with correct ages. Without permission to write, ages may be too small."""
    return owners_in(store, look_at_clock(store))


def look_at_clock(store: ObjectStore) -> list[ObjectInfo]:
    """List the clock's directory; takes a new reading of the storage's clock if there are owner records."""
    infos = store.list(layout.CLOCK_DIR)
    if not any(info.path.startswith(f"{layout.OWNERS_DIR}/") for info in infos):
        return infos
    try:
        return _stamped(store)
    except LanceWalError as error:
        logger.debug("the storage's time is not known: %s", error)
        return infos


def owners_in(store: ObjectStore, infos: list[ObjectInfo]) -> list[Owner]:
    """The owners in a listing of the clock's directory."""
    return _read(store, infos, None)


def wait_until_gone(store: ObjectStore, owner: Owner, shard_id: UUID) -> bool:
    """Wait until ``owner`` is gone; ``False`` if it lives and has released the shard.

    Raises :class:`ShardOwnedError` if it lives and still owns the shard.
    """
    path = layout.owner_record(owner.owner_id)
    pause = min(max(owner.lease.total_seconds() / _LOOKS_IN_A_LEASE, _SHORTEST_PAUSE), 1.0)
    first: ObjectInfo | None = None
    began = time.monotonic()
    since = datetime.min.replace(tzinfo=UTC)
    logged = False
    while not is_dead_here(owner):
        infos = _stamped(store)
        info = next((each for each in infos if each.path == path), None)
        if info is None:
            return True
        now = _now(infos)
        if first is None:
            first, since = info, now
        if info.modified != first.modified:
            again = _parsed(store, info, now)
            if again is None:
                return True
            if shard_id not in again.shards:
                return False
            raise again.error(shard_id, "it was heard of just now")
        age, unchanged = now - info.modified, now - since
        # The record's age counts, or how long we have seen it unchanged, if its time stamp is in the future.
        # If the storage's clock stands still, three leases on our own clock are enough.
        if (
            max(age, unchanged) > _over(store, owner)
            or time.monotonic() - began > BEATS * owner.lease.total_seconds() + 1
        ):
            return True
        if runs_here(owner) and age < owner.lease / 2:
            raise owner.error(shard_id, "its process runs on this host")
        if not logged:
            logged = True
            logger.info("waiting for process %d on %s: it has shard %s", owner.pid, owner.host, shard_id)
        time.sleep(pause)
    return True


def storage_time(store: ObjectStore) -> datetime:
    """The current time of the storage's clock."""
    return _now(_stamped(store))


def forget_owner(store: ObjectStore, owner_id: str) -> None:
    """Delete the record of an owner that is gone; if it still lives, its next heartbeat writes it again."""
    try:
        store.delete(layout.owner_record(owner_id))
    except LanceWalError as error:
        logger.debug("the record of %s stays: %s", owner_id, error)


def encoded_owner(
    owner_id: str, shards: Mapping[UUID, int], lease: timedelta, address: str | None, beat: int
) -> bytes:
    """Encode the record of this process; ``beat`` counts how often it was written."""
    return encode_record(
        {
            "owner": owner_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": machine(),
            "started": started_at(os.getpid()) or "",
            "shards": {str(shard): epoch for shard, epoch in shards.items()},
            "lease_seconds": lease.total_seconds(),
            "address": address,
            "beat": beat,
        }
    )


def is_dead_here(owner: Owner) -> bool:
    """Whether the owner's process ran on this host and has ended."""
    return _is_ours(owner) and not process_runs(owner.pid, owner.started)


def runs_here(owner: Owner) -> bool:
    """Whether the owner's process runs on this host and is not stopped (by SIGSTOP or a debugger)."""
    if not _is_ours(owner) or not process_runs(owner.pid, owner.started):
        return False
    stat = _stat(owner.pid)
    return stat is not None and stat[0] not in "Tt"


@functools.lru_cache(maxsize=1)
def machine() -> str:
    """The scope in which process ids are unique: one boot of this host, and one container on it."""
    with suppress(OSError):
        return f"{socket.gethostname()}/{host_clock().name}/{os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()}/{host_clock().name}"


def _is_ours(owner: Owner) -> bool:
    return owner.machine == machine()


def process_runs(pid: int, started: str) -> bool:
    """Whether the process of this host with this id and start time still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # another user's process, or an invalid id: neither proves that it has ended
    now = started_at(pid)
    return now is None or now == started


def started_at(pid: int) -> str | None:
    """The host's own start time of a process; "" for one that has ended, ``None`` if unknown."""
    stat = _stat(pid)
    return None if stat is None else "" if stat[0] in "ZX" else stat[19]


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` from the state on (start time at 19); ``None`` if not available."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields if len(fields) > 19 else None


def _stamped(store: ObjectStore) -> list[ObjectInfo]:
    """Take a new reading of the storage's clock, and list the clock's directory."""
    store.put(layout.CLOCK_NOW, b"", durable=False)
    return store.list(layout.CLOCK_DIR)


def _now(infos: list[ObjectInfo]) -> datetime:
    """The last clock reading in a listing; time stamps of records do not count as readings."""
    stamps = [info.modified for info in infos if info.path == layout.CLOCK_NOW]
    return max(stamps, default=datetime.min.replace(tzinfo=UTC))


def _over(store: ObjectStore, owner: Owner) -> timedelta:
    return owner.lease + timedelta(seconds=0 if store.is_local else _STAMP_SECONDS)


def _read(store: ObjectStore, infos: list[ObjectInfo], except_for: str | None) -> list[Owner]:
    records = [
        info
        for info in infos
        if info.path.startswith(f"{layout.OWNERS_DIR}/")
        and info.path.endswith(f"/{layout.OWNER_RECORD_NAME}")
        and (except_for is None or info.path != layout.owner_record(except_for))
    ]
    now = _now(infos)
    found = ordered_map(
        lambda info: _parsed(store, info, now), records, 1 if store.is_local else min(len(records), _READS)
    )
    return [owner for owner in found if owner is not None]


def _parsed(store: ObjectStore, info: ObjectInfo, now: datetime) -> Owner | None:
    """Read a record; ``None`` if it is gone or damaged: that counts as no owner."""
    try:
        stored = decode_record(store.get(info.path), must_have_checksum=True)
        owner_id = str(stored["owner"])
        if layout.owner_record(owner_id) != info.path:
            raise ValueError(f"it is that of {owner_id!r}")
        address = stored["address"]
        lease = timedelta(seconds=float(stored["lease_seconds"]))
        return Owner(
            owner_id,
            str(stored["host"]),
            int(stored["pid"]),
            str(stored["machine"]),
            str(stored["started"]),
            {UUID(shard): int(epoch) for shard, epoch in stored["shards"].items()},
            min(max(lease, timedelta(milliseconds=1)), _LONGEST_LEASE),
            None if address is None else str(address),
            info.modified,
            max(now, info.modified) if now.year == 1 else now,
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, LanceWalError) as error:
        logger.warning("the owner record %s is passed over: %s", info.path, error)
        return None
