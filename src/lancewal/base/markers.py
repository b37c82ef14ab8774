"""Compaction markers, which say up to which generation the base table holds each shard, and temporary tags.

If a table has a primary key, compaction writes rows and marker in one commit. Lance
has no such commit for tables without a key. There the first commit adds the rows and
tags the table's columns, the second writes the marker, and the third removes the tag.
Between the first and the second, a reader that used markers alone would see the rows
twice, in the base and in the SSTables, and a second compactor would append them again. So all
callers use this module, which takes the higher of marker and tag.

The tag is metadata of the table's first columns, one key for each shard and generation:

- it is part of the manifest of every later version, whatever is committed in between
  and whichever old versions are cleaned up;
- Lance's own writers and replay accept it (they do not accept metadata of the schema);
- its removal names the generation, so that a late compactor cannot remove a newer tag than
  its own.

Each shard also has a fence: a marker under an id that no shard has, which every commit of a
compaction raises by one. Lance refuses a marker that is not above the stored one. So of two
compactors that read the same fence, one commits and the other fails. The shard's own marker
would not suffice: a compactor may commit generations 1 to 8 after another committed 1 to 5. It did
not know of those, so its deletes missed their rows.

If there are too many rows for one commit, compaction makes several, and the last one has the marker. The
first one announces, under a third id, up to which generation the rows go. A reader whose state of the shard
does not reach that generation would see only some of the rows, so it starts again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from uuid import UUID

import pyarrow as pa

from lancewal.errors import NotInitializedError, StorageError
from lancewal.format import BaseManifest, parse_manifest_version, read_base_manifest
from lancewal.storage import ObjectInfo, ObjectStore, layout, numbered

#: Metadata keys are this, the shard's id and the generation, joined by colons.
TAG_PREFIX = "lancewal:appended"
#: This many of the first columns carry the tag, because one of them may be dropped.
TAGGED_COLUMNS = 4
_FENCE_PREFIX = b"lancewal"
_PARTS_PREFIX = _FENCE_PREFIX + b"\xff"


def effective_markers(stored: Mapping[UUID, int], columns: pa.Schema) -> Mapping[UUID, int]:
    """The higher of stored marker and tag for each shard; ``columns`` are the columns of the base table.

    >>> shard = UUID(int=1)
    >>> tagged = pa.schema([pa.field("id", pa.int64(), metadata={tag(shard, 4): ""})])
    >>> effective_markers({shard: 3}, tagged)[shard], effective_markers({shard: 7}, tagged)[shard]
    (4, 7)
    """
    return _with_tags(stored, tags(columns).values())


def _with_tags(stored: Mapping[UUID, int], tagged: Iterable[tuple[UUID, int] | None]) -> Mapping[UUID, int]:
    markers = {key: generation for key, generation in stored.items() if not is_fence(key)}
    for found in tagged:
        if found is not None:
            shard_id, generation = found
            markers[shard_id] = max(markers.get(shard_id, 0), generation)
    return markers


#: An attempt fails only if a version was superseded and cleaned up between two requests.
_ATTEMPTS = 16


def stored_markers(store: ObjectStore) -> Mapping[UUID, int]:
    """The markers in the newest version at ``store``; empty if there is no table.

    Used to create a shard: it reads one file, and needs neither Lance nor the rest of the version. Refuses a
    table whose write path was removed.
    """
    manifest = newest_manifest(store)
    if manifest is None:
        return {}
    if manifest.mem_wal is None:
        raise NotInitializedError(f"the table at {store.uri} has no MemWAL index any more; open it again")
    return _with_tags(manifest.mem_wal.compacted, map(_parse, manifest.metadata_keys))


def retained_versions(store: ObjectStore) -> dict[int, ObjectInfo]:
    """The manifest files of the table's versions that were not cleaned up, oldest first."""
    return numbered(store.list(layout.VERSIONS_DIR), layout.VERSIONS_DIR, parse_manifest_version)


def newest_manifest(store: ObjectStore) -> BaseManifest | None:
    """The manifest of the newest version at ``store``; ``None`` if there is no table."""
    for _ in range(_ATTEMPTS):
        versions = retained_versions(store)
        if not versions:
            return None
        path = versions[max(versions)].path
        try:
            return read_base_manifest(store.get(path), name=path)
        except FileNotFoundError:
            # The version was cleaned up since the listing, so there is a newer one.
            continue
    raise StorageError(f"versions of {store.uri} are cleaned up faster than they can be read; try again")


def fence_id(shard_id: UUID) -> UUID:
    """The id of the fence, which counts the compaction commits of a shard.

    >>> is_fence(fence_id(UUID(int=1))), is_fence(UUID(int=1))
    (True, False)
    """
    return UUID(bytes=_FENCE_PREFIX + hashlib.sha256(shard_id.bytes).digest()[:8])


def parts_id(shard_id: UUID) -> UUID:
    """The id under which a compaction in several commits announces up to which generation it goes.

    >>> is_parts(parts_id(UUID(int=1))), is_fence(parts_id(UUID(int=1))), is_parts(UUID(int=1))
    (True, True, False)
    """
    return UUID(bytes=_PARTS_PREFIX + hashlib.sha256(shard_id.bytes).digest()[:7])


def is_parts(marked: UUID) -> bool:
    """Whether a marker's id comes from :func:`parts_id`; very few fences have the same prefix by chance."""
    return marked.bytes.startswith(_PARTS_PREFIX)


def is_fence(marked: UUID) -> bool:
    """Whether a marker's id is the id of a fence or an announcement, and not of a shard."""
    return marked.bytes.startswith(_FENCE_PREFIX)


def tag(shard_id: UUID, generation: int) -> str:
    """The metadata key that says that the base holds the shard's rows up to ``generation``."""
    return f"{TAG_PREFIX}:{shard_id}:{generation}"


def tags(columns: pa.Schema) -> Mapping[str, tuple[UUID, int]]:
    """The tags on a table's columns: the metadata keys, with the shard and generation that each names."""
    found = {}
    for key in _metadata_keys(columns):
        parsed = _parse(key)
        if parsed is not None:
            found[key] = parsed
    return found


def unmarked_tags(stored: Mapping[UUID, int], columns: pa.Schema) -> dict[UUID, int]:
    """The shards with a tag above their stored marker: an append whose marker is still to come.

    >>> columns = pa.schema([pa.field("id", pa.int64(), metadata={tag(UUID(int=1), 4): ""})])
    >>> unmarked_tags({UUID(int=1): 3}, columns), unmarked_tags({UUID(int=1): 4}, columns)
    ({UUID('00000000-0000-0000-0000-000000000001'): 4}, {})
    """
    pending: dict[UUID, int] = {}
    for shard_id, generation in tags(columns).values():
        if generation > stored.get(shard_id, 0):
            pending[shard_id] = max(pending.get(shard_id, 0), generation)
    return pending


def _metadata_keys(columns: pa.Schema) -> Iterator[str]:
    for field in columns:
        for key in field.metadata or ():
            yield key.decode(errors="replace")


def _parse(key: str) -> tuple[UUID, int] | None:
    prefix = f"{TAG_PREFIX}:"
    shard, _, generation = key.removeprefix(prefix).partition(":")
    if not key.startswith(prefix) or not generation.isdecimal():
        return None
    try:
        return UUID(shard), int(generation)
    except ValueError:
        return None
