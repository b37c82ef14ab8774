"""The errors that lancewal raises. Callers branch on the class, never on the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID


class LanceWalError(Exception):
    """Base of every error that lancewal raises on purpose."""


class InvalidInputError(LanceWalError, ValueError):
    """The caller's input was refused before anything was written."""


class TableNotFoundError(InvalidInputError):
    """There is no Lance table at the address, or the table does not have the requested version."""


class NotInitializedError(LanceWalError):
    """The table exists, but has no MemWAL index yet: call ``lancewal.initialize``."""


class FencedError(LanceWalError):
    """Another writer claimed the shard; this one never acknowledges a write again.

    ``local_epoch`` is the epoch that this writer holds, ``stored_epoch`` the epoch that superseded it. They
    are equal if a copy of this writer (of its process or its virtual machine) writes too. Open a new writer
    to take the shard back. ``may_be_written`` is true if the rows may have reached the log before the other
    writer claimed the shard.
    """

    def __init__(self, shard_id: UUID, local_epoch: int, stored_epoch: int, where: str = "") -> None:
        self.may_be_written = False
        self.shard_id = shard_id
        self.local_epoch = local_epoch
        self.stored_epoch = stored_epoch
        during = f" {where}" if where else ""
        if stored_epoch == local_epoch:
            text = (
                f"another process writes under epoch {local_epoch}, which this writer holds: a copy of this "
                "process or of its machine. See that only one of them runs, and open a new writer there."
            )
        else:
            text = (
                f"shard {shard_id} is at epoch {stored_epoch}, this writer holds epoch {local_epoch}. "
                "Another writer took over; open a new writer to write again."
            )
        super().__init__(f"Writer fenced{during}: {text}")

    def __reduce__(self) -> tuple[object, ...]:
        known = (self.shard_id, self.local_epoch, self.stored_epoch, str(self), self.may_be_written)
        return (_rebuild_fenced, known)


def _rebuild_fenced(
    shard_id: UUID, local: int, stored: int, text: str, may_be_written: bool = False
) -> FencedError:
    error = FencedError(shard_id, local, stored)
    error.args = (text,)
    error.may_be_written = may_be_written
    return error


