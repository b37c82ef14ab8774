"""Garbage collection of SSTable directories that a shard's manifest does not name."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from uuid import UUID

from lancewal.maintenance.commits import crash_point
from lancewal.maintenance.garbage import ShardGarbage
from lancewal.maintenance.needs import content, waits
from lancewal.maintenance.reports import Resource
from lancewal.publish import STAGED_DELETION_AGE, SsTablePointer, is_staged
from lancewal.shard import WalTailer
from lancewal.sstable import forget_sstable
from lancewal.storage import DELETED_AT_ONCE, ObjectInfo, ObjectStore, Shelf, layout, ordered_map

logger = logging.getLogger(__name__)

#: By store and shard: the SSTables that each retained WAL entry points to. Most entries point to none.
_pointers: Shelf[Hashable, Mapping[ObjectInfo, tuple[str, ...]]] = Shelf()


def collect_sstables(shard: ShardGarbage, resources: frozenset[Resource]) -> None:
    """Delete directories of compacted generations, or of dead attempts, or both."""
    directories = [_Directory(shard, name) for name in shard.unlisted()]
    for each in directories:
        if each.resource is None and each.waits is not None:
            shard.kept(Resource.ORPHANS, each.name, each.waits)
    garbage = [each for each in directories if each.resource in resources]
    if not garbage:
        return
    free = []
    for each in garbage:
        if (reason := each.need) is not None:
            shard.kept(each.kind, each.name, reason)
        else:
            free.append(each)
    # Only a bulk load writes pointers to its SSTables, and only it uses staged names.
    pointed = _pointed(shard) if any(is_staged(each.name) for each in free) else frozenset()
    for each in free:
        if each.name in pointed:
            shard.kept(each.kind, each.name, "a WAL entry points to it")
    for some in _groups([each for each in free if each.name not in pointed]):
        for each in some if shard.dry_run else _delete(shard, some):
            shard.collected(each.kind, each.name, sum(info.size for info in each.infos))


def _groups(directories: Sequence[_Directory]) -> Iterator[list[_Directory]]:
    """Groups of directories whose files one request deletes; a directory with more files is alone."""
    some: list[_Directory] = []
    count = 0
    for each in directories:
        if some and count + len(each.infos) > DELETED_AT_ONCE:
            yield some
            some, count = [], 0
        some.append(each)
        count += len(each.infos)
    if some:
        yield some


def dead_directories(shard: ShardGarbage) -> dict[str, str]:
    """The directories that the manifest does not name and no flush will publish, with their content."""
    return {
        name: content(shard.files(name))
        for name in shard.unlisted()
        if is_staged(name) or (layout.parse_sstable_name(name) or 0) < shard.manifest.current_generation
    }


@dataclass(frozen=True)
class _Directory:
    """One directory that the newest manifest does not name: a compacted generation, or a dead attempt.

    A flush publishes its SSTable only under the generation that the manifest expects next. So a
    directory of that generation or a later one may still be published, however old it is, and stays. A
    directory of an earlier generation is dead. A bulk load gives its directories numbers beyond all
    generations, and publishes them under the next generations. It must publish within a time limit
    (``lancewal.publish.staging``); after that, an unpublished directory is dead.
    """

    shard: ShardGarbage
    name: str

    @property
    def infos(self) -> Sequence[ObjectInfo]:
        return self.shard.files(self.name)

    @property
    def path(self) -> str:
        return layout.sstable_dir(self.shard.shard_id, self.name)

    @cached_property
    def resource(self) -> Resource | None:
        """What kind of garbage it is; ``None`` while it may still be needed."""
        number = layout.parse_sstable_name(self.name)
        assert number is not None
        if is_staged(self.name):
            if self.shard.once_generation(self.name) is not None:
                return Resource.SSTABLES
            return Resource.ORPHANS if self._is_abandoned else None
        if number >= self.shard.manifest.current_generation:
            return None
        if number > self.shard.marker:
            return Resource.ORPHANS if self._is_abandoned else None
        if self._is_abandoned or self.shard.once_generation(self.name) is not None:
            return Resource.SSTABLES
        return None

    @property
    def kind(self) -> Resource:
        """The resource of a directory that is known to be garbage."""
        assert self.resource is not None
        return self.resource

    @property
    def need(self) -> str | None:
        """Why it has to stay although it is garbage."""
        if reason := self.shard.checkpoints.get().needs_sstable(self.shard.shard_id, self.name):
            return reason
        if self.resource is Resource.ORPHANS and not is_staged(self.name):
            return None
        # The name gives the generation only if the SSTable was not renumbered since. If the manifest that
        # listed a bulk load is gone, its generation is unknown. It may be as new as the marker: check that.
        generation = self.shard.once_generation(self.name)
        if generation is None and not is_staged(self.name):
            generation = layout.parse_sstable_name(self.name)
        if generation is None:
            generation = self.shard.marker
        return self.shard.needed(generation, self.shard.retention.sstables, self.name)

    @property
    def _is_abandoned(self) -> bool:
        """Whether no process can still be writing to it."""
        return self._looks_abandoned and self.waits is None

    @cached_property
    def waits(self) -> str | None:
        """Why it stays although its files look old enough."""
        age = self.shard.looks.age_of_name(self.name, content(self.infos))
        return waits(age, self._least_age) if self._looks_abandoned and age < self._least_age else None

    @property
    def _looks_abandoned(self) -> bool:
        newest = max((info.modified for info in self.infos), default=None)
        return newest is None or self.shard.is_old(newest, self._least_age)

    @property
    def _least_age(self) -> timedelta:
        age = self.shard.retention.orphans
        if is_staged(self.name) and not self.shard.retention.allow_unsafe:
            return max(STAGED_DELETION_AGE, age)
        return age


def _pointed(shard: ShardGarbage) -> frozenset[str]:
    """The SSTables that retained WAL entries point to.

    An entry never changes, so what it points to is cached. The size and time are part of the key, because a
    stalled writer may write another entry into a slot that was emptied.
    """
    retained = {p: info for p, info in shard.wal_infos.items() if p not in shard.deleted_positions}
    key = (shard.store.identity, shard.shard_id)
    known = _pointers.get(key) or {}
    unread = [position for position, info in retained.items() if info not in known]
    read = partial(_pointed_by, shard.store, shard.shard_id)
    found = dict(
        zip(
            (retained[position] for position in unread),
            ordered_map(read, ((position, retained[position]) for position in unread), shard.workers),
            strict=True,
        )
    )
    kept = {info: known[info] if info in known else found[info] for info in retained.values()}
    _pointers.put(key, kept, 300 * len(kept))
    return frozenset(name for names in kept.values() for name in names)


def _pointed_by(store: ObjectStore, shard_id: UUID, entry: tuple[int, ObjectInfo]) -> tuple[str, ...]:
    position, info = entry
    header = WalTailer(store, shard_id).read_header(position, info)
    whole = (
        WalTailer(store, shard_id).read_entry(position) if header is not None and header.sentinel else None
    )
    pointer = None if whole is None else SsTablePointer.of(whole)
    return () if pointer is None else pointer.sstables


def _delete(shard: ShardGarbage, directories: Sequence[_Directory]) -> list[_Directory]:
    """Delete the directories that were not published meanwhile, and return them.

    The versions of a dataset go first, so that a half-deleted dataset cannot be opened.
    """
    published = {entry.path for entry in shard.manifests.require_latest().sstables}
    doomed = [each for each in directories if each.name not in published]
    links = {each.name for each in doomed if any(info.path == each.path for info in each.infos)}
    for name in sorted(links):
        path = layout.sstable_dir(shard.shard_id, name)
        logger.warning("%s is a symbolic link; what it points at stays", path)
    if shard.store.is_local:
        # Deletes the directories themselves, and half-written files in them, which listings leave out.
        for each in doomed:
            if each.name not in links:
                shard.store.delete_prefix(f"{each.path}/_versions")
        crash_point("collect: an SSTable is half deleted")
        for each in doomed:
            shard.store.delete_prefix(each.path)
    else:
        paths = [info.path for each in doomed for info in each.infos]
        versions = [path for path in paths if "/_versions/" in path]
        shard.store.delete_many(versions)
        crash_point("collect: an SSTable is half deleted")
        shard.store.delete_many([path for path in paths if "/_versions/" not in path])
    for each in doomed:
        forget_sstable(shard.store, each.path)
    crash_point("collect: an SSTable is deleted")
    return doomed
