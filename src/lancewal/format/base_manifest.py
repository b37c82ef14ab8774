"""What the base table's manifest says about the write path: the MemWAL index.

Sharding specs, writer defaults, the generation up to which each shard is compacted and
how far each index has caught up all live in one system index, ``__lance_mem_wal``, whose
details are stored inside the manifest file. pylance shows a part of them; this module
reads all, and the list of ordinary indexes next to them.

Fetch the whole file in one request. It holds the index section, the transaction of the
commit (33 KB after a merge) and the manifest (some 80 bytes a fragment). Only the manifest says
where the index section lies, so reading by ranges saves nothing.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import crc32c
from pyroaring import BitMap

from lancewal.errors import CorruptManifestError
from lancewal.format.protos import (
    DecodeError,
    IndexSectionMessage,
    MemWalIndexDetailsMessage,
    TableFilesMessage,
    TableManifestMessage,
)

MEM_WAL_INDEX_NAME = "__lance_mem_wal"
_MEM_WAL_DETAILS_TYPE = "MemWalIndexDetails"

_MAGIC = b"LANC"
#: u64 position of the manifest, u16 major and u16 minor version, magic.
_FOOTER = struct.Struct("<QHH4s")
_LENGTH = struct.Struct("<I")

_MANIFEST_NAME = re.compile(r"([0-9]{1,20})\.manifest")
_INVERTED_DIGITS = 20
_MAX_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class ShardingField:
    """How one sharding value is computed from a row.

    Lance sets ``transform`` to "bucket", "identity" or "unsharded"; a spec made by hand may have an
    ``expression`` instead.
    """

    field_id: str
    source_ids: tuple[int, ...] = ()
    transform: str | None = None
    expression: str | None = None
    result_type: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardingSpec:
    spec_id: int
    fields: tuple[ShardingField, ...] = ()


@dataclass(frozen=True)
class MemWalDetails:
    """The content of the MemWAL index.

    ``compacted`` gives, per shard, the newest generation whose rows the base table holds.
    A shard without an entry has none: every SSTable of it must be read.

    ``index_catchup`` gives, per index and shard, the newest compacted generation whose
    rows that index covers. **Without an entry nothing is known to be covered**. It does not mean that
    the index is up to date: that reading makes rows vanish from searches.
    """

    num_shards: int = 0
    sharding_specs: tuple[ShardingSpec, ...] = ()
    maintained_indexes: tuple[str, ...] = ()
    maintain_all_indexes: bool = False
    writer_config_defaults: Mapping[str, str] = field(default_factory=dict)
    compacted: Mapping[UUID, int] = field(default_factory=dict)
    index_catchup: Mapping[str, Mapping[UUID, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class BaseIndex:
    """One index segment of the base table; several may share a name.

    ``field_ids`` are the columns it is keyed on. ``fragments`` are those it was built over, which
    may include dropped ones; ``None`` when the manifest does not say. ``details_type`` names the kind,
    such as ``/lance.table.BTreeIndexDetails``.
    """

    name: str
    uuid: UUID
    field_ids: tuple[int, ...]
    dataset_version: int
    fragments: frozenset[int] | None
    details_type: str = ""


@dataclass(frozen=True)
class BaseManifest:
    """One version of the base table. ``indexes`` leaves out the MemWAL index.

    ``fields`` are the names of the columns, and of the fields within them, by field id.
    """

    version: int
    fragment_ids: frozenset[int]
    indexes: tuple[BaseIndex, ...]
    mem_wal: MemWalDetails | None
    fields: Mapping[int, str] = field(default_factory=dict, compare=False)
    #: The keys of the fields' metadata.
    metadata_keys: frozenset[str] = field(default=frozenset(), compare=False)
    #: Of the whole file. It distinguishes versions with the same number if the table was replaced by another.
    checksum: int = field(default=0, compare=False)
    #: Of the MemWAL index. Lance gives the index a new one whenever its details change.
    mem_wal_uuid: bytes = field(default=b"", compare=False)

    def covered_fragments(self, index_name: str) -> frozenset[int]:
        """The table's fragments that the segments of this index cover together."""
        segments = (index.fragments for index in self.indexes if index.name == index_name)
        return self.fragment_ids.intersection(frozenset().union(*(s for s in segments if s is not None)))


def read_base_manifest(manifest_file: bytes | memoryview, *, name: str = "") -> BaseManifest:
    """Parse a ``_versions/*.manifest`` file's content; ``name`` is for the error's text.

    Raises CorruptManifestError for any other file, and for one that was cut or altered in a place
    that matters here.
    """
    try:
        return _read(memoryview(manifest_file))
    except (DecodeError, ValueError) as error:
        raise CorruptManifestError(
            f"base table manifest {name or '(unnamed)'} is corrupt: {error}"
        ) from error


def highest_fields(manifest_file: bytes | memoryview) -> Mapping[str, int]:
    """The highest field id in each data file of a version, by path; leaves out files without field ids.

    ``manifest_file`` must be a manifest that :func:`read_base_manifest` has accepted.
    """
    data = memoryview(manifest_file)
    position, _, _, _ = _FOOTER.unpack(data[-_FOOTER.size :])
    found = TableFilesMessage.FromString(_section(data, position, "manifest"))
    listed = {file.path: max(file.fields, default=-1) for part in found.fragments for file in part.files}
    return {path: number for path, number in listed.items() if number >= 0}


