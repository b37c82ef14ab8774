"""Every path and file name below a Lance table's ``_mem_wal`` directory.

All paths are relative to the table's root, use ``/`` and never start with one.
Nothing here touches storage.
"""

from __future__ import annotations

import re
import secrets
from uuid import UUID

from lancewal.errors import InvalidInputError

MEM_WAL_DIR = "_mem_wal"
#: Lance's own: a manifest for each version of the base table.
VERSIONS_DIR = "_versions"
#: Our own records beside the shards (Lance ignores the directory).
OWN_DIR = f"{MEM_WAL_DIR}/_lancewal"
#: What garbage collection records there: readings of the storage's clock, and what it saw. It describes
#: one table at one place, so backups leave it out.
CLOCK_DIR = f"{OWN_DIR}/clock"
LOOKS_DIR = f"{OWN_DIR}/looks"
#: The records of the processes that write, one directory each (``lancewal.service``). They are beside the
#: clock readings, which give the ages of these records, so that one listing shows both.
OWNERS_DIR = f"{CLOCK_DIR}/owners"
#: A process that needs the storage's time writes this object and reads its time stamp.
CLOCK_NOW = f"{CLOCK_DIR}/now"
#: Which process does, or last did, each part of a table's upkeep (``lancewal.service``). It is beside the
#: clock readings for the same reason.
UPKEEP_DIR = f"{CLOCK_DIR}/upkeep"
#: The table's upkeep settings.
UPKEEP_SETTINGS = f"{OWN_DIR}/upkeep.json"
#: The table version that added each column; a process that knows more overwrites it.
COLUMN_HISTORY = f"{OWN_DIR}/columns.json"

#: Named snapshots of the table (``lancewal.maintenance.checkpoints``). They refer to files of this copy of
#: the table, so backups leave them out.
CHECKPOINTS_DIR = f"{OWN_DIR}/checkpoints"

FIRST_WAL_POSITION = 1
FIRST_MANIFEST_VERSION = 1
FIRST_GENERATION = 1

WAL_SUFFIX = ".arrow"
MANIFEST_SUFFIX = ".binpb"
VERSION_HINT_NAME = "version_hint.json"

BLOOM_FILTER_NAME = "bloom_filter.bin"
#: Ours: Lance ignores this file.
SSTABLE_NOTES_NAME = "_lancewal.json"
PK_INDEX_DIR = "_pk_index"
PK_PAGE_DATA_NAME = f"{PK_INDEX_DIR}/page_data.lance"
PK_PAGE_LOOKUP_NAME = f"{PK_INDEX_DIR}/page_lookup.lance"

OWNER_RECORD_NAME = "record.json"

_OWNER = re.compile(r"[0-9a-f]{16}")
_BITS = re.compile(r"[01]{64}")
_SHARD = re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}")
_SSTABLE = re.compile(r"([0-9a-f]{8})_gen_([1-9][0-9]*)")
_MAX_NUMBER = (1 << 64) - 1


def reversed_bits(number: int) -> str:
    """The 64-bit binary text of ``number``, least significant bit first.

    Consecutive numbers differ in their first characters, which spreads them over
    an object store's key partitions.

    >>> reversed_bits(5)[:6]
    '101000'
    """
    if not 0 <= number <= _MAX_NUMBER:
        raise InvalidInputError(f"{number} does not fit 64 unsigned bits")
    return format(number, "064b")[::-1]


def parse_reversed_bits(text: str) -> int | None:
    """The inverse of :func:`reversed_bits`; ``None`` for any other text."""
    return int(text[::-1], 2) if _BITS.fullmatch(text) else None


def shard_dir(shard_id: UUID) -> str:
    return f"{MEM_WAL_DIR}/{shard_id}"


def parse_shard_dir(name: str) -> UUID | None:
    """The shard id of a directory name below ``_mem_wal``; ``None`` for a foreign directory."""
    return UUID(name) if _SHARD.fullmatch(name) else None


def parse_shard_id(value: UUID | str) -> UUID:
    """A shard id from what a caller passed; refuses anything that is not a UUID."""
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise InvalidInputError(
            f"shard id {value!r} is not a UUID; pass a uuid.UUID or its text form"
        ) from None


def wal_dir(shard_id: UUID) -> str:
    return f"{shard_dir(shard_id)}/wal"


def wal_entry(shard_id: UUID, position: int) -> str:
    return f"{wal_dir(shard_id)}/{reversed_bits(position)}{WAL_SUFFIX}"


def parse_wal_name(name: str) -> int | None:
    """The position in a WAL entry's file name; ``None`` for staging and foreign files."""
    return parse_reversed_bits(name.removesuffix(WAL_SUFFIX)) if name.endswith(WAL_SUFFIX) else None


def manifest_dir(shard_id: UUID) -> str:
    return f"{shard_dir(shard_id)}/manifest"


def manifest_file(shard_id: UUID, version: int) -> str:
    return f"{manifest_dir(shard_id)}/{reversed_bits(version)}{MANIFEST_SUFFIX}"


def parse_manifest_name(name: str) -> int | None:
    """The version in a shard manifest's file name; ``None`` for anything else."""
    if not name.endswith(MANIFEST_SUFFIX):
        return None
    return parse_reversed_bits(name.removesuffix(MANIFEST_SUFFIX))


def version_hint(shard_id: UUID) -> str:
    return f"{manifest_dir(shard_id)}/{VERSION_HINT_NAME}"


def fresh_sstable_name(generation: int) -> str:
    """A new directory name for one flush attempt; a retry gets another name."""
    return f"{secrets.token_hex(4)}_gen_{generation}"


def parse_sstable_name(name: str) -> int | None:
    """The generation in an SSTable directory's name; ``None`` for anything else."""
    match = _SSTABLE.fullmatch(name)
    return int(match.group(2)) if match else None


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is the name of a directory entry and cannot lead out of the directory.

    >>> is_plain_name("0a1b2c3d_gen_1"), is_plain_name("../0a1b2c3d_gen_1"), is_plain_name("")
    (True, False, False)
    """
    return name not in ("", ".", "..") and not set("/\\") & set(name) and name.isprintable()


def sstable_dir(shard_id: UUID, name: str) -> str:
    """The directory of an SSTable; refuses a name that leads out of the shard.

    The name comes from a manifest, which another program may have written.
    """
    if not is_plain_name(name):
        raise InvalidInputError(
            f"{name!r} cannot be an SSTable of shard {shard_id}: it must be the name of a directory in it"
        )
    return f"{shard_dir(shard_id)}/{name}"


def owner_dir(owner_id: str) -> str:
    """The directory with a process's own record and the requests of others; refuses an invalid owner id."""
    if not _OWNER.fullmatch(owner_id):
        raise InvalidInputError(f"{owner_id!r} is no id of an owner")
    return f"{OWNERS_DIR}/{owner_id}"


def owner_record(owner_id: str) -> str:
    return f"{owner_dir(owner_id)}/{OWNER_RECORD_NAME}"


def child_uri(table_uri: str, path: str) -> str:
    """The full URI of a path below the table, for libraries that take URIs."""
    return f"{table_uri.rstrip('/')}/{path}"
