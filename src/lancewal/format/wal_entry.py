"""One WAL entry: an Arrow IPC stream, written atomically.

The schema's metadata holds what Lance reads: the writer's epoch, the MemTable
generation, the sentinel mark. Our own metadata (a checksum over the whole entry, the write id,
tags) is in the metadata of the first record batch's *message*, which Lance ignores. Lance refuses
an entry with any further key in the schema's metadata. A sentinel has no batch, so our
metadata is in its schema, which Lance does not read any further once it has seen the mark.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import crc32c
import pyarrow as pa

from lancewal.errors import ColumnMismatchError, InvalidInputError, LanceWalError, WalCorruptError
from lancewal.format.align import align
from lancewal.format.schema import BLOB_TYPE, TableSchema
from lancewal.format.spans import aligned_batch

EPOCH_KEY = b"writer_epoch"
GENERATION_KEY = b"generation"
SENTINEL_KEY = b"fence_sentinel"

_OURS = b"lancewal"
_ID_KEY = b"lancewal:id"
_BASE_VERSION_KEY = b"lancewal:base_version"
_TAG_PREFIX = b"lancewal:tag:"
_CHECKSUM_MARK = b"lancewal:crc32c="
_BLANK = b"00000000"
_CONTINUATION = 0xFFFFFFFF
_FRAME = struct.Struct("<II")
_END_OF_STREAM = _FRAME.pack(_CONTINUATION, 0)
_MAX_NUMBER = (1 << 64) - 1

# Made once: without options pyarrow reads the environment for every stream.
_IPC_OPTIONS = pa.ipc.IpcWriteOptions()

_Corrupt = Callable[[str], WalCorruptError]


@dataclass(frozen=True, slots=True)
class WalEntry:
    """A decoded entry. ``batches`` is empty for a sentinel; ``generation`` is ``None`` if the entry has none.

    >>> import tempfile, lancewal
    >>> from lancewal.storage import ObjectStore
    >>> table = lancewal.create(tempfile.mkdtemp() + "/t", [{"id": 1}], key="id", unsharded=True)
    >>> shard = table.shard_for()
    >>> with table.writer() as writer:
    ...     _ = writer.put([{"id": 2}, {"id": 3}])
    >>> tailer = lancewal.WalTailer(ObjectStore.from_uri(table.uri), shard)
    >>> [(entry.position, entry.num_rows) for entry in tailer.entries() if entry.num_rows]
    [(1, 2)]
    """

    shard_id: UUID
    position: int
    writer_epoch: int
    generation: int | None
    batches: list[pa.RecordBatch]
    sentinel: bool = False
    write_id: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    #: The version of the base table that defines the rows' columns; ``None`` if the entry does not say.
    base_version: int | None = None

    @property
    def fence(self) -> bool:
        """Whether it is the sentinel of a claim, not a pointer, which has tags."""
        return self.sentinel and not self.tags

    @property
    def num_rows(self) -> int:
        """Rows of all batches, tombstones included."""
        return sum(batch.num_rows for batch in self.batches)

    def rows(self, schema: TableSchema) -> list[pa.RecordBatch]:
        """The batches as ``schema.stored``; raises :class:`WalCorruptError` if they cannot be converted."""
        try:
            return [align(batch, schema, self.base_version) for batch in self.batches]
        except ColumnMismatchError as error:
            raise WalCorruptError(self.shard_id, self.position, str(error)) from error


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """The metadata of an entry, which is stored before its rows."""

    writer_epoch: int
    generation: int | None
    sentinel: bool
    #: Whether it is the sentinel of a claim, not a pointer, which has tags.
    fence: bool


def entry_schema(
    schema: pa.Schema, epoch: int, generation: int | None, *, keep_metadata: bool = False
) -> pa.Schema:
    """``schema`` with the metadata of an entry; worth keeping between entries.

    ``keep_metadata`` is for a schema in the table's stored form, whose own metadata Lance
    expects in the entry too. Other metadata is left out, because Lance would refuse the entry.
    """
    metadata = dict(schema.metadata or {}) if keep_metadata else {}
    metadata[EPOCH_KEY] = str(epoch).encode()
    if generation is not None:
        if generation < 1:
            raise InvalidInputError(f"MemTable generations count from 1, got {generation}")
        metadata[GENERATION_KEY] = str(generation).encode()
    return schema.with_metadata(metadata)


def encode_entry(
    schema: pa.Schema,
    batches: Sequence[pa.RecordBatch],
    tags: Mapping[str, str] | None = None,
    base_version: int | None = None,
) -> memoryview:
    """Encode one entry. ``schema`` comes from :func:`entry_schema`.

    ``base_version`` is the version of the base table that defines the rows' columns.

    Every call embeds a fresh write id. With it a writer can distinguish its own bytes from
    another writer's after a lost reply.
    """
    if not batches:
        raise InvalidInputError("a WAL entry needs at least one record batch")
    own = _own_metadata(tags)
    if base_version is not None:
        own[_BASE_VERSION_KEY] = str(base_version).encode()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_IPC_OPTIONS) as writer:
        writer.write_batch(batches[0], custom_metadata=own)
        for batch in batches[1:]:
            writer.write_batch(batch)
    return _seal(sink.getvalue())


def encode_sentinel(epoch: int, tags: Mapping[str, str] | None = None) -> memoryview:
    """Encode a fence sentinel: no columns, no rows, only the epoch and our own metadata."""
    metadata = {EPOCH_KEY: str(epoch).encode(), SENTINEL_KEY: b"true", **_own_metadata(tags)}
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, pa.schema([], metadata=metadata)).close()
    return _seal(sink.getvalue())


def decode_entry(data: bytes | memoryview, shard_id: UUID, position: int) -> WalEntry:
    """Decode an entry of ours or of Lance's; raises :class:`WalCorruptError` on any damage found.

    The checksum protects our entries against every flipped or missing byte. Lance's entries have
    none: only damage that breaks decoding is found there.
    """

    def corrupt(found: str) -> WalCorruptError:
        return WalCorruptError(shard_id, position, found)

    view = memoryview(data).cast("B")
    checked = _verify_checksum(view, corrupt)
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(view))
        schema = reader.schema
        batches: list[pa.RecordBatch] = []
        own: dict[bytes, bytes] = {}
        for batch, custom in reader.iter_batches_with_custom_metadata():
            own |= _ours(custom or {})
            batches.append(batch)
        if not checked:
            # No checksum protects these bytes: names must be text, and wrong offsets could crash a
            # reader.
            _names(schema)
            for batch in batches:
                batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError) as error:
        raise corrupt(f"not a readable Arrow IPC stream ({error})") from error
    except TypeError as error:
        raise _unreadable_type(view, error, corrupt) from error
    header = _parse_header(schema.metadata or {}, corrupt)
    if header.sentinel:
        own = _ours(schema.metadata or {})
    elif not batches:
        raise corrupt("it has no record batch and is no fence sentinel")
    if own and not checked:
        # Our encoder always writes the mark with its own metadata, so the mark is damaged.
        raise corrupt("its checksum mark is damaged")
    if not checked and view[-len(_END_OF_STREAM) :] != _END_OF_STREAM:
        raise corrupt("it has no end-of-stream mark, so batches may be missing")
    try:
        write_id, tags = _parse_own(own)
    except UnicodeDecodeError as error:
        raise corrupt(f"unreadable metadata ({error})") from error
    return WalEntry(
        shard_id,
        position,
        header.writer_epoch,
        header.generation,
        [] if header.sentinel else [aligned_batch(batch.replace_schema_metadata(None)) for batch in batches],
        header.sentinel,
        write_id,
        tags,
        len(view),
        _decimal(own[_BASE_VERSION_KEY], "base_version", corrupt) if _BASE_VERSION_KEY in own else None,
    )


def decode_header(data: bytes | memoryview, shard_id: UUID, position: int) -> EntryHeader:
    """Decode only epoch, generation and sentinel mark; ``data`` may be just the entry's first bytes."""

    def corrupt(found: str) -> WalCorruptError:
        return WalCorruptError(shard_id, position, found)

    try:
        schema = pa.ipc.read_schema(pa.py_buffer(memoryview(data).cast("B")))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise corrupt(f"unreadable schema ({error})") from error
    except TypeError as error:
        raise _unreadable_type(data, error, corrupt) from error
    return _parse_header(schema.metadata or {}, corrupt)


