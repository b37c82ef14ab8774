"""Where a shard's WAL begins and ends. Entries above the replay cursor have no gaps.

An entry that is missing above the cursor although later ones are there was lost, and its rows
with it. A search that halves may take the hole for the end. So wherever rows depend on it, the
tip is established by listing, which sees a hole wherever it is; a reader that comes back lists
again only now and then, and looks behind the end that it knows in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from uuid import UUID

from lancewal import layout
from lancewal.clock import RECHECK_AFTER, Clock, boot_time
from lancewal.errors import WalCorruptError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.manifest import ShardManifestStore
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map

#: Listings take at most this share of the time that a reader comes back in.
_SHARE_OF_LISTINGS = 0.01
_LOOKS = 4


def first_unsettled(manifest: ShardManifest | None) -> int:
    """The lowest position at which a tip may lie.

    Never below the replay cursor: an entry that landed there would not be replayed.
    """
    if manifest is None:
        return layout.FIRST_WAL_POSITION
    return max(manifest.replay_after_wal_entry_position + 1, layout.FIRST_WAL_POSITION)


def established_tip(store: ObjectStore, shard_id: UUID, manifest: ShardManifest | None) -> int:
    """The first free position at or above the replay cursor, by listing.

    Raises :class:`WalCorruptError` where an entry is missing below others. What ``manifest``, which
    was read before, does not cover yet may be flushed and collected meanwhile: that is no hole.
    """
    return _unbroken_end(store, shard_id, manifest, retained_positions(store, shard_id))


def find_tip(store: ObjectStore, shard_id: UUID, manifest: ShardManifest | None) -> int:
    """The first free position at or above the replay cursor, unless a hole is taken for it.

    For figures, and where nothing but time is lost by a tip that is too low. The cursor hint is
    tried first; from there the search gallops and then halves, so a tail of n entries costs
    about 2·log2(n) HEAD requests however stale the hint is.
    """
    taken = _taken(store, shard_id)
    low = first_unsettled(manifest)
    hint = manifest.wal_entry_position_last_seen if manifest else 0
    if hint >= low and taken(hint):
        low = hint + 1
    return _first_free(taken, low)


class WatchedTip:
    """The tip for a reader that comes back: one round trip while nothing new is there. Thread-safe.

    The first look lists. Later ones ask for the position where the log ended and for the one behind
    it, so that a single lost entry is noticed at once, whichever it is. Several that were lost
    side by side, just where the log ended, are noticed by the next listing, some minutes later.
    """

    def __init__(self, store: ObjectStore, shard_id: UUID, clock: Clock = boot_time) -> None:
        self._store = store
        self._shard_id = shard_id
        self._clock = clock
        self._taken = _taken(store, shard_id)
        self._workers = 1 if store.is_local else 2
        # Replaced as a whole: the position up to which there is no hole, and when to list again.
        self._known: tuple[int, float] | None = None

    def find(self, manifest: ShardManifest | None) -> int:
        """The tip; raises :class:`WalCorruptError` where an entry is missing below others."""
        known = self._known
        if known is None or known[0] < first_unsettled(manifest) or self._clock() >= known[1]:
            return self._listed(manifest)
        end, list_again_at = known
        for _ in range(_LOOKS):
            here, behind = ordered_map(self._taken, (end, end + 1), self._workers)
            if not here:
                if behind:
                    # Both came between the two looks, or the first one was lost.
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
    """Every position that has an entry, ascending, by listing."""
    names = (info.path.rsplit("/", 1)[-1] for info in store.list(layout.wal_dir(shard_id)))
    found = (layout.parse_wal_name(name) for name in names)
    return sorted(
        position for position in found if position is not None and position >= layout.FIRST_WAL_POSITION
    )


def missing_positions(positions: Sequence[int], start: int) -> Iterator[range]:
    """The gaps from ``start`` on between ``positions``, which ascend."""
    for position in positions:
        if position > start:
            yield range(start, position)
        start = max(start, position + 1)


def first_readable(store: ObjectStore, shard_id: UUID, manifest: ShardManifest | None) -> int:
    """The first position from which entries can be read up to the tip without a gap.

    ``manifest`` must have been read before this call: what it covers existed by then, so
    what the listing lacks of it was collected. A stalled writer may have dropped an entry
    into a collected slot far below; it belongs to no run that a reader could follow. A gap above
    what is covered is a loss: :class:`WalCorruptError`.
    """
    unsettled = first_unsettled(manifest)
    positions = retained_positions(store, shard_id)
    if not positions or positions[-1] < unsettled - 1:
        return unsettled
    _unbroken_end(store, shard_id, manifest, positions)
    listed, taken = set(positions), _taken(store, shard_id)
    first = positions[-1]
    # A listing is no snapshot: an entry that came while it ran may be missing although a
    # later one is there. So a gap counts only once it was looked at.
    while first > layout.FIRST_WAL_POSITION and (first - 1 in listed or taken(first - 1)):
        first -= 1
    return first


def lost_entry(shard_id: UUID, position: int, found: str) -> WalCorruptError:
    """The error of an entry that was there once; its text says how to go on."""
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
    """Behind the last of the listed ``positions``, which must follow each other above the cursor."""
    taken = _taken(store, shard_id)
    unsettled = first_unsettled(manifest)
    for gap in missing_positions(positions, unsettled):
        for position in gap:
            # A listing is no snapshot: what came while it ran may be missing in it. And what was
            # flushed since the manifest was read may be collected.
            if position < unsettled or taken(position):
                continue
            unsettled = first_unsettled(ShardManifestStore(store, shard_id).read_latest())
            if position >= unsettled:
                raise lost_entry(shard_id, position, f" although entry {gap.stop} is there")
    return max(unsettled, positions[-1] + 1) if positions else unsettled


def _taken(store: ObjectStore, shard_id: UUID) -> Callable[[int], bool]:
    return lambda position: store.head(layout.wal_entry(shard_id, position)) is not None


def _first_free(taken: Callable[[int], bool], low: int) -> int:
    """A position from ``low`` on that is free, right behind one that is taken."""
    step = 1
    while taken(low + step - 1):
        low, step = low + step, step * 2
    # low is the lowest candidate, low + step - 1 is free: halve what lies between.
    high = low + step - 1
    while low < high:
        middle = (low + high) // 2
        if taken(middle):
            low = middle + 1
        else:
            high = middle
    return low
