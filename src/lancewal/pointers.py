"""Pointers: WAL entries that stand for SSTables which did not come through the WAL.

A pointer is a sentinel (Lance skips it) whose tags name SSTables that are about to be listed
in the shard's manifest. When they are, a second sentinel right behind it confirms that.
Who reads the log as a change feed reads the SSTables in the pointer's place.

What became of a pointer at position *p* of epoch *e* can always be told:

1. A confirmation of its run stands in the log: published. It mostly stands at *p* + 1, for
   under one epoch only one process writes; after a crash it may come later.
2. The manifest lists the SSTables: published.
3. The manifest's epoch is *e*: published if its replay cursor has reached *p*, because
   under this epoch nothing else moves it there; else the outcome is open.
4. The epoch has moved on, so nobody can publish it any more. SSTables leave a manifest
   only after a mark was written for a transaction that is not done, and a transaction is
   done only after its confirmations. So without 1, 2 and a mark it was never published.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from lancewal import layout
from lancewal.errors import WalCorruptError
from lancewal.format.wal_entry import WalEntry
from lancewal.manifest import ShardManifestStore
from lancewal.objects import ObjectStore
from lancewal.transactions import TRANSACTION_TAG, has_mark
from lancewal.wal.tailer import WalTailer

_POINTER_TAG = "pointer"
_CONFIRMATION_TAG = "confirms"
#: A digest and a version: the record's path is made of them.
_TRANSACTION = re.compile(r"[0-9a-f]{32}:[0-9]{1,19}")


class Fate(enum.Enum):
    """What became of a pointer's SSTables."""

    PUBLISHED = "published"
    DROPPED = "dropped"
    OPEN = "open"


@dataclass(frozen=True)
class Pointer:
    """The SSTables that a run publishes at one position; ``num_bytes`` is their size in memory."""

    run_id: str
    sstables: tuple[str, ...]
    num_bytes: int
    transaction: str

    def tags(self) -> dict[str, str]:
        content = {"run": self.run_id, "sstables": self.sstables, "bytes": self.num_bytes}
        return {_POINTER_TAG: json.dumps(content), TRANSACTION_TAG: self.transaction}

    @classmethod
    def of(cls, entry: WalEntry) -> Pointer | None:
        """The pointer that ``entry`` is, if it is one."""
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
        except (ValueError, KeyError, TypeError) as error:
            raise WalCorruptError(entry.shard_id, entry.position, f"unreadable pointer ({error})") from error


def confirmation_tags(run_id: str) -> dict[str, str]:
    return {_CONFIRMATION_TAG: run_id}


def confirms(entry: WalEntry | None, pointer: Pointer) -> bool:
    return entry is not None and entry.sentinel and entry.tags.get(_CONFIRMATION_TAG) == pointer.run_id


def fate_of(store: ObjectStore, shard_id: UUID, position: int, epoch: int, pointer: Pointer) -> Fate:
    """What became of the pointer at ``position``, which was written under ``epoch``."""
    tailer = WalTailer(store, shard_id, update_cursor=False)
    if confirms(tailer.read_entry(position + 1), pointer):
        return Fate.PUBLISHED
    manifest = ShardManifestStore(store, shard_id).require_latest()
    if _lists(pointer.sstables, [entry.path for entry in manifest.sstables]):
        return Fate.PUBLISHED
    if manifest.writer_epoch == epoch:
        reached = manifest.replay_after_wal_entry_position >= position
        return Fate.PUBLISHED if reached else Fate.OPEN
    # The mark is asked for after the manifest, and the later log after the mark: a mark is
    # written before SSTables leave the manifest, and removed after a late confirmation.
    if has_mark(store, pointer.transaction, shard_id, pointer.run_id):
        return Fate.PUBLISHED
    later = tailer.entries(position + 1, tailer.next_position())
    return Fate.PUBLISHED if any(confirms(entry, pointer) for entry in later) else Fate.DROPPED


def _lists(names: Sequence[str], listed: Sequence[str]) -> bool:
    # They are published together, but pruned as far as each was compacted.
    return any(name in listed for name in names)
