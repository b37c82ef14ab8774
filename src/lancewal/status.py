"""The status of a table: what waits for a flush, for compaction, and for an index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from lancewal.base import BaseTable, fragments_of, lance_errors, row_count
from lancewal.errors import DifferentHistoryError, WalCorruptError
from lancewal.format import MEM_WAL_INDEX_NAME, ShardManifest, ShardStatus
from lancewal.maintenance import (
    SMALL_FILE_ROWS,
    Checkpoint,
    UpkeepSettings,
    read_checkpoints,
    read_upkeep_settings,
)
from lancewal.reader import TableState
from lancewal.service import Duty, Owner, duties_in, look_at_clock, owners_in
from lancewal.shard import (
    ShardManifestStore,
    decoded_values,
    discover_manifests,
    find_tip,
    first_unflushed,
    listed_shards,
    shard_files,
)
from lancewal.sstable import held_generation
from lancewal.storage import ObjectInfo, ObjectStore, both, in_thread, layout, numbered, ordered_map

T = TypeVar("T")
R = TypeVar("R")

#: How many shards are examined in parallel when each one costs a network round trip.
_REMOTE_LOOKS = 64


@dataclass(frozen=True)
class Lag:
    """What waits for the next stage. ``since`` is the time when its oldest part was written.

    ``count`` counts WAL entries, SSTables or files. ``rows`` is ``None`` if their number is unknown.
    ``estimated`` is true if ``num_bytes`` lacks SSTables whose size is not recorded.
    """

    count: int = 0
    rows: int | None = 0
    num_bytes: int = 0
    since: datetime | None = None
    estimated: bool = False

    def seconds(self, now: datetime) -> float:
        """How long the oldest part has waited; 0 when nothing waits."""
        return 0.0 if self.since is None else max(0.0, (now - self.since).total_seconds())

    def to_dict(self, now: datetime) -> dict[str, Any]:
        return {
            "count": self.count,
            "rows": self.rows,
            "bytes": self.num_bytes,
            "seconds": round(self.seconds(now), 3),
            "estimated": self.estimated,
        }


@dataclass(frozen=True)
class ShardInfo:
    """The state of one shard at one moment.

    ``values`` are its sharding values by field (the field is "bucket" in all specs that Lance makes);
    empty for a shard of null values or one made by hand. ``generations`` are the SSTables that the
    manifest lists. ``compacted_generation`` is the newest generation whose rows the base table holds
    (0: none). ``wal_tip`` is the position that the next WAL entry takes. ``tail_length`` is the number
    of entries that no SSTable covers, sentinels included.

    >>> import tempfile, lancewal
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id", unsharded=True)
    >>> with table.writer() as writer:
    ...     _ = writer.put({"id": 2})
    >>> [shard] = table.shards()
    >>> shard.epoch, shard.generations, shard.tail_length
    (1, (1,), 0)
    """

    shard_id: UUID
    spec_id: int
    values: Mapping[str, bool | int | str]
    status: ShardStatus
    epoch: int
    current_generation: int
    generations: tuple[int, ...]
    compacted_generation: int
    wal_tip: int
    tail_length: int


@dataclass(frozen=True)
class ShardState(ShardInfo):
    """A shard and what waits in it.

    ``unflushed`` is what only its WAL holds; ``uncompacted`` are SSTables that the base table lacks.
    ``last_write`` is the time of the newest WAL entry, sentinels included (opening a writer leaves one).
    ``garbage`` are files that no reader of the newest state needs; garbage collection keeps them for a while.
    """

    last_write: datetime | None
    unflushed: Lag
    uncompacted: Lag
    garbage: Lag = Lag()

    def to_dict(self, now: datetime) -> dict[str, Any]:
        return {
            "shard_id": str(self.shard_id),
            "values": dict(self.values),
            "status": self.status.name.lower(),
            "epoch": self.epoch,
            "current_generation": self.current_generation,
            "compacted_generation": self.compacted_generation,
            "generations": list(self.generations),
            "wal_tip": self.wal_tip,
            "last_write": None if self.last_write is None else self.last_write.isoformat(),
            "unflushed": self.unflushed.to_dict(now),
            "uncompacted": self.uncompacted.to_dict(now),
            "garbage": self.garbage.to_dict(now),
        }


@dataclass(frozen=True)
class IndexState:
    """An index of the base table; ``rows_behind`` are rows of the base that it does not cover yet."""

    name: str
    kind: str
    columns: tuple[str, ...]
    rows_covered: int
    rows_behind: int


@dataclass(frozen=True)
class CheckpointState:
    """A checkpoint. ``held`` are the files of shards that it keeps and the newest state no longer needs.

    The checkpoint also keeps the base version that it names, with the files of that version.
    """

    checkpoint: Checkpoint
    held: Lag

    def to_dict(self, now: datetime) -> dict[str, Any]:
        age = max(0.0, (now - self.checkpoint.created).total_seconds())
        return {
            **self.checkpoint.to_dict(),
            "age_seconds": round(age, 3),
            "held": self.held.to_dict(now),
        }


@dataclass(frozen=True)
class TableStatus:
    """The status of a table. Each shard is read at its own moment, so this is not a snapshot.

    ``owners`` are the processes that write to the table, including those that are gone and not replaced.
    ``upkeep`` has the limits that upkeep keeps the table within. ``duties`` say which process does each kind
    of upkeep, or did it last. ``versions`` counts the versions of the base table and has the time of the
    oldest. ``small_files`` counts its files with few rows. ``checkpoints`` come oldest first; ``held`` is the
    part of the garbage that they keep together.
    """

    uri: str
    taken_at: datetime
    base_version: int
    base_rows: int
    base_fragments: int
    primary_key: tuple[str, ...]
    sharding: str
    writer_defaults: Mapping[str, str]
    maintained_indexes: tuple[str, ...] | None
    indexes: tuple[IndexState, ...]
    shards: tuple[ShardState, ...]
    owners: tuple[Owner, ...] = ()
    upkeep: UpkeepSettings = field(default_factory=UpkeepSettings)
    duties: tuple[Duty, ...] = ()
    versions: Lag = Lag()
    small_files: int = 0
    checkpoints: tuple[CheckpointState, ...] = ()
    held: Lag = Lag()

    @property
    def unflushed(self) -> Lag:
        """The sum over all shards."""
        return _together([shard.unflushed for shard in self.shards])

    @property
    def uncompacted(self) -> Lag:
        return _together([shard.uncompacted for shard in self.shards])

    @property
    def garbage(self) -> Lag:
        return _together([shard.garbage for shard in self.shards])

    def to_dict(self) -> dict[str, Any]:
        now = self.taken_at
        return {
            "uri": self.uri,
            "taken_at": now.isoformat(),
            "base": {
                "version": self.base_version,
                "rows": self.base_rows,
                "fragments": self.base_fragments,
                "small_files": self.small_files,
                "versions": self.versions.count,
            },
            "primary_key": list(self.primary_key),
            "sharding": self.sharding,
            "writer_defaults": dict(self.writer_defaults),
            "maintained_indexes": None if self.maintained_indexes is None else list(self.maintained_indexes),
            "indexes": [{**asdict(index), "columns": list(index.columns)} for index in self.indexes],
            "unflushed": self.unflushed.to_dict(now),
            "uncompacted": self.uncompacted.to_dict(now),
            "garbage": self.garbage.to_dict(now),
            "upkeep": {
                "settings": self.upkeep.to_dict(),
                "duties": [duty.to_dict() for duty in self.duties],
            },
            "checkpoints": [each.to_dict(now) for each in self.checkpoints],
            "shards": [shard.to_dict(now) for shard in self.shards],
            "owners": [owner.to_dict() for owner in self.owners],
        }


def shard_infos(store: ObjectStore, read_base: Callable[[], BaseTable]) -> list[ShardInfo]:
    """Every shard with its state, sorted by id."""
    manifests = discover_manifests(store)
    tips = list(_for_each(store, lambda m: find_tip(store, m.shard_id, m), manifests))
    # Read the base after the manifests, as readers do: a generation that was pruned from a manifest by then
    # is marked as compacted.
    return _infos(store, read_base(), manifests, tips)


def _infos(
    store: ObjectStore, base: BaseTable, manifests: Sequence[ShardManifest], tips: Sequence[int]
) -> list[ShardInfo]:
    held = _for_each(store, partial(_held, store, base), manifests)
    return [
        ShardInfo(
            shard_id=manifest.shard_id,
            spec_id=manifest.shard_spec_id,
            values=decoded_values(base.details, manifest),
            status=manifest.status,
            epoch=manifest.writer_epoch,
            current_generation=manifest.current_generation,
            generations=tuple(entry.generation for entry in manifest.sstables),
            compacted_generation=compacted,
            wal_tip=tip,
            tail_length=tip - manifest.first_unsettled,
        )
        for manifest, tip, compacted in zip(manifests, tips, held, strict=True)
    ]


def _held(store: ObjectStore, base: BaseTable, manifest: ShardManifest) -> int:
    """The newest generation whose rows the base table holds, as readers see it; 0 for none."""
    try:
        return held_generation(base, store, manifest)
    except DifferentHistoryError:
        # Readers refuse the shard and say why; the status only counts it.
        return base.compacted_generation(manifest.shard_id)


def _for_each(store: ObjectStore, look: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Apply ``look`` to all items, many at a time if each one costs a network round trip."""
    return ordered_map(look, items, 1 if store.is_local else _REMOTE_LOOKS)


