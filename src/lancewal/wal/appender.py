"""WalAppender: one synchronous atomic entry at a time, fenced by epoch.

1. An entry that ``append`` returned for stands at its position for good.
2. Positions have no gaps: an entry is only ever created right after an existing one.
3. Once a successor's sentinel stands no append succeeds. The position that is tried
   next never lies above that sentinel: wherever it was found by searching, the epoch
   is checked after the search. The conflict at the sentinel makes the loser look at the
   manifest, and it stops. What got in between the claim and the sentinel lies below the
   sentinel, where the successor replays it.
4. Where garbage collection may have emptied the slot, the epoch is checked again
   after the write, before it counts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import pyarrow as pa

from lancewal import layout
from lancewal.clock import RECHECK_AFTER, Clock, boot_time
from lancewal.errors import ConflictError, FencedError, InvalidInputError, StorageError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.format.wal_entry import encode_entry, encode_sentinel, entry_schema
from lancewal.manifest import DEFAULT_SCAN_BATCH_SIZE, ShardManifestStore
from lancewal.objects import ObjectStore, PutOutcome
from lancewal.wal.tip import find_tip, first_unsettled

logger = logging.getLogger(__name__)

MAX_CONFLICTS = 1024
REFRESH_EVERY = 16


@dataclass(frozen=True, slots=True)
class AppendResult:
    """Where an entry went and how large it is."""

    shard_id: UUID
    position: int
    num_batches: int
    num_rows: int
    wal_bytes: int


class WalAppender:
    """Appends entries to one shard's WAL under one claimed epoch. Thread-safe.

    >>> from uuid import uuid4
    >>> from lancewal.objects import ObjectStore
    >>> store, shard = ObjectStore.from_uri("memory://appender-example"), uuid4()
    >>> appender = WalAppender.open(store, shard)
    >>> appender.append([pa.record_batch({"id": [1, 2]})]).position
    1
    """

    def __init__(
        self,
        store: ObjectStore,
        manifests: ShardManifestStore,
        epoch: int,
        manifest: ShardManifest | None,
        clock: Clock = boot_time,
    ) -> None:
        """Work under an ``epoch`` that was claimed elsewhere; :meth:`open` claims by itself."""
        self._store = store
        self._manifests = manifests
        self._shard_id = manifests.shard_id
        self._epoch = epoch
        self._clock = clock
        # Held while an entry is being created: positions are handed out in order.
        self._lock = threading.Lock()
        self._next: int | None = None
        hint = manifest.wal_entry_position_last_seen + 1 if manifest else 0
        self._hint = max(hint, first_unsettled(manifest))
        self._floor = first_unsettled(manifest)
        # When the next position was last known to be free under an epoch that was still ours.
        self._confirmed_at = float("-inf")
        #: Set where batches come in the table's stored form; see ``entry_schema``.
        self.keep_metadata = False
        #: The version of the base table whose columns the batches have, if they have a version's.
        self.base_version: int | None = None
        #: The manifest of the claim, as replay must read it.
        self.claimed = manifest
        #: Where :meth:`open` put its sentinel; everything below is settled.
        self.sentinel_position: int | None = None
        self._last_schema: tuple[pa.Schema, int | None, pa.Schema] | None = None

    @classmethod
    def open(
        cls,
        store: ObjectStore,
        shard_id: UUID | str,
        spec_id: int = 0,
        *,
        manifest_scan_batch_size: int = DEFAULT_SCAN_BATCH_SIZE,
        clock: Clock = boot_time,
        check: Callable[[ShardManifest], object] | None = None,
    ) -> WalAppender:
        """Claim the shard and fence whoever held it; ``check`` may refuse the manifest that is there."""
        manifests = ShardManifestStore(
            store, layout.parse_shard_id(shard_id), manifest_scan_batch_size, clock
        )
        epoch, manifest = manifests.claim_epoch(spec_id, check=check)
        appender = cls(store, manifests, epoch, manifest, clock)
        appender.sentinel_position = appender.fence_predecessor()
        return appender

    @property
    def shard_id(self) -> UUID:
        return self._shard_id

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def manifests(self) -> ShardManifestStore:
        return self._manifests

    @property
    def next_position_hint(self) -> int:
        """The next position as far as this appender knows; exact after the first append."""
        return self._hint

    def fence_predecessor(self) -> int | None:
        """Put a sentinel after the tail; nothing below it can change any more.

        Returns its position, or ``None`` under the first epoch, which has no predecessor.
        Call it before replay, so that replay covers an exact range.
        """
        if self._epoch <= 1:
            return None
        return self._create(encode_sentinel(self._epoch))

    def append(
        self,
        batches: Sequence[pa.RecordBatch],
        *,
        generation: int | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> AppendResult:
        """Write ``batches`` as one entry and return once it is stored."""
        check_batches(batches)
        data = self.encode(batches, generation=generation, tags=tags)
        position = self._create(data)
        rows = sum(batch.num_rows for batch in batches)
        return AppendResult(self._shard_id, position, len(batches), rows, len(data))

    def append_pointer(self, tags: Mapping[str, str]) -> int:
        """Write a sentinel that carries ``tags``; Lance skips it, the change feed reads it."""
        return self._create(encode_sentinel(self._epoch, tags))

    def encode(
        self,
        batches: Sequence[pa.RecordBatch],
        *,
        generation: int | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> memoryview:
        """The entry's bytes; apart from :meth:`append_encoded`, so that it needs no lock."""
        schema, last = batches[0].schema, self._last_schema
        if last is None or last[1] != generation or not schema.equals(last[0], check_metadata=True):
            own = entry_schema(schema, self._epoch, generation, keep_metadata=self.keep_metadata)
            last = (schema, generation, own)
            self._last_schema = last
        return encode_entry(last[2], batches, tags, self.base_version)

    def append_encoded(self, data: memoryview) -> int:
        """Create the entry ``data`` after the tail and return its position."""
        return self._create(data)

    def check_fenced(self) -> None:
        """Raise :class:`FencedError` when another writer claimed the shard."""
        self._manifests.check_fenced(self._epoch)

    def seed_next_position(self, position: int) -> None:
        """Tell the tip, as replay found it, so that the first append need not search."""
        with self._lock:
            if self._next is not None and self._next >= position:
                return
            started = self._clock()
            self.check_fenced()
            self._next = self._hint = max(position, self._floor)
            self._confirmed_at = started

    def _create(self, data: memoryview) -> int:
        with self._lock:
            for conflict in range(1, MAX_CONFLICTS + 1):
                position = self._next if self._next is not None else self._discover()
                self._next = position
                started = self._clock()
                if not self._put(position, data):
                    self.check_fenced()
                    self._next = position + 1 if conflict % REFRESH_EVERY else None
                elif not self._counts(position):
                    self._next = None
                else:
                    self._confirmed_at = started
                    self._next = self._hint = position + 1
                    return position
        raise ConflictError(
            f"shard {self._shard_id}: {MAX_CONFLICTS} WAL positions in a row were taken by others although "
            f"epoch {self._epoch} still holds; another process writes under the same epoch"
        )

    def _put(self, position: int, data: memoryview) -> bool:
        try:
            outcome = self._store.put_if_absent(layout.wal_entry(self._shard_id, position), data)
        except StorageError:
            # A store that refuses a fenced writer's call should not hide the fence.
            try:
                self.check_fenced()
            except FencedError:
                raise
            except Exception:
                logger.debug("fence check failed too", exc_info=True)
            raise
        return outcome is PutOutcome.CREATED

    def _counts(self, position: int) -> bool:
        """Whether an entry that was just created stands above all that is settled.

        A slot below the tip may be free again after garbage collection; see ``clock``.
        """
        if self._clock() - self._confirmed_at <= RECHECK_AFTER.total_seconds():
            return True
        self.check_fenced()
        return position >= first_unsettled(self._manifests.read_latest())

    def _discover(self) -> int:
        """The tip, as it was at a moment when the epoch was still ours."""
        started = self._clock()
        tip = max(find_tip(self._store, self._shard_id, self._manifests.read_latest()), self._floor)
        # After the search, not before: the search may have passed a successor's sentinel.
        self.check_fenced()
        self._confirmed_at = started
        return tip


