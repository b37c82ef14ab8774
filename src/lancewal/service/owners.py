"""Who writes to a table: a record for each writing process, and the rule by which a shard changes hands.

**The epoch is the only safety.** A claim supersedes whoever held the shard, as without any record. Records
are courtesy: they say whom a claim would stop. Lost, stale, forged, damaged or from the future, they
make somebody wait or stop a writer that lived; no row is lost, doubled or acknowledged by two.

The protocol:

1. A process has one record for each table that it writes to: itself, its open shards with the epochs it
   claimed them under, its lease, and an address if it has one. It is written after the claim, again with
   every heartbeat (three in a lease), again when a shard is closed, and deleted with the last one.
2. How old a record is, only the storage's clock says: its time stamp against that of an object that was
   written just now. No two machines' clocks are compared.
3. Whoever wants a shard reads the records beside the shard's manifest. A record counts if it names the shard
   with the manifest's epoch or a later one: an owner of an earlier epoch was superseded.
4. An owner is **gone** when its process is dead on this very host, when its record was not written for a
   lease, or when it does not name the shard any more. It **lives** when its record is written while we
   look, or when it is fresh and its process runs on this host. Until one of both is known we wait, at most
   for a lease: a fresh record alone says nothing, its process may have died a moment ago elsewhere.
5. Gone: claim. Lives: :class:`~lancewal.errors.ShardOwnedError`, or a request (``requests``).

What may interleave, and what it costs:

- Two claim a shard that nobody has: both look before either record is written. The later claim wins.
- An owner stalls for a lease, loses the shard, and goes on: it is fenced by the epoch. Its record names an
  epoch that is over, which nobody counts. A ``TableWriter`` comes back when the other one is gone.
- An owner closes while another waits for it: the shard is flushed, then the record is changed, then close
  returns. The other one sees it with its next look.
- A taker deletes the record of an owner that was not gone: the next heartbeat writes it again.
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

#: When a writer may take a shard that another one has: when that one is gone, at once, or not at all.
TakeOver = Literal["when_gone", "now", "never"]

#: Records that are read at a time where each is a network round trip.
_READS = 16
#: A record that asks for more than this is not believed.
_LONGEST_LEASE = timedelta(minutes=10)
#: Object stores stamp in whole seconds.
_STAMP_SECONDS = 1.0
#: Looks at a record in a lease, for whoever waits for its owner.
_LOOKS_IN_A_LEASE = 20
#: Seconds between two looks, at least: a lease that is no time at all must not become a storm of requests.
_SHORTEST_PAUSE = 0.02
#: Heartbeats in a lease.
BEATS = 3


@dataclass(frozen=True)
class Owner:
    """A process that writes to a table, as its record says; ``shards`` gives the epoch of each.

    ``last_beat`` is the storage's time stamp of the record, and ``now`` the storage's time when it was
    read: compare no other clock with them.
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
        """How long ago the owner was last heard of."""
        return max(self.now - self.last_beat, timedelta(0))

    @property
    def gone(self) -> bool:
        """Whether its shards may be taken: the lease is over, or its process is dead on this host."""
        return is_dead_here(self) or self.age > self.lease

    def has(self, shard_id: UUID, epoch: int) -> bool:
        """Whether it has the shard, whose manifest says ``epoch``."""
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
    """``value`` if it is one of the three."""
    if value not in get_args(TakeOver):
        raise InvalidInputError(f'take_over is "when_gone", "now" or "never", not {value!r}')
    return value  # type: ignore[return-value]


def read_owners(store: ObjectStore, *, except_for: str | None = None) -> list[Owner]:
    """Every record that can be read, without asking for the time: ages may be too small."""
    return _read(store, store.list(layout.OWNERS_DIR), except_for)


def look_at_owners(store: ObjectStore) -> list[Owner]:
    """As :func:`read_owners`, with ages. Without permission to write they may be too small."""
    return owners_in(store, look_at_clock(store))


def look_at_clock(store: ObjectStore) -> list[ObjectInfo]:
    """What lies with the storage's clock; with its reading of this moment where somebody owns a shard."""
    infos = store.list(layout.CLOCK_DIR)
    if not any(info.path.startswith(f"{layout.OWNERS_DIR}/") for info in infos):
        return infos
    try:
        return _stamped(store)
    except LanceWalError as error:
        logger.debug("the storage's time is not known: %s", error)
        return infos


def owners_in(store: ObjectStore, infos: list[ObjectInfo]) -> list[Owner]:
    """The owners among what lies with the storage's clock."""
    return _read(store, infos, None)


def wait_until_gone(store: ObjectStore, owner: Owner, shard_id: UUID) -> bool:
    """Return when ``owner`` is gone, or (``False``) lives and has let the shard go.

    Raises :class:`ShardOwnedError` if it lives and has the shard.
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
        # By its time stamp, or by ours where its stamp lies in the future. And should the storage's
        # clock stand still: three leases without a sign of life are enough by any clock.
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
    """What the storage's clock says now."""
    return _now(_stamped(store))


def forget_owner(store: ObjectStore, owner_id: str) -> None:
    """Delete the record of an owner that is gone; were it not, its next heartbeat would write it again."""
    try:
        store.delete(layout.owner_record(owner_id))
    except LanceWalError as error:
        logger.debug("the record of %s stays: %s", owner_id, error)


def encoded_owner(
    owner_id: str, shards: Mapping[UUID, int], lease: timedelta, address: str | None, beat: int
) -> bytes:
    """The record of this process; ``beat`` counts how often it was written."""
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
    """Whether the owner's process ran on this very host and has ended."""
    return _is_ours(owner) and not process_runs(owner.pid, owner.started)


def runs_here(owner: Owner) -> bool:
    """Whether the owner's process runs on this very host, and was not stopped."""
    if not _is_ours(owner) or not process_runs(owner.pid, owner.started):
        return False
    stat = _stat(owner.pid)
    return stat is not None and stat[0] not in "Tt"


@functools.lru_cache(maxsize=1)
def machine() -> str:
    """The name of what process ids are counted in: a boot of this host, and a container on it."""
    with suppress(OSError):
        return f"{socket.gethostname()}/{host_clock().name}/{os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()}/{host_clock().name}"


def _is_ours(owner: Owner) -> bool:
    return owner.machine == machine()


def process_runs(pid: int, started: str) -> bool:
    """Whether a process of this host that was started then still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # somebody else's, or no process id at all, which proves nothing
    now = started_at(pid)
    return now is None or now == started


def started_at(pid: int) -> str | None:
    """When a process was started, in its host's own words; "" for one that has ended, ``None``: unknown."""
    stat = _stat(pid)
    return None if stat is None else "" if stat[0] in "ZX" else stat[19]


def _stat(pid: int) -> list[str] | None:
    """What Linux says of a process: its state first, its start at place 19; ``None`` where nothing does."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields if len(fields) > 19 else None


def _stamped(store: ObjectStore) -> list[ObjectInfo]:
    """What lies with the clock, and the clock's reading of this moment."""
    store.put(layout.CLOCK_NOW, b"", durable=False)
    return store.list(layout.CLOCK_DIR)


def _now(infos: list[ObjectInfo]) -> datetime:
    """The storage's time when ``infos`` were listed, as far as it is known: no record counts as a clock."""
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
    """The record; ``None`` for one that is gone or damaged, whose owner cannot be told from nobody."""
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