def table_status(
    store: ObjectStore, read_base: Callable[[], BaseTable], now: datetime | None = None
) -> TableStatus:
    """Read every shard, then the base table.

    Ages come from the storage's own time stamps; ``now`` is for tests.
    """
    shard_ids = listed_shards(store)
    looked = list(_for_each(store, partial(_look, store), shard_ids))
    present = [(manifest, files) for manifest, files in looked if manifest is not None]
    # Read the base after the manifests, as readers do: a generation that was pruned from a manifest by then
    # is marked as compacted.
    reading = None if store.is_local else in_thread(read_base, "lancewal-io")
    beside = None if store.is_local else in_thread(partial(_look_beside, store), "lancewal-io")
    tails = list(_for_each(store, partial(_tail, store), present))
    base = read_base() if reading is None else reading.result()
    infos = _infos(store, base, [manifest for manifest, _ in present], [tail.tip for tail in tails])
    garbage = [
        _garbage(manifest, files, info.compacted_generation, tail)
        for (manifest, files), info, tail in zip(present, infos, tails, strict=True)
    ]
    shards = [
        ShardState(
            **vars(info),
            last_write=tail.last_write,
            unflushed=tail.lag,
            uncompacted=_uncompacted(manifest, files, info.compacted_generation),
            garbage=_lag_of(unneeded),
        )
        for (manifest, files), info, tail, unneeded in zip(present, infos, tails, garbage, strict=True)
    ]
    details = base.details
    fragments = fragments_of(base.dataset)
    with_clock, versions, settings, kept = _look_beside(store) if beside is None else beside.result()
    by_shard = {info.shard_id: unneeded for info, unneeded in zip(infos, garbage, strict=True)}
    held = [(each, _held_for(state, by_shard)) for each, state in kept]
    return TableStatus(
        uri=base.uri,
        taken_at=now or datetime.now(UTC),
        base_version=base.version,
        base_rows=row_count(base.dataset),
        base_fragments=len(fragments),
        primary_key=base.schema.primary_key,
        sharding=sharding_text(base),
        writer_defaults=dict(details.writer_config_defaults),
        maintained_indexes=None if details.maintain_all_indexes else details.maintained_indexes,
        indexes=tuple(_indexes(base)),
        shards=tuple(sorted(shards, key=_by_value)),
        owners=tuple(owners_in(store, with_clock)),
        upkeep=settings,
        duties=tuple(duties_in(store, with_clock)),
        versions=_lag_of(versions),
        small_files=sum(each.physical_rows < SMALL_FILE_ROWS for each in fragments),
        checkpoints=tuple(CheckpointState(each, _lag_of(infos)) for each, infos in held),
        held=_lag_of(list({info.path: info for _, infos in held for info in infos}.values())),
    )