def _unreadable_type(data: bytes | memoryview, error: TypeError, corrupt: _Corrupt) -> LanceWalError:
    """The error for a type that cannot be read, such as the type in which Lance's own writer logs blobs."""
    if BLOB_TYPE.encode() not in bytes(data):
        return corrupt(f"unreadable schema ({error})")
    return InvalidInputError(
        "the log holds values of a blob column, which lancewal cannot read yet; flush the shard with the "
        "writer that wrote them"
    )


def _names(fields: Iterable[pa.Field]) -> list[str]:
    """All field names, nested ones included; raises ``UnicodeDecodeError`` for a name that is not text."""
    names = []
    for field_ in fields:
        children = (field_.type.field(index) for index in range(field_.type.num_fields))
        names += [field_.name, *_names(children)]
    return names


def _own_metadata(tags: Mapping[str, str] | None) -> dict[bytes, bytes]:
    own = {_OURS: _CHECKSUM_MARK + _BLANK, _ID_KEY: secrets.token_hex(16).encode()}
    for name, value in (tags or {}).items():
        tag = (_TAG_PREFIX + name.encode(), value.encode())
        if any(_CHECKSUM_MARK in text for text in tag):
            raise InvalidInputError(
                f"tag {name!r} holds the text {_CHECKSUM_MARK.decode()!r}, which is reserved"
            )
        own[tag[0]] = tag[1]
    return own


