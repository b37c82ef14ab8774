"""A shard's manifest: which writer may write, what is flushed, where replay starts.

Each version is one immutable file below the shard's ``manifest`` directory, in the
format that Lance itself reads and writes. Fields that a later Lance adds are kept as bytes
through every change.

A file that lancewal writes begins with a checksum over the whole file. It comes first, so that a
truncated file has it too. Only a checksum in that place counts: another writer may copy the field
into its own file, where it means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any
from uuid import UUID

import crc32c

from lancewal.errors import CorruptManifestError, InvalidInputError
from lancewal.format.protos import DecodeError, ShardManifestMessage, unknown_fields
from lancewal.storage import is_plain_name, layout

WRITE_ID_BYTES = 16

# Field 1001 with 8 bytes: a mark and the checksum. The tag and the mark both say that the file has a
# checksum, so that damage in one place cannot hide it. No message of Lance begins with either.
_CHECKSUM_TAG = b"\xca\x3e\x08"
_CHECKSUM_MARK = b"lwm1"
_VERSION_TAG = 0x08
_CHECKSUM_AT = len(_CHECKSUM_TAG) + len(_CHECKSUM_MARK)
_CHECKSUM_END = _CHECKSUM_AT + 4


class ShardStatus(IntEnum):
    """Whether the shard accepts writers; a SEALED shard refuses every claim."""

    ACTIVE = 0
    SEALED = 1


@dataclass(frozen=True)
class SsTableEntry:
    """One flushed MemTable. ``path`` is relative to the shard's directory.

    Three sizes help to plan memory: payload bytes, rows including older versions of a key, payload
    bytes of the key columns. ``None`` means unknown, not zero.

    ``notes`` is lancewal's own: a copy of the notes file in the SSTable's directory, so that readers
    need not fetch it. It is empty if Lance wrote the SSTable or the manifest.
    ``unknown`` holds fields of a later Lance.
    """

    generation: int
    path: str
    in_memory_bytes: int | None = None
    physical_rows: int | None = None
    primary_key_bytes: int | None = None
    notes: str = ""
    unknown: bytes = b""


@dataclass(frozen=True)
class ShardFieldEntry:
    """The value that every row of the shard has in one sharding field.

    ``field_id`` is the text id of the table's ``ShardingField``, not a column's number;
    ``value`` is the result of :func:`~lancewal.format.bucket.encode_shard_value`.
    """

    field_id: str
    value: bytes
    unknown: bytes = b""


@dataclass(frozen=True)
class ShardIdentity:
    """The part of a shard that never changes: its spec, and the stored values of its sharding fields."""

    shard_id: UUID
    spec_id: int
    values: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, kw_only=True)
class ShardManifest:
    """One version of a shard's state; use ``dataclasses.replace`` for the next one.

    Versions, WAL positions and generations count from 1. A ``writer_epoch`` of 0 means
    that no writer has claimed the shard yet, a ``replay_after_wal_entry_position`` of 0
    that no WAL entry is covered by an SSTable, a ``shard_spec_id`` of 0 that the shard
    belongs to no sharding spec. ``wal_entry_position_last_seen`` is a hint only.

    ``unknown`` holds data of a later Lance: unknown fields, and an unknown status. Leave it as it is.
    """

    version: int
    writer_epoch: int
    shard_id: UUID
    replay_after_wal_entry_position: int = 0
    wal_entry_position_last_seen: int = 0
    current_generation: int = 1
    sstables: tuple[SsTableEntry, ...] = ()
    shard_spec_id: int = 0
    shard_field_entries: tuple[ShardFieldEntry, ...] = ()
    status: ShardStatus = ShardStatus.ACTIVE
    unknown: bytes = b""

    @property
    def field_values(self) -> Mapping[str, bytes]:
        """The shard's field values by field id.

        Compare these, not ``shard_field_entries``: Lance shuffles the entries whenever it
        rewrites a manifest.
        """
        return {entry.field_id: entry.value for entry in self.shard_field_entries}

    @property
    def first_unsettled(self) -> int:
        """The lowest WAL position that may be the tip.

        Never at or below the replay cursor: an entry written there would not be replayed.
        """
        return max(self.replay_after_wal_entry_position + 1, layout.FIRST_WAL_POSITION)

    @cached_property
    def identity(self) -> ShardIdentity:
        return ShardIdentity(self.shard_id, self.shard_spec_id, tuple(sorted(self.field_values.items())))

    def without(self, sstables: Iterable[SsTableEntry]) -> ShardManifest:
        """The manifest without these SSTables; the manifest itself if it lists none of them."""
        gone = {(entry.generation, entry.path) for entry in sstables}
        rest = tuple(entry for entry in self.sstables if (entry.generation, entry.path) not in gone)
        return self if len(rest) == len(self.sstables) else replace(self, sstables=rest)


def encode_manifest(manifest: ShardManifest, write_id: bytes | None = None) -> bytes:
    """Encode a manifest file; without a write id, byte for byte as Lance writes it.

    ``write_id`` is 16 fresh random bytes. With it a writer that lost the reply to its put can
    distinguish its own file from another writer's with the same content. Only files with a write id
    have a checksum.

    >>> m = ShardManifest(version=1, writer_epoch=0, shard_id=UUID(int=7))
    >>> decode_manifest(encode_manifest(m), shard_id=UUID(int=7), version=1) == m
    True
    """
    if write_id is not None and len(write_id) != WRITE_ID_BYTES:
        raise InvalidInputError(f"a write id has {WRITE_ID_BYTES} bytes, this one has {len(write_id)}")
    if problem := _problem(manifest):
        raise InvalidInputError(f"{_name(manifest.shard_id, manifest.version)} is invalid: {problem}")
    try:
        content = bytes(_message(manifest, write_id).SerializeToString(deterministic=True))
    except (TypeError, ValueError, DecodeError) as error:
        raise InvalidInputError(
            f"{_name(manifest.shard_id, manifest.version)} cannot be encoded: {error}"
        ) from error
    return content if write_id is None else _with_checksum(content)


def _message(manifest: ShardManifest, write_id: bytes | None) -> Any:
    message = ShardManifestMessage.FromString(manifest.unknown)
    message.version = manifest.version
    message.writer_epoch = manifest.writer_epoch
    message.replay_after_wal_entry_position = manifest.replay_after_wal_entry_position
    message.wal_entry_position_last_seen = manifest.wal_entry_position_last_seen
    message.current_generation = manifest.current_generation
    message.shard_spec_id = manifest.shard_spec_id
    message.shard_id.uuid = manifest.shard_id.bytes
    if manifest.status is not ShardStatus.ACTIVE:
        # ACTIVE may represent a status of a later Lance, which is in the unknown fields.
        message.status = int(manifest.status)
    message.write_id = write_id or b""
    for entry in manifest.sstables:
        added = message.sstables.add(
            generation=entry.generation,
            path=entry.path,
            in_memory_bytes=entry.in_memory_bytes,
            physical_rows=entry.physical_rows,
            primary_key_bytes=entry.primary_key_bytes,
            notes=entry.notes,
        )
        added.MergeFromString(entry.unknown)
    for field in manifest.shard_field_entries:
        message.shard_field_entries.add(field_id=field.field_id, value=field.value).MergeFromString(
            field.unknown
        )
    return message


def _with_checksum(content: bytes) -> bytes:
    head = _CHECKSUM_TAG + _CHECKSUM_MARK
    checksum: int = crc32c.crc32c(content, crc32c.crc32c(head))
    return head + checksum.to_bytes(4, "little") + content


def _check_checksum(data: memoryview, name: str) -> None:
    """Raise CorruptManifestError if the file has a checksum that is wrong."""
    tag, mark = bytes(data[: len(_CHECKSUM_TAG)]), bytes(data[len(_CHECKSUM_TAG) : _CHECKSUM_AT])
    if tag != _CHECKSUM_TAG and mark != _CHECKSUM_MARK:
        return
    stored = int.from_bytes(data[_CHECKSUM_AT:_CHECKSUM_END], "little")
    actual = crc32c.crc32c(data[_CHECKSUM_END:], crc32c.crc32c(data[:_CHECKSUM_AT]))
    if len(data) < _CHECKSUM_END or stored != actual:
        raise CorruptManifestError(f"{name} is damaged: its checksum is {stored:08x}, not {actual:08x}")


def decode_manifest(
    data: bytes | memoryview, *, shard_id: UUID | None = None, version: int | None = None
) -> ShardManifest:
    """Decode a manifest file; raises CorruptManifestError for anything else.

    Pass the ``shard_id`` and ``version`` of the file's path. A manifest with other values
    was copied or misplaced, and writing on top of it would fork the
    shard. A status that this version does not know reads as ACTIVE, as it does in Lance.
    """
    name = _name(shard_id, version)
    message = _parse(data, name)

    id_bytes = message.shard_id.uuid
    if len(id_bytes) != 16:
        found = f"has {len(id_bytes)} bytes" if message.HasField("shard_id") else "is missing"
        raise CorruptManifestError(f"{name} is corrupt: its shard id {found}, expected 16 bytes")
    manifest = ShardManifest(
        version=message.version,
        writer_epoch=message.writer_epoch,
        shard_id=UUID(bytes=id_bytes),
        replay_after_wal_entry_position=message.replay_after_wal_entry_position,
        wal_entry_position_last_seen=message.wal_entry_position_last_seen,
        current_generation=message.current_generation,
        sstables=tuple(
            SsTableEntry(
                generation=entry.generation,
                path=entry.path,
                in_memory_bytes=entry.in_memory_bytes if entry.HasField("in_memory_bytes") else None,
                physical_rows=entry.physical_rows if entry.HasField("physical_rows") else None,
                primary_key_bytes=entry.primary_key_bytes if entry.HasField("primary_key_bytes") else None,
                notes=entry.notes,
                unknown=unknown_fields(entry),
            )
            for entry in message.sstables
        ),
        shard_spec_id=message.shard_spec_id,
        shard_field_entries=tuple(
            ShardFieldEntry(entry.field_id, entry.value, unknown_fields(entry))
            for entry in message.shard_field_entries
        ),
        status=ShardStatus.SEALED if message.status == ShardStatus.SEALED else ShardStatus.ACTIVE,
        unknown=_unknown(message),
    )
    if problem := _problem(manifest):
        raise CorruptManifestError(f"{name} is corrupt: {problem}")
    if data[0] != _VERSION_TAG and bytes(data[: len(_CHECKSUM_TAG)]) != _CHECKSUM_TAG:
        # The checksum's tag and mark are both damaged: a file without a checksum begins with its version.
        raise CorruptManifestError(f"{name} is damaged: it begins with neither version nor checksum")
    if shard_id is not None and manifest.shard_id != shard_id:
        raise CorruptManifestError(f"{name} is corrupt: it belongs to shard {manifest.shard_id}")
    if version is not None and manifest.version != version:
        raise CorruptManifestError(f"{name} is corrupt: it says that its version is {manifest.version}")
    return manifest


def _parse(data: bytes | memoryview, name: str) -> Any:
    _check_checksum(memoryview(data), name)
    try:
        return ShardManifestMessage.FromString(data)
    except DecodeError as error:
        raise CorruptManifestError(f"{name} is not a shard manifest: {error}") from error


def _unknown(message: Any) -> bytes:
    """The bytes of a message that have to be kept unchanged."""
    unknown: bytes = unknown_fields(message)
    if message.status not in tuple(ShardStatus):
        unknown += bytes(ShardManifestMessage(status=message.status).SerializeToString())
    return unknown


def _name(shard_id: UUID | None, version: int | None) -> str:
    return (
        f"manifest version {'?' if version is None else version} of shard "
        f"{'?' if shard_id is None else shard_id}"
    )


def _problem(manifest: ShardManifest) -> str | None:
    """Why a manifest is invalid; ``None`` if it is valid."""
    if manifest.version < 1:
        return "its version is missing (versions count from 1)"
    if manifest.current_generation < 1:
        return "its current generation is missing (generations count from 1)"
    for entry in manifest.sstables:
        if entry.generation < 1:
            return f"SSTable {entry.path!r} has no generation"
        # Reads and deletes use this path: it must not lead out of the shard.
        if not is_plain_name(entry.path):
            return (
                f"SSTable generation {entry.generation} has the path {entry.path!r}, "
                "which is not the name of a directory in the shard's"
            )
    return None