_Kept = list[tuple[Checkpoint, TableState | None]]


def _look_beside(store: ObjectStore) -> tuple[list[ObjectInfo], list[ObjectInfo], UpkeepSettings, _Kept]:
    """The objects in the clock's directory, the base's versions, the upkeep settings, the checkpoints."""
    at_once = not store.is_local
    (with_clock, versions), (settings, kept) = both(
        lambda: both(lambda: look_at_clock(store), lambda: store.list(layout.VERSIONS_DIR), at_once=at_once),
        lambda: both(lambda: read_upkeep_settings(store), lambda: read_checkpoints(store), at_once=at_once),
        at_once=at_once,
    )
    return with_clock, versions, settings, kept


def sharding_text(base: BaseTable) -> str:
    """How rows are assigned to shards: "bucket(id, 8)", "identity(tenant)", "unsharded" or "by hand"."""
    if not base.details.sharding_specs:
        return "by hand"
    names = {number: name for name, number in base.schema.field_ids.items()}
    newest = max(base.details.sharding_specs, key=lambda spec: spec.spec_id)
    texts = []
    for each in newest.fields:
        arguments = [names.get(source, f"field {source}") for source in each.source_ids]
        arguments += [each.parameters["num_buckets"]] if "num_buckets" in each.parameters else []
        how = each.transform or each.expression or "unknown"
        texts.append(f"{how}({', '.join(arguments)})" if arguments else how)
    return ", ".join(texts)