def _ours(metadata: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    return {key: value for key, value in metadata.items() if key.startswith(_OURS)}


def _parse_own(own: Mapping[bytes, bytes]) -> tuple[str | None, dict[str, str]]:
    write_id = own.get(_ID_KEY)
    tags = {
        key.removeprefix(_TAG_PREFIX).decode(): value.decode()
        for key, value in own.items()
        if key.startswith(_TAG_PREFIX)
    }
    return (write_id.decode() if write_id else None), tags


def _parse_header(metadata: Mapping[bytes, bytes], corrupt: _Corrupt) -> EntryHeader:
    epoch = metadata.get(EPOCH_KEY)
    if epoch is None:
        raise corrupt("its schema metadata has no writer_epoch")
    generation = metadata.get(GENERATION_KEY)
    sentinel = metadata.get(SENTINEL_KEY) == b"true"
    return EntryHeader(
        _decimal(epoch, "writer_epoch", corrupt),
        None if generation is None else _decimal(generation, "generation", corrupt),
        sentinel,
        sentinel and not any(key.startswith(_TAG_PREFIX) for key in metadata),
    )


def _decimal(text: bytes, what: str, corrupt: _Corrupt) -> int:
    if not text.isdigit() or len(text) > 20 or int(text) > _MAX_NUMBER:
        raise corrupt(f"{what} is {text[:40]!r}, not a decimal number of 64 bits")
    return int(text)


def _seal(buffer: pa.Buffer) -> memoryview:
    """Fill in the checksum, which is computed over the entry with ``_BLANK`` in the place of its digits."""
    view = memoryview(buffer).cast("B")
    if view.readonly:
        view = memoryview(bytearray(view))
    start = _checksum_start(view)
    if start is None:
        raise AssertionError("an encoded entry carries its checksum mark")
    view[start : start + len(_BLANK)] = b"%08x" % crc32c.crc32c(view)
    return view


def _verify_checksum(view: memoryview, corrupt: _Corrupt) -> bool:
    start = _checksum_start(view)
    if start is None:
        return False
    stated = bytes(view[start : start + len(_BLANK)])
    actual = crc32c.crc32c(view[:start])
    actual = crc32c.crc32c(_BLANK, actual)
    actual = crc32c.crc32c(view[start + len(_BLANK) :], actual)
    if stated != b"%08x" % actual:
        raise corrupt(f"checksum mismatch: it says {stated!r}, its bytes give {actual:08x}")
    return True


def _checksum_start(view: memoryview) -> int | None:
    """The position of the checksum's digits; only message headers are searched, never rows."""
    header = _message_header(view, 0)
    if header is None:
        return None
    # A schema message has no body: the next message follows its header. Without a next message this
    # is a sentinel, whose mark is in the schema.
    following = _message_header(view, header.stop)
    while following is not None:
        header = following
        if (found := _find_mark(view, header)) is not None:
            return found
        following = _after_dictionary(view, header)
    return _find_mark(view, header)


def _message_header(view: memoryview, offset: int) -> range | None:
    if offset + _FRAME.size > len(view):
        return None
    mark, length = _FRAME.unpack_from(view, offset)
    if mark != _CONTINUATION or length == 0:
        return None
    return range(offset + _FRAME.size, offset + _FRAME.size + length)


def _after_dictionary(view: memoryview, header: range) -> range | None:
    """The header after a dictionary's message; dictionaries come between the schema and the first batch."""
    try:
        message = pa.ipc.read_message(pa.py_buffer(view[header.start - _FRAME.size :]))
    except (pa.ArrowException, OSError, ValueError, EOFError):
        return None
    if message.type != "dictionary":
        return None
    return _message_header(view, header.stop + (message.body.size if message.body is not None else 0))


def _find_mark(view: memoryview, header: range) -> int | None:
    found = bytes(view[header.start : header.stop]).find(_CHECKSUM_MARK)
    return None if found < 0 else header.start + found + len(_CHECKSUM_MARK)