def parse_manifest_version(name: str) -> int | None:
    """The table version in a manifest file's name; ``None`` for any other file.

    Lance counts down from the largest u64 in 20 digits, so that the newest version lists
    first; older tables have the plain number. Detached versions (``d….manifest``) are not
    part of the table's history and give ``None``.

    >>> parse_manifest_version("18446744073709551611.manifest"), parse_manifest_version("4.manifest")
    (4, 4)
    """
    match = _MANIFEST_NAME.fullmatch(name)
    if match is None:
        return None
    digits = match.group(1)
    version = _MAX_U64 - int(digits) if len(digits) == _INVERTED_DIGITS else int(digits)
    return version if version >= 1 else None


def newest_manifest_name(names: Iterable[str]) -> tuple[str, int] | None:
    """The file name and number of the newest version among the names in ``_versions``."""
    versions = ((version, name) for name in names if (version := parse_manifest_version(name)) is not None)
    newest = max(versions, default=None)
    return None if newest is None else (newest[1], newest[0])


def _read(data: memoryview) -> BaseManifest:
    if len(data) < _FOOTER.size:
        raise ValueError(f"it has {len(data)} bytes, too few for a footer")
    position, _, _, magic = _FOOTER.unpack(data[-_FOOTER.size :])
    if magic != _MAGIC:
        raise ValueError(f"it ends in {magic!r}, not {_MAGIC!r}")
    manifest = TableManifestMessage.FromString(_section(data, position, "manifest"))
    if manifest.version < 1:
        raise ValueError("its version number is missing")
    indexes: list[BaseIndex] = []
    mem_wal: MemWalDetails | None = None
    mem_wal_uuid = b""
    if manifest.HasField("index_section"):
        section = IndexSectionMessage.FromString(_section(data, manifest.index_section, "index"))
        for index in section.indices:
            if index.name == MEM_WAL_INDEX_NAME:
                mem_wal = _details(index)
                mem_wal_uuid = index.uuid.uuid
            else:
                indexes.append(_index(index))
    return BaseManifest(
        version=manifest.version,
        fragment_ids=frozenset(fragment.id for fragment in manifest.fragments),
        indexes=tuple(indexes),
        mem_wal=mem_wal,
        fields={column.id: column.name for column in manifest.fields},
        metadata_keys=frozenset(pair.key for column in manifest.fields for pair in column.metadata),
        checksum=crc32c.crc32c(data),
        mem_wal_uuid=mem_wal_uuid,
    )


def _section(data: memoryview, position: int, what: str) -> memoryview:
    """A length-prefixed message somewhere before the footer."""
    limit = len(data) - _FOOTER.size
    start = position + _LENGTH.size
    if start > limit:
        raise ValueError(f"its {what} section at {position} lies beyond its end at {limit}")
    (length,) = _LENGTH.unpack_from(data, position)
    if start + length > limit:
        raise ValueError(f"its {what} section at {position} is cut off: {length} bytes announced")
    return data[start : start + length]


def _index(index: Any) -> BaseIndex:
    fragments = None
    if index.HasField("fragment_bitmap"):
        fragments = _fragment_ids(index.fragment_bitmap, index.name)
    return BaseIndex(
        name=index.name,
        uuid=_uuid(index.uuid.uuid, f"index {index.name!r}"),
        # The last columns are covering columns, on which the index is not keyed.
        field_ids=tuple(index.fields)[: len(index.fields) - len(index.covering_fields)],
        dataset_version=index.dataset_version,
        fragments=fragments,
        details_type=index.index_details.type_url,
    )


def _fragment_ids(data: bytes, index_name: str) -> frozenset[int]:
    """The members of a 32-bit Roaring bitmap in its portable format."""
    try:
        fragments = BitMap.deserialize(data)
        # The library accepts a run whose length contradicts the header, but only valid bytes survive a round
        # trip.
        is_sound = fragments.serialize() == data
    except (ValueError, IndexError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"the fragments of index {index_name!r} are no Roaring bitmap of {len(data)} bytes")
    return frozenset(fragments)


def _details(index: Any) -> MemWalDetails:
    details_type = index.index_details.type_url
    if not details_type.endswith(_MEM_WAL_DETAILS_TYPE):
        raise ValueError(f"index {MEM_WAL_INDEX_NAME} has details of type {details_type!r}")
    details = MemWalIndexDetailsMessage.FromString(index.index_details.value)
    return MemWalDetails(
        num_shards=details.num_shards,
        sharding_specs=tuple(
            ShardingSpec(spec.spec_id, tuple(_sharding_field(f) for f in spec.fields))
            for spec in details.sharding_specs
        ),
        maintained_indexes=tuple(details.maintained_indexes),
        maintain_all_indexes=details.maintain_all_indexes,
        writer_config_defaults=_string_map(details.writer_config_defaults),
        compacted=_generations(details.compacted_sstables, "a compaction marker"),
        index_catchup={
            progress.index_name: _generations(
                progress.caught_up_generations, f"the catch-up of index {progress.index_name!r}"
            )
            for progress in details.index_catchup
        },
    )


def _sharding_field(message: Any) -> ShardingField:
    return ShardingField(
        field_id=message.field_id,
        source_ids=tuple(message.source_ids),
        transform=message.transform if message.HasField("transform") else None,
        expression=message.expression if message.HasField("expression") else None,
        result_type=message.result_type,
        parameters=_string_map(message.parameters),
    )


def _generations(entries: Iterable[Any], what: str) -> Mapping[UUID, int]:
    return {_uuid(entry.shard_id.uuid, what): entry.generation for entry in entries}


def _string_map(pairs: Iterable[Any]) -> Mapping[str, str]:
    return {pair.key: pair.value for pair in pairs}


def _uuid(data: bytes, what: str) -> UUID:
    if len(data) != 16:
        raise ValueError(f"{what} has a UUID of {len(data)} bytes")
    return UUID(bytes=data)