@dataclass(frozen=True)
class _Tail:
    tip: int
    last_write: datetime | None
    lag: Lag
    #: The paths of the entries that are still needed: all from the first unflushed one on, and the last one,
    #: which marks the end of the log.
    needed: frozenset[str]


def _look(store: ObjectStore, shard_id: UUID) -> tuple[ShardManifest | None, list[ObjectInfo]]:
    """The shard's files, and the newest manifest among them."""
    files = shard_files(store, shard_id)
    return ShardManifestStore(store, shard_id).read_listed(files), files


def _tail(store: ObjectStore, shard: tuple[ShardManifest, list[ObjectInfo]]) -> _Tail:
    manifest, files = shard
    entries = numbered(files, layout.wal_dir(manifest.shard_id), layout.parse_wal_name)
    # If the listed manifest was deleted meanwhile, a newer one was read, and it may be ahead of the listing.
    tip = max(manifest.first_unsettled, max(entries, default=0) + 1)
    last = entries.get(tip - 1)
    # Sentinels before the first rows need no flush.
    try:
        start = first_unflushed(store, manifest, tip, entries)
    except WalCorruptError:
        # Count what cannot be read as unflushed. A flush of this shard raises the error; the status must
        # still show the other shards.
        start = manifest.first_unsettled
    waiting = [] if start is None else [entries[p] for p in range(start, tip) if p in entries]
    lag = Lag(len(waiting), None, sum(info.size for info in waiting), _oldest(waiting)) if waiting else Lag()
    first_needed = min(tip if start is None else start, tip - 1)
    needed = frozenset(info.path for position, info in entries.items() if position >= first_needed)
    return _Tail(tip, last.modified if last else None, lag, needed)