def check_batches(batches: Sequence[pa.RecordBatch]) -> None:
    """Refuse what must not become an entry: no batches, an empty one, differing schemas."""
    if isinstance(batches, pa.RecordBatch | pa.Table) or not isinstance(batches, Sequence):
        raise InvalidInputError(
            f"cannot append a {type(batches).__name__} to the WAL; pass a list of record batches"
        )
    if not batches:
        raise InvalidInputError("cannot append an empty batch list to the WAL; pass at least one batch")
    for index, batch in enumerate(batches):
        if not isinstance(batch, pa.RecordBatch):
            raise InvalidInputError(
                f"cannot append a {type(batch).__name__} at index {index} to the WAL; pass record batches"
            )
        if batch.num_rows == 0:
            raise InvalidInputError(f"cannot append empty batch at index {index} to the WAL; leave it out")
        if batch.num_columns == 0:
            raise InvalidInputError(f"the batch at index {index} has rows, but no columns; leave it out")
        if index and not _same_fields(batch.schema, batches[0].schema):
            raise InvalidInputError(
                f"batch at index {index} has a different schema from the first batch; "
                f"expected {batches[0].schema.to_string()!r}, got {batch.schema.to_string()!r}"
            )


def _same_fields(one: pa.Schema, other: pa.Schema) -> bool:
    """Whether names, types and field ids agree; the schemas' own metadata is no part of an entry."""
    return bool(
        one.equals(other, check_metadata=True)
        or one.remove_metadata().equals(other.remove_metadata(), check_metadata=True)
    )
