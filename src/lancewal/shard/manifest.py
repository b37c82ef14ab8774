"""ShardManifestStore: the shard's only mutable state, as a chain of immutable versions.

A commit creates version N+1 with put-if-absent; the loser of a race reads again and retries.
The chain is also the fence: a claim raises ``writer_epoch``, and every later commit
of the old writer finds a foreign epoch and fails.

Garbage collection may delete versions, in ascending order, never the newest, and none
before its age (see ``clock``). A stalled committer may then create a version far below
the newest, in a slot that was emptied. Such a stray version never counts. A manifest that was
read longer ago than the recheck time is not trusted, nor is a hint whose neighbour is gone: a
listing decides.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from uuid import UUID

from lancewal.base import stored_markers
from lancewal.errors import (
    ConflictError,
    FencedError,
    InvalidInputError,
    LanceWalError,
    OutcomeUnknownError,
    SealedShardError,
    StorageError,
)
from lancewal.format import ShardFieldEntry, ShardManifest, ShardStatus, decode_manifest, encode_manifest
from lancewal.storage import (
    RECHECK_AFTER,
    Clock,
    ObjectInfo,
    ObjectStore,
    PutOutcome,
    Shelf,
    boot_time,
    both,
    layout,
    numbered,
    ordered_map,
)

logger = logging.getLogger(__name__)

DEFAULT_SCAN_BATCH_SIZE = 2
#: How many races in a row a commit may lose before the caller gets an error.
MAX_COMMIT_ATTEMPTS = 64
#: After so many rounds of probing past the hint, one listing is cheaper.
_MAX_PROBE_ROUNDS = 16
_READ_ATTEMPTS = 4

#: Manifests that were found by listings, by store and file.
_kept: Shelf[tuple[object, ObjectInfo], ShardManifest] = Shelf()
#: The approximate memory of an SSTable's entry in a manifest.
_ENTRY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class _Seen:
    """A manifest, and a time at which it was the newest."""

    manifest: ShardManifest
    at: float


@dataclass(frozen=True, slots=True)
class _Found:
    """A version with its content, and the newest version if that is known too."""

    version: int | None = None
    content: ShardManifest | bytes | None = None
    newest: int | None = None


def refuse_other_shard(present: ShardManifest, spec_id: int, values: Mapping[str, bytes]) -> None:
    """Refuse a shard that was created for other values or by another sharding spec."""
    if present.shard_spec_id != spec_id or present.field_values not in ({}, values):
        raise InvalidInputError(
            f"shard {present.shard_id} exists with sharding spec {present.shard_spec_id} and field values "
            f"{present.field_values}; it cannot be initialised with spec {spec_id} and {values}"
        )


class ShardManifestStore:
    """Reads and commits the manifests of one shard. Thread-safe; holds no lock across I/O."""

    def __init__(
        self,
        store: ObjectStore,
        shard_id: UUID,
        scan_batch_size: int = DEFAULT_SCAN_BATCH_SIZE,
        clock: Clock = boot_time,
    ) -> None:
        if scan_batch_size < 1:
            raise InvalidInputError(f"manifest_scan_batch_size must be at least 1, got {scan_batch_size}")
        self._store = store
        self.shard_id = shard_id
        self._scan_batch_size = scan_batch_size
        self._clock = clock
        # Versions only grow, so probing starts here. Racing updates may set it to a slightly older
        # version, which costs one more probe.
        self._seen: _Seen | None = None

    def read_latest(self) -> ShardManifest | None:
        """The newest manifest; ``None`` when the shard has none yet."""
        return self._read(self._newest)

    def read_to_claim(self) -> ShardManifest | None:
        """Like :meth:`read_latest`, with the fewest requests, for callers that also list the shard's log."""
        return self._read(self._newest if self._store.is_local else self._listed)

    def read_listed(self, infos: Iterable[ObjectInfo]) -> ShardManifest | None:
        """The newest manifest in a listing of the shard's files; it is only as fresh as the listing.

        A version never changes, so it is cached.
        """
        versions = numbered(infos, layout.manifest_dir(self.shard_id), layout.parse_manifest_name)
        if not versions:
            return self.read_latest()
        newest = max(versions)
        try:
            return _kept.get_or_make(
                (self._store.identity, versions[newest]),
                lambda: self.read_version(newest),
                lambda manifest: _ENTRY_BYTES * (1 + len(manifest.sstables)),
            )
        except FileNotFoundError:
            # Superseded and collected since the listing.
            return self.read_latest()

    def assume(self, manifest: ShardManifest, read_after: float) -> None:
        """Start with a manifest that another reader read at or after ``read_after``, a :func:`boot_time`."""
        self._seen = _Seen(manifest, read_after)

    def _read(self, newest: Callable[[float], ShardManifest | None]) -> ShardManifest | None:
        for _ in range(_READ_ATTEMPTS):
            started = self._clock()
            try:
                manifest = newest(started)
            except FileNotFoundError:
                # Superseded and collected since it was found: this process was stalled.
                self._seen = None
                continue
            if manifest is not None:
                self._seen = _Seen(manifest, started)
            return manifest
        raise StorageError(
            f"shard {self.shard_id}: {_READ_ATTEMPTS} manifest versions in a row vanished while being read"
        )

    def require_latest(self) -> ShardManifest:
        """The newest manifest of a shard that must exist."""
        manifest = self.read_latest()
        if manifest is None:
            raise self._no_manifest()
        return manifest

    def _no_manifest(self) -> InvalidInputError:
        return InvalidInputError(
            f"shard {self.shard_id} has no manifest; open a writer on it or initialise it first"
        )

    def read_version(self, version: int) -> ShardManifest:
        return self._decoded(version, self._store.get(layout.manifest_file(self.shard_id, version)))

    def _decoded(self, version: int, data: bytes) -> ShardManifest:
        return decode_manifest(data, shard_id=self.shard_id, version=version)

    def initialize_shard(
        self,
        spec_id: int = 0,
        field_entries: Sequence[ShardFieldEntry] = (),
        *,
        check: Callable[[], object] | None = None,
        is_new: bool = False,
    ) -> ShardManifest:
        """Write version 1 with the shard's field values; an equal shard stays as it is.

        So does a shard of the same spec without any values, because Lance writes no values when it creates a
        shard. ``check`` may refuse before anything is written. ``is_new`` says that the table had neither
        shards nor markers just now; then neither is looked for.
        """
        values = {entry.field_id: entry.value for entry in field_entries}
        started = self._clock()
        present = None
        if not is_new:
            look = check or (lambda: None)
            _, present = both(
                look, self.read_to_claim, at_once=check is not None and not self._store.is_local
            )
        if present is None:
            first = ShardManifest(
                version=layout.FIRST_MANIFEST_VERSION,
                writer_epoch=0,
                shard_spec_id=spec_id,
                shard_id=self.shard_id,
                shard_field_entries=tuple(field_entries),
                current_generation=layout.FIRST_GENERATION if is_new else self._first_generation(),
            )
            if self._create(first, started):
                return first
        present = present or self.require_latest()
        refuse_other_shard(present, spec_id, values)
        return present

    def claim_epoch(
        self,
        spec_id: int | None = 0,
        *,
        check: Callable[[ShardManifest], object] | None = None,
        write_hint: bool = True,
    ) -> tuple[int, ShardManifest]:
        """Claim the shard: from here on no older writer commits a manifest.

        Only a sentinel ends the older writer's appends, see ``WalAppender.fence_predecessor``. Before
        anything is written, a sealed shard and a foreign sharding spec are refused, and ``check`` may refuse
        the current manifest. ``spec_id`` defaults to the manifest's, 0 for a new shard.
        A caller that passes ``write_hint=False`` must call :meth:`write_hint` itself.
        """

        def claimed(current: ShardManifest | None) -> ShardManifest:
            if current is None:
                return ShardManifest(
                    version=layout.FIRST_MANIFEST_VERSION,
                    writer_epoch=1,
                    shard_spec_id=spec_id or 0,
                    shard_id=self.shard_id,
                    current_generation=self._first_generation(),
                )
            self._refuse_claim(current, spec_id)
            if check is not None:
                check(current)
            return replace(current, version=current.version + 1, writer_epoch=current.writer_epoch + 1)

        manifest = self._commit(claimed, write_hint)
        if manifest is None:
            raise ConflictError(
                f"shard {self.shard_id}: {MAX_COMMIT_ATTEMPTS} claims in a row were lost to other writers; "
                "several processes are fighting for this shard"
            )
        logger.info("claimed shard", extra={"shard": str(self.shard_id), "epoch": manifest.writer_epoch})
        return manifest.writer_epoch, manifest

    def check_fenced(self, epoch: int) -> None:
        """Raise :class:`FencedError` if another writer has claimed the shard."""
        current = self.require_latest()
        if current.writer_epoch != epoch:
            raise FencedError(self.shard_id, epoch, current.writer_epoch)

    def commit_update(
        self, epoch: int | None, change: Callable[[ShardManifest], ShardManifest]
    ) -> ShardManifest:
        """Commit ``change(newest)`` as the next version; retried when another commit came first.

        ``epoch`` is the committer's; ``None`` is for maintenance, which may work alongside
        any writer and keeps the epoch as it is. ``change`` must be a pure function of its
        argument, because it runs once per attempt; returning the argument commits nothing.
        If this process was stalled for minutes after a commit, ``change`` may get a manifest that
        already has its own result. It should recognise that and return the argument.
        """

        def next_version(current: ShardManifest | None) -> ShardManifest:
            if current is None:
                raise self._no_manifest()
            if epoch is not None and current.writer_epoch != epoch:
                raise FencedError(self.shard_id, epoch, current.writer_epoch, "at a manifest commit")
            changed = change(current)
            if changed is current:
                return current
            return replace(changed, version=current.version + 1, writer_epoch=current.writer_epoch)

        manifest = self._commit(next_version)
        if manifest is None:
            raise ConflictError(
                f"shard {self.shard_id}: {MAX_COMMIT_ATTEMPTS} manifest commits in a row lost their race; "
                "nothing was written, try again"
            )
        return manifest

    def _commit(
        self, next_version: Callable[[ShardManifest | None], ShardManifest], write_hint: bool = True
    ) -> ShardManifest | None:
        """Commit the result of ``next_version(newest)``; ``None`` when all races were lost.

        The first attempt assumes that the manifest that was seen last is still the newest, which saves a
        round trip. If it is not, its successor's slot is taken: the attempt loses and writes nothing. The
        slot cannot have been emptied since, see :meth:`_create`. If ``next_version`` refuses such a manifest
        or leaves it unchanged, that does not count: it is called again with the newest manifest.
        """
        seen = self._seen
        if seen is not None and self._clock() - seen.at <= RECHECK_AFTER.total_seconds():
            changed = seen.manifest
            with suppress(LanceWalError):
                changed = next_version(seen.manifest)
            if changed is not seen.manifest and self._create(changed, seen.at, write_hint):
                return changed
        for _ in range(MAX_COMMIT_ATTEMPTS):
            started = self._clock()
            current = self.read_latest()
            changed = next_version(current)
            if changed is current or self._create(changed, started, write_hint):
                return changed
        return None

    def seal(self, epoch: int) -> ShardManifest:
        """Refuse all later claims. The caller has claimed ``epoch``, so no other writer is live."""
        return self.commit_update(
            epoch,
            lambda m: m if m.status is ShardStatus.SEALED else replace(m, status=ShardStatus.SEALED),
        )

    def unseal(self) -> ShardManifest:
        """Allow claims again; a shard that is not sealed stays as it is."""
        return self.commit_update(
            None,
            lambda m: m if m.status is ShardStatus.ACTIVE else replace(m, status=ShardStatus.ACTIVE),
        )

    def repair_hint(self) -> None:
        """Overwrite the version hint with the newest version."""
        self.require_latest()
        self.write_hint()

    def write_hint(self) -> None:
        """Write the version that was seen last to the hint file, where readers look first."""
        seen = self._seen
        if seen is None:
            return
        # The commit is valid without the hint, so a failure here is ignored.
        try:
            path = layout.version_hint(self.shard_id)
            self._store.put(path, b'{"version":%d}' % seen.manifest.version, durable=False)
        except LanceWalError as error:
            logger.debug("version hint not written: %s", error, extra={"shard": str(self.shard_id)})

    def read_hint(self) -> int | None:
        """The version in the hint file; ``None`` if the file is missing or unusable."""
        try:
            version = json.loads(bytes(self._store.get(layout.version_hint(self.shard_id))))["version"]
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return None
        usable = isinstance(version, int) and not isinstance(version, bool)
        return version if usable and 0 < version < 1 << 64 else None

    def _first_generation(self) -> int:
        """The first generation of a new shard: above the base table's marker for the shard.

        A copied table has the original's markers, but none of its shards. SSTables at or below the marker
        would count as compacted.
        """
        return stored_markers(self._store).get(self.shard_id, 0) + layout.FIRST_GENERATION

    def _refuse_claim(self, current: ShardManifest, spec_id: int | None) -> None:
        if current.status is ShardStatus.SEALED:
            raise SealedShardError(
                f"shard {self.shard_id} is sealed and takes no writer until somebody calls "
                f"table.unseal_shard('{self.shard_id}')"
            )
        if spec_id is not None and current.shard_spec_id != spec_id:
            raise InvalidInputError(
                f"shard {self.shard_id} belongs to sharding spec {current.shard_spec_id}, "
                f"the writer asked for spec {spec_id}; open it with spec {current.shard_spec_id}"
            )

    def _create(self, manifest: ShardManifest, started: float, write_hint: bool = True) -> bool:
        """Create the version after the one read at ``started``; ``False`` if another commit came first."""
        data = encode_manifest(manifest, secrets.token_bytes(16))
        path = layout.manifest_file(self.shard_id, manifest.version)
        if self._store.put_if_absent(path, data) is PutOutcome.EXISTS:
            return False
        if self._clock() - started > RECHECK_AFTER.total_seconds():
            # The slot may have been emptied by garbage collection while this process
            # was stalled. A newer version may or may not build on ours.
            try:
                newest = self._listed_version()
            except StorageError as error:
                raise OutcomeUnknownError(
                    f"shard {self.shard_id}: manifest version {manifest.version} was written, but nobody "
                    f"could look whether it counts: {error}"
                ) from error
            if newest is not None and newest > manifest.version:
                self._seen = None
                return False
        self._seen = _Seen(manifest, started)
        if write_hint:
            self.write_hint()
        return True

    def _newest(self, started: float) -> ShardManifest | None:
        """Find the newest manifest by probing from the last seen version or the hint; lists if unsafe."""
        seen = self._seen
        found = self._from_hint() if seen is None else _Found(seen.manifest.version, seen.manifest)
        newest = found.newest if found.newest is not None else self._probe_upwards(found.version)
        since = started if seen is None else seen.at
        # Within the recheck time no successor of a version that was the newest can have been
        # collected. So the first missing version never existed.
        if newest is None or self._clock() - since > RECHECK_AFTER.total_seconds():
            newest = self._listed_version()
        if newest is None:
            return None
        if newest != found.version or found.content is None:
            return self.read_version(newest)
        return (
            found.content
            if isinstance(found.content, ShardManifest)
            else self._decoded(newest, found.content)
        )

    def _listed(self, started: float) -> ShardManifest | None:
        newest = self._listed_version()
        return None if newest is None else self.read_version(newest)

    def _from_hint(self) -> _Found:
        """Read the hinted version, and probe its neighbours at the same time."""
        version = self.read_hint()
        if version is None:
            return _Found()
        if version == layout.FIRST_MANIFEST_VERSION:
            # There is no neighbour below that could prove that it is part of the chain.
            content, newest = both(
                lambda: self._content(version), self._listed_version, at_once=not self._store.is_local
            )
            return _Found(version, content, newest)
        content, (below, *above) = both(
            lambda: self._content(version),
            lambda: self._probe([version - 1, *range(version + 1, version + 1 + self._scan_batch_size)]),
            at_once=not self._store.is_local,
        )
        if not below:
            # Perhaps a stray version in an emptied slot.
            return _Found()
        return _Found(version, content, self._probe_upwards(version, [content is not None, *above]))

    def _content(self, version: int) -> bytes | None:
        try:
            return self._store.get(layout.manifest_file(self.shard_id, version))
        except FileNotFoundError:
            return None

    def _probe_upwards(self, version: int | None, found: Sequence[bool] | None = None) -> int | None:
        """The last version of the chain that contains ``version``; ``None`` if a listing must decide.

        ``found`` is the result of a first round of probing from ``version`` on.
        """
        if version is None:
            return None
        for _ in range(_MAX_PROBE_ROUNDS):
            if found is None:
                found = self._probe(range(version, version + 1 + self._scan_batch_size))
            if not all(found):
                gap = found.index(False)
                # A version behind the gap was created during the probing, or the chain is broken here.
                return None if gap == 0 or any(found[gap:]) else version + gap - 1
            version += self._scan_batch_size
            found = None
        return None

    def _probe(self, versions: Sequence[int]) -> list[bool]:
        return list(ordered_map(self._exists, versions, 1 if self._store.is_local else len(versions)))

    def _exists(self, version: int) -> bool:
        return self._store.head(layout.manifest_file(self.shard_id, version)) is not None

    def _listed_version(self) -> int | None:
        directory = layout.manifest_dir(self.shard_id)
        return max(numbered(self._store.list(directory), directory, layout.parse_manifest_name), default=None)