def _uncompacted(manifest: ShardManifest, files: list[ObjectInfo], held: int) -> Lag:
    waiting = sorted(
        (entry for entry in manifest.sstables if entry.generation > held), key=lambda e: e.generation
    )
    if not waiting:
        return Lag()
    rows = [entry.physical_rows for entry in waiting]
    oldest = f"{layout.sstable_dir(manifest.shard_id, waiting[0].path)}/"
    return Lag(
        count=len(waiting),
        rows=None if None in rows else sum(number or 0 for number in rows),
        num_bytes=sum(entry.in_memory_bytes or 0 for entry in waiting),
        since=_oldest([info for info in files if info.path.startswith(oldest)]),
        estimated=any(entry.in_memory_bytes is None for entry in waiting),
    )


def _garbage(manifest: ShardManifest, files: list[ObjectInfo], held: int, tail: _Tail) -> list[ObjectInfo]:
    """The files that are not the newest manifest, an uncompacted SSTable, or a needed part of the log."""
    shard_id = manifest.shard_id
    waiting = [entry for entry in manifest.sstables if entry.generation > held]
    needed = (
        layout.manifest_file(shard_id, manifest.version),
        layout.version_hint(shard_id),
        *(f"{layout.sstable_dir(shard_id, entry.path)}/" for entry in waiting),
    )
    return [info for info in files if info.path not in tail.needed and not info.path.startswith(needed)]


def _held_for(state: TableState | None, garbage: Mapping[UUID, list[ObjectInfo]]) -> list[ObjectInfo]:
    """The part of the shards' garbage that a checkpoint needs: its SSTables, and its part of the log."""
    found: list[ObjectInfo] = []
    for place in () if state is None else state.shards:
        infos = garbage.get(place.shard_id, ())
        sstables = tuple(
            f"{layout.sstable_dir(place.shard_id, entry.path)}/" for entry in place.manifest.sstables
        )
        found += [info for info in infos if info.path.startswith(sstables)]
        log = numbered(infos, layout.wal_dir(place.shard_id), layout.parse_wal_name)
        found += [info for position, info in log.items() if position in place.wal_range]
    return found


def _lag_of(infos: list[ObjectInfo]) -> Lag:
    return Lag(len(infos), None, sum(info.size for info in infos), _oldest(infos))


def _indexes(base: BaseTable) -> list[IndexState]:
    with lance_errors(f"count the rows of {base.uri}"):
        rows = {fragment.fragment_id: fragment.count_rows() for fragment in base.dataset.get_fragments()}
    names = {number: name for name, number in base.schema.field_ids.items()}
    found: dict[str, IndexState] = {}
    covered: dict[str, set[int]] = {}
    for segment in base.manifest.indexes:
        if segment.name == MEM_WAL_INDEX_NAME:
            continue
        covered.setdefault(segment.name, set()).update(segment.fragments or ())
        count = sum(rows.get(fragment, 0) for fragment in covered[segment.name])
        found[segment.name] = IndexState(
            segment.name,
            segment.details_type.rpartition(".")[2].removesuffix("IndexDetails"),
            tuple(names.get(number, f"field {number}") for number in segment.field_ids),
            count,
            sum(rows.values()) - count,
        )
    return [found[name] for name in sorted(found)]


def _together(lags: list[Lag]) -> Lag:
    rows = [lag.rows for lag in lags]
    return Lag(
        count=sum(lag.count for lag in lags),
        rows=None if None in rows else sum(number or 0 for number in rows),
        num_bytes=sum(lag.num_bytes for lag in lags),
        since=min((lag.since for lag in lags if lag.since), default=None),
        estimated=any(lag.estimated for lag in lags),
    )


def _oldest(infos: list[ObjectInfo]) -> datetime | None:
    return min((info.modified for info in infos), default=None)


def _by_value(shard: ShardState) -> tuple[bool, int, str, str]:
    """A sort key: buckets in numeric order, then text values, then shards without a value."""
    value = next(iter(shard.values.values()), None)
    number = value if isinstance(value, int) else 0
    return value is None, number, str(value), str(shard.shard_id)
