"""Lance datasets whose columns have given field ids.

Lance numbers the fields of a new dataset from 0, in order. A base table whose columns
were dropped or added over time has other ids, and readers match columns by id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lance
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from lance.fragment import DataFile, FragmentMetadata, write_fragments
from lance.lance import LanceSchema

from lancewal.format.schema import TableSchema, field_id, without_field_ids

_ROOT = -1


def _field_message() -> Any:
    """Lance's protobuf message of a field; all that is not named here passes through it unchanged."""
    file = descriptor_pb2.FileDescriptorProto(name="lance_field", package="lancewal", syntax="proto3")
    message = file.message_type.add(name="Field")
    for name, number in (("id", 3), ("parent_id", 4)):
        message.field.add(
            name=name,
            number=number,
            type=descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
            label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("lancewal.Field"))


_FieldMessage: Any = _field_message()
# One fragment, whatever it takes: row offsets are row addresses only in the first one.
# (Far larger limits make Lance's writer twice as slow.)
_ROWS_PER_FILE = 1 << 31


@dataclass(frozen=True)
class NumberedSchema:
    """An SSTable's columns as Lance takes them, and the field ids they must get.

    ``ids`` maps the number that Lance would give a field to the one it has in the base
    table. The tombstone column gets the next free one, as it does in Lance.
    """

    arrow: pa.Schema
    ids: Mapping[int, int]

    @classmethod
    def of(cls, schema: TableSchema) -> NumberedSchema:
        arrow = pa.schema([without_field_ids(field) for field in schema.stored])
        columns = LanceSchema.from_pyarrow(arrow).fields()
        ids: dict[int, int] = {}
        for lance_field, field in zip(columns[:-1], schema.columns, strict=True):
            for number, base_id in _numbered(lance_field, field):
                ids[number] = base_id if base_id >= 0 else max(ids.values(), default=_ROOT) + 1
        ids[columns[-1].id()] = max(ids.values(), default=_ROOT) + 1
        return cls(arrow, ids)

    @property
    def is_dense(self) -> bool:
        """Whether these are the ids that Lance gives by itself."""
        return all(number == base_id for number, base_id in self.ids.items())

    def lance_schema(self) -> LanceSchema:
        """The schema with its ids; pylance has no public way to say them but its pickle format."""
        reduced: Any = LanceSchema.from_pyarrow(self.arrow).__reduce__()
        restore, (metadata, *fields) = reduced
        renumbered: LanceSchema = restore(metadata, *map(self._renumbered, fields))
        return renumbered

    def _renumbered(self, raw: bytes) -> bytes:
        message = _FieldMessage.FromString(raw)
        message.id = self.ids[message.id]
        if message.parent_id != _ROOT:
            message.parent_id = self.ids[message.parent_id]
        return bytes(message.SerializeToString())

    def renumber(self, fragment: FragmentMetadata) -> FragmentMetadata:
        """``fragment``, written by Lance with its own numbers, with ours."""
        return replace(fragment, files=[self._renumbered_file(file) for file in fragment.files])

    def _renumbered_file(self, file: DataFile) -> DataFile:
        return DataFile(
            path=str(file.path),
            fields=[self.ids.get(number, number) for number in file.fields],
            column_indices=file.column_indices,
            file_major_version=file.file_major_version,
            file_minor_version=file.file_minor_version,
            file_size_bytes=file.file_size_bytes,
        )


def write_numbered(
    rows: Iterator[pa.RecordBatch],
    uri: str,
    schema: NumberedSchema,
    storage_version: str,
    storage_options: dict[str, str],
) -> lance.LanceDataset:
    """A new dataset at ``uri`` with ``rows`` in one fragment."""
    reader = pa.RecordBatchReader.from_batches(schema.arrow, rows)
    how: dict[str, Any] = {
        "mode": "create",
        "data_storage_version": storage_version,
        "storage_options": storage_options,
        "max_rows_per_file": _ROWS_PER_FILE,
    }
    if schema.is_dense:
        return lance.write_dataset(reader, uri, **how)
    (fragment,) = write_fragments(reader, uri, **how)
    # A commit that creates a dataset renumbers its fields, one that adds fields keeps
    # their ids: so create it without any.
    empty = lance.write_dataset(pa.table({}), uri, **how)
    return lance.LanceDataset.commit(
        empty,
        lance.LanceOperation.Merge([schema.renumber(fragment)], schema.lance_schema()),
        read_version=empty.version,
        storage_options=storage_options,
    )


def _numbered(lance_field: Any, field: pa.Field) -> Iterator[tuple[int, int]]:
    """Lance's number and the annotated id (-1 without) of a field and its children, in order."""
    yield lance_field.id(), field_id(field)
    for i, child in enumerate(lance_field.children()):
        yield from _numbered(child, field.type.field(i))
