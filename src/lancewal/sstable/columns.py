"""An SSTable's columns as Lance writes them, with the field ids that they have in the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lance
import pyarrow as pa
from lance.fragment import DataFile, FragmentMetadata, write_fragments
from lance.lance import LanceSchema

from lancewal.format import FieldMessage, TableSchema, field_id, without_field_ids

_ROOT = -1

# Keep all rows in one fragment: row offsets equal row addresses only in the first fragment. (Far larger
# limits make Lance's writer twice as slow.)
_ROWS_PER_FILE = 1 << 31


@dataclass(frozen=True)
class NumberedSchema:
    """An SSTable's columns in the form that Lance accepts, and the field ids that they must get.

    ``ids`` maps the id that Lance would give a field to its id in the base table. The tombstone
    column gets the next free id, as in Lance.
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
        """Whether Lance would assign these ids by itself."""
        return all(number == base_id for number, base_id in self.ids.items())

    def lance_schema(self) -> LanceSchema:
        """The schema with its ids; pylance's only public way to set them is its pickle format."""
        reduced: Any = LanceSchema.from_pyarrow(self.arrow).__reduce__()
        restore, (metadata, *fields) = reduced
        renumbered: LanceSchema = restore(metadata, *map(self._renumbered, fields))
        return renumbered

    def _renumbered(self, raw: bytes) -> bytes:
        message = FieldMessage.FromString(raw)
        message.id = self.ids[message.id]
        if message.parent_id != _ROOT:
            message.parent_id = self.ids[message.parent_id]
        return bytes(message.SerializeToString())

    def renumber(self, fragment: FragmentMetadata) -> FragmentMetadata:
        """``fragment``, which Lance wrote with its own ids, with the ids of the table."""
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
) -> lance.LanceDataset:
    """Write a new dataset in the local directory ``uri``, with ``rows`` in one fragment."""
    reader = pa.RecordBatchReader.from_batches(schema.arrow, rows)
    how: dict[str, Any] = {
        "mode": "create",
        "data_storage_version": storage_version,
        "max_rows_per_file": _ROWS_PER_FILE,
    }
    if schema.is_dense:
        return lance.write_dataset(reader, uri, **how)
    (fragment,) = write_fragments(reader, uri, **how)
    # A commit that creates a dataset renumbers its fields; a commit that adds fields keeps their ids. So
    # create the dataset without fields and add them afterwards.
    empty = lance.write_dataset(pa.table({}), uri, **how)
    return lance.LanceDataset.commit(
        empty,
        lance.LanceOperation.Merge([schema.renumber(fragment)], schema.lance_schema()),
        read_version=empty.version,
    )


def _numbered(lance_field: Any, field: pa.Field) -> Iterator[tuple[int, int]]:
    """Lance's id and the annotated id (-1 if there is none) of a field and its children, in order."""
    yield lance_field.id(), field_id(field)
    for i, child in enumerate(lance_field.children()):
        yield from _numbered(child, field.type.field(i))
