"""The protobuf messages of Lance's table format that the write path reads or writes.

The messages are described here rather than generated, so that no build step and no
copy of Lance's own files is needed. Only the fields that lancewal uses are listed;
other fields survive when a message is read and written again, and :func:`unknown_fields` gives
their bytes. The messages have a descriptor pool of their own, so they cannot collide with another
library's descriptors.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory  # type: ignore[import-untyped]

_PACKAGE = "lancewal.format"

# Two declarations differ from Lance's, with the same bytes on the wire: a map is declared as
# repeated key/value pairs, and an enum as int32, which keeps values that this version does not know.
_MESSAGES: dict[str, tuple[str, ...]] = {
    "Uuid": ("bytes uuid = 1",),
    "StringPair": ("string key = 1", "string value = 2"),
    "Any": ("string type_url = 1", "bytes value = 2"),
    # A shard's manifest.
    "SsTable": (
        "uint64 generation = 1",
        "string path = 2",
        "optional uint64 in_memory_bytes = 3",
        "optional uint64 physical_rows = 4",
        "optional uint64 primary_key_bytes = 5",
        # Ours, see SsTableEntry.
        "string notes = 1000",
    ),
    "ShardFieldEntry": ("string field_id = 1", "bytes value = 2"),
    "ShardManifest": (
        "uint64 version = 1",
        "uint64 writer_epoch = 2",
        "uint64 replay_after_wal_entry_position = 3",
        "uint64 wal_entry_position_last_seen = 4",
        "uint64 current_generation = 6",
        "repeated SsTable sstables = 8",
        "uint32 shard_spec_id = 10",
        "optional Uuid shard_id = 11",
        "repeated ShardFieldEntry shard_field_entries = 14",
        "int32 status = 15",
        # Ours: Lance skips them when it reads and drops them when it rewrites.
        "bytes write_id = 1000",
        "bytes checksum = 1001",
    ),
    # The MemWAL index of the base table.
    "CompactedSsTable": ("optional Uuid shard_id = 1", "uint64 generation = 2"),
    "IndexCatchupProgress": ("string index_name = 1", "repeated CompactedSsTable caught_up_generations = 2"),
    "ShardingField": (
        "string field_id = 1",
        "repeated int32 source_ids = 2",
        "optional string transform = 3",
        "optional string expression = 4",
        "string result_type = 5",
        "repeated StringPair parameters = 6",
    ),
    "ShardingSpec": ("uint32 spec_id = 1", "repeated ShardingField fields = 2"),
    "MemWalIndexDetails": (
        "uint32 num_shards = 2",
        "repeated ShardingSpec sharding_specs = 7",
        "repeated string maintained_indexes = 8",
        "repeated CompactedSsTable compacted_sstables = 9",
        "repeated IndexCatchupProgress index_catchup = 10",
        "repeated StringPair writer_config_defaults = 11",
        "optional bool maintain_all_indexes = 12",
    ),
    # The base table's manifest.
    "IndexMetadata": (
        "optional Uuid uuid = 1",
        "repeated int32 fields = 2",
        "string name = 3",
        "uint64 dataset_version = 4",
        "optional bytes fragment_bitmap = 5",
        "optional Any index_details = 6",
        "repeated int32 covering_fields = 11",
    ),
    "IndexSection": ("repeated IndexMetadata indices = 1",),
    "DataFragment": ("uint64 id = 1",),
    # The same message with its files. They are separate because there may be many, and few callers need them.
    "DataFile": ("string path = 1", "repeated int32 fields = 2"),
    "FragmentFiles": ("repeated DataFile files = 2",),
    "TableFiles": ("repeated FragmentFiles fragments = 2",),
    "BytesPair": ("string key = 1", "bytes value = 2"),
    "Field": (
        "string name = 2",
        "int32 id = 3",
        "int32 parent_id = 4",
        "repeated BytesPair metadata = 10",
    ),
    # The same message, for declaring a key.
    "KeyField": (
        "string name = 2",
        "int32 parent_id = 4",
        "bool nullable = 6",
        "repeated BytesPair metadata = 10",
        "bool unenforced_primary_key = 12",
        "uint32 unenforced_primary_key_position = 13",
    ),
    "TableManifest": (
        "repeated Field fields = 1",
        "repeated DataFragment fragments = 2",
        "uint64 version = 3",
        "optional uint64 index_section = 6",
        "uint32 max_fragment_id = 11",
    ),
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "int32": _Field.TYPE_INT32,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
}
_FIELD = re.compile(r"(?:(repeated|optional) )?(\w+) (\w+) = (\d+)")

#: Raised by ``FromString`` for bytes that are not such a message.
DecodeError = message.DecodeError


def unknown_fields(message: Any) -> bytes:
    """The bytes of the fields that are not listed here, in their order; later versions of Lance add some."""
    rest = type(message)()
    rest.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        rest.ClearField(field.name)
    return bytes(rest.SerializeToString())


def _add_field(target: Any, text: str) -> None:
    match = _FIELD.fullmatch(text)
    assert match is not None, text
    label, type_name, name, number = match.groups()
    field = target.field.add(name=name, number=int(number))
    field.label = _Field.LABEL_REPEATED if label == "repeated" else _Field.LABEL_OPTIONAL
    if type_name in _SCALARS:
        field.type = _SCALARS[type_name]
        if label == "optional":
            # proto3 distinguishes an absent scalar from a zero with a one-field oneof.
            field.proto3_optional = True
            field.oneof_index = len(target.oneof_decl)
            target.oneof_decl.add(name=f"_{name}")
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{type_name}"


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="lancewal/format.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        target = file.message_type.add(name=name)
        for text in fields:
            _add_field(target, text)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _build()

FieldMessage: Any = _CLASSES["Field"]
KeyFieldMessage: Any = _CLASSES["KeyField"]
ShardManifestMessage: Any = _CLASSES["ShardManifest"]
MemWalIndexDetailsMessage: Any = _CLASSES["MemWalIndexDetails"]
IndexSectionMessage: Any = _CLASSES["IndexSection"]
TableManifestMessage: Any = _CLASSES["TableManifest"]
TableFilesMessage: Any = _CLASSES["TableFiles"]
