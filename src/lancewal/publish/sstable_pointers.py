"""Pointers: WAL entries that stand for SSTables which did not come through the WAL.

A pointer is a sentinel (Lance skips it) whose tags name SSTables that are about to be listed
in the shard's manifest. When they are listed, a second sentinel right after it confirms that.
The change feed reads the SSTables in the pointer's place.

The fate of a pointer at position *p* of epoch *e* can always be determined:

1. There is a confirmation of its run at *p* + 1: published, because only one process writes under one
   epoch, and the next epoch begins with a sentinel.
2. The manifest's epoch is *e*: published if its replay cursor has reached *p*, because
   under this epoch nothing else moves it there. Otherwise the outcome is open.
3. The epoch has moved on, and **a later pointer of the same run** is in the log: dropped. The
   run lost the shard between this pointer and its commit, claimed again, found nothing published, and
   wrote the later one. Only the last pointer of a run counts.
4. The epoch has moved on, and this is the run's last pointer: published if the manifest lists its
   SSTables, or has listed them (a mark says so, or a confirmation later in the log). Otherwise dropped.
   SSTables leave a manifest only after a mark was written for a transaction that is not done, and
   a transaction is done only after its confirmations.

**The answer never changes.** So each row is in the feed exactly once, whether a follower reads continuously
or reads everything later. *Published* under 1 and 2 is the commit itself. Once the epoch has moved on, no
commit for *p* can happen any more. If there was one, every later run finds it (see ``lancewal.publish``)
and writes no further pointer: rule 4 says published from then on. If there was none, rule 4 says dropped.
If the run then publishes the same SSTables after a new claim, its new pointer is in the log before its
commit, and from then on rule 3 says dropped. This is why the log is read last: a process that sees SSTables
listed, marked or confirmed also sees the pointer that published them. Garbage collection deletes a log
from its beginning, so it never deletes the later pointer and leaves the earlier one.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from lancewal.errors import WalCorruptError
from lancewal.format import WalEntry
from lancewal.publish.transactions import TRANSACTION_TAG, has_mark
from lancewal.shard import ShardManifestStore, WalTailer, is_flushed
from lancewal.storage import ObjectStore, layout

_POINTER_TAG = "pointer"
_CONFIRMATION_TAG = "confirms"
#: A digest and a version, of which the record's path is made.
_TRANSACTION = re.compile(r"[0-9a-f]{32}:[0-9]{1,19}")


class Fate(enum.Enum):
    """What became of a pointer's SSTables."""

    PUBLISHED = "published"
    DROPPED = "dropped"
    OPEN = "open"


@dataclass(frozen=True)
class SsTablePointer:
    """The SSTables that a run publishes at one position; ``num_bytes`` is their size in memory."""

    run_id: str
    sstables: tuple[str, ...]
    num_bytes: int
    transaction: str

    def tags(self) -> dict[str, str]:
        content = {"run": self.run_id, "sstables": self.sstables, "bytes": self.num_bytes}
        return {_POINTER_TAG: json.dumps(content), TRANSACTION_TAG: self.transaction}

    @classmethod
    def of(cls, entry: WalEntry) -> SsTablePointer | None:
        """The pointer in ``entry``, if it is one."""
        text = entry.tags.get(_POINTER_TAG) if entry.sentinel else None
        if text is None:
            return None
        try:
            content = json.loads(text)
            names = tuple(str(name) for name in content["sstables"])
            if not all(map(layout.is_plain_name, names)):
                raise ValueError(f"SSTables {names} lead out of the shard")
            transaction = entry.tags[TRANSACTION_TAG]
            if not _TRANSACTION.fullmatch(transaction):
                raise ValueError(f"{transaction!r} names no transaction")
            return cls(str(content["run"]), names, int(content["bytes"]), transaction)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise WalCorruptError(entry.shard_id, entry.position, f"unreadable pointer ({error})") from error


def confirmation_tags(run_id: str) -> dict[str, str]:
    return {_CONFIRMATION_TAG: run_id}


def confirms(entry: WalEntry | None, pointer: SsTablePointer) -> bool:
    return entry is not None and entry.sentinel and entry.tags.get(_CONFIRMATION_TAG) == pointer.run_id


def fate_of(store: ObjectStore, shard_id: UUID, position: int, epoch: int, pointer: SsTablePointer) -> Fate:
    """What became of the pointer at ``position``, which was written under ``epoch``."""
    tailer = WalTailer(store, shard_id)
    if confirms(tailer.read_entry(position + 1), pointer):
        return Fate.PUBLISHED
    manifest = ShardManifestStore(store, shard_id).require_latest()
    if manifest.writer_epoch == epoch:
        return Fate.PUBLISHED if is_flushed(manifest, position) else Fate.OPEN
    # The mark is read after the manifest, and the later log after the mark: a mark is
    # written before SSTables leave the manifest, and removed after a late confirmation.
    published = _lists(pointer.sstables, [entry.path for entry in manifest.sstables])
    published = published or has_mark(store, pointer.transaction, shard_id, pointer.run_id)
    for entry in _sentinels(tailer, position + 1, tailer.next_position()):
        later = SsTablePointer.of(entry)
        if later is not None and later.run_id == pointer.run_id:
            return Fate.DROPPED
        published = published or confirms(entry, pointer)
    return Fate.PUBLISHED if published else Fate.DROPPED


def _sentinels(tailer: WalTailer, start: int, end: int) -> Iterator[WalEntry]:
    for position, header in zip(range(start, end), tailer.headers(start, end), strict=True):
        if header is None or header.sentinel:
            # This raises an error if the entry is missing.
            yield from tailer.entries(position, position + 1)


def _lists(names: Sequence[str], listed: Sequence[str]) -> bool:
    # SSTables are published together, but pruned one by one as they are compacted.
    return any(name in listed for name in names)
