"""A shard's WAL: where it begins and ends, and :class:`WalAppender`, which writes its entries.

Entries above the replay cursor have no gaps. If an entry above the cursor is missing although
later ones exist, the entry and its rows are lost. A binary search may take such a hole for the
end. So wherever rows depend on the tip, it is found by listing, which shows every hole. A reader that
comes back lists again only now and then. In between it probes behind the end that it knows.

The appender writes one atomic entry at a time, fenced by epoch:

1. Once ``append`` has returned, the entry stays at its position for good.
2. Positions have no gaps: an entry is only ever created right after an existing one.
3. Once a successor's sentinel is written, no append succeeds. The next position to try is
   never above that sentinel: after every search for it, the epoch is checked. The conflict
   at the sentinel makes the loser read the manifest, and it stops. Entries that were written
   between the claim and the sentinel are below the sentinel, so the successor replays them.
4. If garbage collection may have emptied the slot, the epoch is checked again
   after the write, before the write counts.
5. An epoch has one appender at a time. An entry of its own epoch that it did not write
   comes from a copy of this appender (a cloned virtual machine). Neither copy knows the rows
   of the other, so an appender that finds such an entry stops.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import pyarrow as pa

from lancewal.base import stored_markers
from lancewal.errors import (
    ConflictError,
    FencedError,
    InvalidInputError,
    OutcomeUnknownError,
    StorageError,
    WalCorruptError,
)
from lancewal.format import (
    EntryHeader,
    ShardManifest,
    WalEntry,
    decode_header,
    encode_entry,
    encode_sentinel,
    entry_schema,
)
from lancewal.shard.manifest import DEFAULT_SCAN_BATCH_SIZE, ShardManifestStore
from lancewal.storage import (
    RECHECK_AFTER,
    Clock,
    ObjectStore,
    PutOutcome,
    boot_time,
    both,
    check_process,
    in_thread,
    layout,
    numbered,
    ordered_map,
)

logger = logging.getLogger(__name__)

MAX_CONFLICTS = 1024
REFRESH_EVERY = 16
#: Listings take at most this share of a returning reader's time.
_SHARE_OF_LISTINGS = 0.01
_LOOKS = 4


def first_unsettled(manifest: ShardManifest | None) -> int:
    """The lowest position that may be the tip, also of a shard without a manifest."""
    return layout.FIRST_WAL_POSITION if manifest is None else manifest.first_unsettled


def is_flushed(manifest: ShardManifest | None, position: int, generation: int | None = None) -> bool:
    """Whether SSTables hold the rows of the WAL entry at ``position``. This is the only rule for it.

    Either the replay cursor covers the entry, or its MemTable was flushed, which raises the current
    generation. For an entry without a generation (from WAL-only mode, or a sentinel) only the cursor counts.
    """
    if manifest is None:
        return False
    is_covered = position <= manifest.replay_after_wal_entry_position
    return is_covered or (generation is not None and generation < manifest.current_generation)


def may_follow(entry: EntryHeader | WalEntry, following: EntryHeader | WalEntry) -> bool:
    """Whether a log can have ``following`` right after ``entry``: a new epoch begins with a claim's sentinel.

    If not, a stalled writer wrote ``entry`` into a slot that garbage collection had emptied. Such an entry
    never counted. If so, that may still have happened, where the sentinel stood behind the emptied slot.
    """
    return following.fence or following.writer_epoch <= entry.writer_epoch


def established_tip(store: ObjectStore, shard_id: UUID, manifest: ShardManifest | None) -> int:
    """Find the first free position above the replay cursor by listing.

    Raises :class:`WalCorruptError` if an entry is missing below others. ``manifest`` was read before.
    Entries that it does not cover may have been flushed and collected since then; these are no holes.
    """
    return _unbroken_end(store, shard_id, manifest, retained_positions(store, shard_id))


def find_tip(store: ObjectStore, shard_id: UUID, manifest: ShardManifest | None) -> int:
    """Find the first free position above the replay cursor by probing; may return a hole instead.

    For statistics, and for callers to which a tip that is too low costs only time. The manifest's hint
    is tried first. From there the search doubles its steps and then bisects, so a tail of n entries costs
    about 2·log2(n) HEAD requests, however stale the hint is.
    """
    taken = _taken(store, shard_id)
    low = first_unsettled(manifest)
    hint = manifest.wal_entry_position_last_seen if manifest else 0
    if hint >= low and taken(hint):
        low = hint + 1
    return _first_free(taken, low)


class WatchedTip:
    """Finds the tip for a returning reader, in one round trip if nothing is new. Thread-safe.

    The first call lists. Later calls probe the position where the log ended and the position behind
    it, so a single lost entry is noticed at once, whichever it is. If several adjacent entries are lost
    right at the known end, the next listing notices it, some minutes later.
    """

    def __init__(self, store: ObjectStore, shard_id: UUID, clock: Clock = boot_time) -> None:
        self._store = store
        self._shard_id = shard_id
        self._clock = clock
        self._taken = _taken(store, shard_id)
        self._workers = 1 if store.is_local else 2
        # The position up to which there is no hole, and when to list again; replaced as a whole.
        self._known: tuple[int, float] | None = None

    def find(self, manifest: ShardManifest | None) -> int:
        """Find the tip; raises :class:`WalCorruptError` if an entry is missing below others."""
        known = self._known
        if known is None or known[0] < first_unsettled(manifest) or self._clock() >= known[1]:
            return self._listed(manifest)
        end, list_again_at = known
        for _ in range(_LOOKS):
            here, behind = ordered_map(self._taken, (end, end + 1), self._workers)
            if not here:
                if behind:
                    # Both were written between the two probes, or the first one was lost.
                    return self._listed(manifest)
                self._known = (end, list_again_at)
                return end
            end = _first_free(self._taken, end + 2) if behind else end + 1
        return self._listed(manifest)

    def _listed(self, manifest: ShardManifest | None) -> int:
        started = self._clock()
        tip = established_tip(self._store, self._shard_id, manifest)
        pause = (self._clock() - started) / _SHARE_OF_LISTINGS
        self._known = (tip, started + max(pause, RECHECK_AFTER.total_seconds()))
        return tip


def retained_positions(store: ObjectStore, shard_id: UUID) -> list[int]:
    """List every position that has an entry, in ascending order."""
    directory = layout.wal_dir(shard_id)
    found = numbered(store.list(directory), directory, layout.parse_wal_name)
    return [position for position in found if position >= layout.FIRST_WAL_POSITION]


def missing_positions(positions: Sequence[int], start: int) -> Iterator[range]:
    """The gaps between the ascending ``positions``, from ``start`` on."""
    for position in positions:
        if position > start:
            yield range(start, position)
        start = max(start, position + 1)


def first_readable(store: ObjectStore, shard_id: UUID, manifest: ShardManifest | None) -> int:
    """The first position from which entries can be read up to the tip without a gap.

    ``manifest`` must have been read before this call. The entries that it covers existed by then, so
    those that the listing lacks were collected. A stalled writer may have written an entry into a
    collected slot far below; no reader can follow the log from there. A gap above the covered
    entries is a loss, and raises :class:`WalCorruptError`.
    """
    unsettled = first_unsettled(manifest)
    positions = retained_positions(store, shard_id)
    if not positions or positions[-1] < unsettled - 1:
        return unsettled
    _unbroken_end(store, shard_id, manifest, positions)
    listed, taken = set(positions), _taken(store, shard_id)
    first = positions[-1]
    # A listing is not a snapshot: an entry that was written during the listing may be missing although
    # a later one is there. So each gap is probed before it counts.
    while first > layout.FIRST_WAL_POSITION and (first - 1 in listed or taken(first - 1)):
        first -= 1
    return first


def lost_entry(shard_id: UUID, position: int, found: str) -> WalCorruptError:
    """The error for an entry that existed once; its text says how to continue."""
    return WalCorruptError(
        shard_id,
        position,
        f"the entry is missing{found}. Put {layout.wal_entry(shard_id, position)} back from a backup or an "
        "older version of the object; where it is lost for good, `lancewal verify --accept-lost-entries` "
        "goes on without its rows",
    )


def _unbroken_end(
    store: ObjectStore, shard_id: UUID, manifest: ShardManifest | None, positions: Sequence[int]
) -> int:
    """The position after the last of the listed ``positions``; raises if there is a gap above the cursor."""
    taken = _taken(store, shard_id)
    unsettled = first_unsettled(manifest)
    for gap in missing_positions(positions, unsettled):
        for position in gap:
            # A listing is not a snapshot: entries that were written during the listing may be missing.
            # And entries that were flushed since the manifest was read may be collected.
            if position < unsettled or taken(position):
                continue
            unsettled = first_unsettled(ShardManifestStore(store, shard_id).read_latest())
            if position >= unsettled:
                raise lost_entry(shard_id, position, f" although entry {gap.stop} is there")
    return max(unsettled, positions[-1] + 1) if positions else unsettled


def _taken(store: ObjectStore, shard_id: UUID) -> Callable[[int], bool]:
    return lambda position: store.head(layout.wal_entry(shard_id, position)) is not None


def _first_free(taken: Callable[[int], bool], low: int) -> int:
    """A free position at or above ``low``: either ``low`` itself, or right behind a taken position."""
    step = 1
    while taken(low + step - 1):
        low, step = low + step, step * 2
    # low is the lowest candidate and low + step - 1 is free: bisect between them.
    high = low + step - 1
    while low < high:
        middle = (low + high) // 2
        if taken(middle):
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class AppendResult:
    """The position and size of an appended entry."""

    shard_id: UUID
    position: int
    num_rows: int
    wal_bytes: int


class WalAppender:
    """Appends entries to one shard's WAL under one claimed epoch. Thread-safe.

    >>> from uuid import uuid4
    >>> from lancewal.storage import ObjectStore
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
        *,
        keep_metadata: bool = False,
    ) -> None:
        """Work under an ``epoch`` that was claimed elsewhere; :meth:`open` makes the claim itself.

        ``keep_metadata`` is for batches in the table's stored form; see ``entry_schema``.
        """
        self.shard_id = manifests.shard_id
        self.epoch = epoch
        self.manifests = manifests
        self._store = store
        self._clock = clock
        # Held while an entry is created, so that positions are assigned in order.
        self._lock = threading.Lock()
        self._next: int | None = None
        # The entry that is being created. It stays here while its outcome is unknown.
        self._trying: memoryview | None = None
        # Whether that entry may be in the log. Then a later failure of the same entry does not prove that
        # it is not in the log.
        self._may_be_there = False
        # Fingerprints of entries that were given up with an unknown outcome. They may be in the log, and
        # they are ours.
        self._given_up: set[bytes] = set()
        # Whether every entry before the hint is known. Then entries after it were written since.
        self._knows_tail = False
        self._doubled = False
        hint = manifest.wal_entry_position_last_seen + 1 if manifest else 0
        #: The next position as far as this appender knows; exact after the first append.
        self.next_position_hint = max(hint, first_unsettled(manifest))
        self._floor = first_unsettled(manifest)
        # When the next position was last known to be free under an epoch that was still ours.
        self._confirmed_at = float("-inf")
        self._keep_metadata = keep_metadata
        #: The manifest of the claim, which replay must use.
        self.claimed = manifest
        #: The position of the sentinel that :meth:`open` wrote; everything below it is settled.
        self.sentinel_position: int | None = None
        self._last_schema: tuple[pa.Schema, int | None, pa.Schema] | None = None

    @classmethod
    def open(
        cls,
        store: ObjectStore,
        shard_id: UUID | str,
        spec_id: int | None = 0,
        *,
        manifest_scan_batch_size: int = DEFAULT_SCAN_BATCH_SIZE,
        clock: Clock = boot_time,
        look: Callable[[ShardManifestStore], ShardManifest | None] = ShardManifestStore.read_to_claim,
        check: Callable[[ShardManifest], object] | None = None,
        claimed: Callable[[int], object] | None = None,
        keep_metadata: bool = False,
    ) -> WalAppender:
        """Claim the shard and fence its previous writer; ``check`` may refuse the current manifest.

        ``look`` reads that manifest, and may create it. ``claimed`` is called with the epoch while the
        sentinel is written. A log that lost an entry is refused before anything is written, because the
        sentinel would fill the hole.
        """
        shard = layout.parse_shard_id(shard_id)
        manifests = ShardManifestStore(store, shard, manifest_scan_batch_size, clock)
        at_once = not store.is_local
        started = clock()
        # The listing may be older than the manifest. Appends find entries that were written in between.
        found, positions = both(
            lambda: look(manifests), lambda: retained_positions(store, shard), at_once=at_once
        )
        tip = _unbroken_end(store, shard, found, positions)

        looking = None
        if at_once and found is not None and found.writer_epoch == 0:
            looking = in_thread(partial(stored_markers, store), "lancewal-io")
        epoch, manifest = manifests.claim_epoch(spec_id, check=check, write_hint=False)
        appender = cls(store, manifests, epoch, manifest, clock, keep_metadata=keep_metadata)
        # The tip was found before the claim, so a later claim writes its sentinel there or above.
        appender._next = appender.next_position_hint = max(tip, appender._floor)
        appender._confirmed_at = started

        def tell() -> None:
            if claimed is None:
                manifests.write_hint()
            else:
                both(manifests.write_hint, partial(claimed, epoch), at_once=at_once)

        appender.sentinel_position, _ = both(appender.fence_predecessor, tell, at_once=at_once)
        if epoch == 1:
            # The shard is new. It may have been created while another process was removing the table's write
            # path. That process looks for new shards afterwards, and this read of the base table began after
            # the shard existed. So either this read refuses the shard, or that process finds it.
            stored_markers(store) if looking is None else looking.result()
        return appender

    def fence_predecessor(self) -> int | None:
        """Write a sentinel after the tail; nothing below it can change from then on.

        Returns its position, or ``None`` under the first epoch, which has no predecessor.
        Call it before replay, so that replay covers an exact range.
        """
        if self.epoch <= 1:
            return None
        return self.append_encoded(encode_sentinel(self.epoch))

    def append(
        self,
        batches: Sequence[pa.RecordBatch],
        *,
        generation: int | None = None,
        tags: Mapping[str, str] | None = None,
        base_version: int | None = None,
    ) -> AppendResult:
        """Write ``batches`` as one entry and return once it is stored.

        ``base_version`` is the version of the base table that defines their columns, if there is one.
        """
        check_batches(batches)
        data = self.encode(batches, generation=generation, tags=tags, base_version=base_version)
        position = self.append_encoded(data)
        rows = sum(batch.num_rows for batch in batches)
        return AppendResult(self.shard_id, position, rows, len(data))

    def append_pointer(self, tags: Mapping[str, str]) -> int:
        """Write a sentinel that carries ``tags``; Lance skips it, the change feed reads it."""
        return self.append_encoded(encode_sentinel(self.epoch, tags))

    def encode(
        self,
        batches: Sequence[pa.RecordBatch],
        *,
        generation: int | None = None,
        tags: Mapping[str, str] | None = None,
        base_version: int | None = None,
    ) -> memoryview:
        """Encode an entry; separate from :meth:`append_encoded`, so that it needs no lock."""
        schema, last = batches[0].schema, self._last_schema
        if last is None or last[1] != generation or not schema.equals(last[0], check_metadata=True):
            own = entry_schema(schema, self.epoch, generation, keep_metadata=self._keep_metadata)
            last = (schema, generation, own)
            self._last_schema = last
        return encode_entry(last[2], batches, tags, base_version)

    def append_encoded(self, data: memoryview) -> int:
        """Create the entry ``data`` after the tail and return its position."""
        check_process()
        with self._lock:
            if self._doubled:
                raise self._double_error()
            if self._trying is not None and self._trying is not data:
                self._given_up.add(_fingerprint(self._trying))
                self._may_be_there = False
            self._trying = data
            try:
                return self._place(data)
            except StorageError as error:
                if self._may_be_there:
                    raise OutcomeUnknownError(f"the WAL entry may be written already: {error}") from error
                raise
            except FencedError as error:
                failed_before = isinstance(error.__context__, StorageError | OutcomeUnknownError)
                error.may_be_written = self._may_be_there or failed_before
                self._may_be_there = True
                raise
            except BaseException:  # an interrupt too
                self._may_be_there = True
                raise

    def _place(self, data: memoryview) -> int:
        """Create ``data`` at the first free position and return the position. Requires the lock."""
        for conflict in range(1, MAX_CONFLICTS + 1):
            position = self._next if self._next is not None else self._discover()
            self._next = position
            started = self._clock()
            if not self._put(position, data):
                self.check_fenced()
                self._refuse_double(position)
                self._next = position + 1 if conflict % REFRESH_EVERY else None
                continue
            self._may_be_there = True
            if not self._counts(position):
                self._may_be_there = False
                self._next = None
                continue
            self._confirmed_at = started
            self._next = self.next_position_hint = position + 1
            self._knows_tail = True
            self._trying = None
            self._may_be_there = False
            return position
        raise ConflictError(
            f"shard {self.shard_id}: {MAX_CONFLICTS} WAL positions in a row were taken by others although "
            f"epoch {self.epoch} still holds"
        )

    def check_fenced(self) -> None:
        """Raise :class:`FencedError` if another writer has claimed the shard."""
        self.manifests.check_fenced(self.epoch)

    def seed_next_position(self, position: int) -> None:
        """Set the tip that replay found, so that the first append need not search."""
        check_process()
        with self._lock:
            if self._next is not None and self._next >= position:
                return
            started = self._clock()
            self.check_fenced()
            self._next = self.next_position_hint = max(position, self._floor)
            self._knows_tail = True
            self._confirmed_at = started

    def check_alone(self) -> None:
        """Raise :class:`FencedError` if the next position has an entry from a copy of this appender.

        Called before a manifest says that all rows of this epoch up to here are flushed, because the rows
        of the copy are not.
        """
        check_process()
        position = self._next
        if position is None or self._store.head(layout.wal_entry(self.shard_id, position)) is None:
            return
        with self._lock:
            if self._next == position:  # otherwise the entry is our own, written in between
                self._refuse_double(position)

    def _refuse_double(self, position: int) -> None:
        """Stop for good if ``position`` has an entry of our epoch that this appender did not write."""
        try:
            stored = self._store.get(layout.wal_entry(self.shard_id, position))
            epoch = decode_header(stored, self.shard_id, position).writer_epoch
        except (FileNotFoundError, WalCorruptError):
            return  # collected in between, or damaged: replay reports that
        if epoch != self.epoch or _fingerprint(stored) in self._given_up:
            return
        if self._trying is not None and stored == self._trying:
            return
        self._doubled = True
        raise self._double_error()

    def _double_error(self) -> FencedError:
        return FencedError(self.shard_id, self.epoch, self.epoch, f"on shard {self.shard_id}")

    def _put(self, position: int, data: memoryview) -> bool:
        try:
            outcome = self._store.put_if_absent(layout.wal_entry(self.shard_id, position), data)
        except (StorageError, OutcomeUnknownError):
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
        """Whether an entry that was just created is above everything that is settled.

        Garbage collection may have emptied a slot below the tip; see ``clock``.
        """
        if self._clock() - self._confirmed_at <= RECHECK_AFTER.total_seconds():
            return True
        # One manifest answers both questions. A later one may be a successor's, who has taken over this entry
        # and settled it.
        manifest = self.manifests.require_latest()
        if manifest.writer_epoch != self.epoch:
            raise FencedError(self.shard_id, self.epoch, manifest.writer_epoch)
        return position >= first_unsettled(manifest)

    def _discover(self) -> int:
        """Find the tip, and check afterwards that the epoch was still ours."""
        started = self._clock()
        tip = max(established_tip(self._store, self.shard_id, self.manifests.read_latest()), self._floor)
        # After the search, not before: the search may have passed a successor's sentinel.
        self.check_fenced()
        if self._knows_tail and tip > self.next_position_hint:
            self._refuse_double(tip - 1)
        self._confirmed_at = started
        return tip


def _fingerprint(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def check_batches(batches: Sequence[pa.RecordBatch]) -> None:
    """Refuse batches that must not become an entry: none at all, an empty batch, different schemas."""
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
    """Whether names, types and field ids agree; the metadata of the schema itself does not count."""
    return bool(
        one.equals(other, check_metadata=True)
        or one.remove_metadata().equals(other.remove_metadata(), check_metadata=True)
    )