class ShardOwnedError(LanceWalError):
    """A live writer owns the shard and was left alone; nothing was written.

    ``host``, ``pid`` and ``address`` identify the owner (``address`` is ``None`` if it takes no requests over
    the network); ``owner_id`` is the id of its record. Write through the owner, close it, or open the writer
    with ``take_over="now"``, which fences the owner.
    """

    def __init__(
        self, shard_id: UUID, owner_id: str, host: str, pid: int, address: str | None = None, why: str = ""
    ) -> None:
        self.shard_id = shard_id
        self.owner_id = owner_id
        self.host = host
        self.pid = pid
        self.address = address
        self.why = why
        where = f", which takes requests at {address}" if address else ""
        self_help = f"connect to {address}" if address else "write through it"
        super().__init__(
            f"shard {shard_id} belongs to process {pid} on {host}{where}{f'; {why}' if why else ''}. "
            f'To go on, {self_help}, close it, or take the shard from it with take_over="now"'
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (
            ShardOwnedError,
            (self.shard_id, self.owner_id, self.host, self.pid, self.address, self.why),
        )


class SealedShardError(LanceWalError):
    """The shard's status is SEALED: it refuses writers until ``table.unseal_shard(shard_id)``."""


class SplitShardError(LanceWalError):
    """Several shards are for one value of the sharding column; nothing was written.

    Rows in different shards have no order, so chance would decide which version of a row wins.
    ``table.repair()`` keeps one of the shards, moves the rows of the others to the base table and seals them.
    """

    def __init__(self, shard_ids: Sequence[UUID]) -> None:
        self.shard_ids = tuple(shard_ids)
        super().__init__(
            f"the shards {', '.join(map(str, self.shard_ids))} are all for the same value of the sharding "
            "column, made by different programs or versions, and nothing says which one a row belongs to. "
            "Stop their writers and run table.repair() or `lancewal verify --repair`: it keeps one of "
            "them, moves the rows of the others to the base table and seals those. Then open a new writer"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (SplitShardError, (self.shard_ids,))


class ClosedError(LanceWalError):
    """The writer was closed; open a new one."""


class ForkedError(LanceWalError):
    """This process was forked from a process that had used lancewal: start processes by spawn."""


class WalCorruptError(LanceWalError):
    """A WAL entry that must be readable is truncated, altered, or missing between others."""

    def __init__(self, shard_id: UUID, position: int, found: str) -> None:
        self.shard_id = shard_id
        self.position = position
        self.found = found
        super().__init__(f"WAL entry {position} of shard {shard_id} is corrupt: {found}")

    def __reduce__(self) -> tuple[object, ...]:
        return (WalCorruptError, (self.shard_id, self.position, self.found))


class WalTruncatedError(LanceWalError):
    """The requested position was garbage-collected; start from ``first_retained`` or a snapshot."""

    def __init__(self, shard_id: UUID, position: int, first_retained: int) -> None:
        self.shard_id = shard_id
        self.position = position
        self.first_retained = first_retained
        super().__init__(
            f"WAL position {position} of shard {shard_id} was garbage-collected; the first "
            f"retained position is {first_retained}. Read a snapshot and follow from there."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (WalTruncatedError, (self.shard_id, self.position, self.first_retained))


class BusyError(LanceWalError):
    """The writer or service has no room for more rows now. Nothing of this put was written; send it again."""


class UnavailableError(LanceWalError):
    """No gateway accepted the call before the retries ended. It did not happen; calling again is safe."""


class AccessDeniedError(LanceWalError):
    """The gateway does not know the token, or the token does not permit writing."""


class ConflictError(LanceWalError):
    """A commit lost the race against other commits too often. Nothing was written; a retry is safe."""


class CorruptManifestError(LanceWalError):
    """A manifest cannot be parsed."""


class DifferentHistoryError(LanceWalError):
    """The base table and a shard no longer belong together, and nothing says which rows are newer.

    This happens when a table was copied, or created again at the same place, or when one of its directories
    was restored from a backup. The message says how to go on. Until then lancewal refuses reads and writes
    that may be wrong.
    """


class StorageError(LanceWalError):
    """The storage failed and retries did not help. A write that raised this error did not happen."""


class OutcomeUnknownError(LanceWalError):
    """The storage failed in the middle of a write: it is unknown whether the write happened.

    A reply was lost, or the storage stopped answering after the write had been sent. Send the same rows
    again: this is idempotent if the table has a primary key or the write has a transaction. Without
    either, check first whether the rows are there. This class is no :class:`StorageError`, because a
    :class:`StorageError` says that the write did not happen.
    """


class ColumnMismatchError(StorageError):
    """Stored rows have columns that do not fit the table: another type, or no key. None of them is read."""


class PartialWriteError(LanceWalError):
    """Some shards failed in a call that goes to several; the outcome of the others is known.

    ``failed`` has the error of each shard that failed. ``written`` has, for each shard that took rows in this
    call, their number; these rows stay written. If the table has a primary key, it is safe to send the whole
    input of a put or delete again. Without a key, send only the rows of the failed shards.
    """

    def __init__(self, doing: str, failed: Mapping[UUID, Exception], written: Mapping[UUID, int]) -> None:
        self.doing = doing
        self.failed = dict(failed)
        self.written = dict(written)
        shown = "; ".join(f"{shard}: {type(error).__name__}: {error}" for shard, error in self.failed.items())
        kept = ", ".join(f"{rows} rows in {shard}" for shard, rows in self.written.items())
        super().__init__(
            f"{doing} failed in {_shards(len(self.failed))}: {shown}" + (f". Written: {kept}" if kept else "")
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (PartialWriteError, (self.doing, self.failed, self.written))


def _shards(count: int) -> str:
    return f"{count} shard" if count == 1 else f"{count} shards"
