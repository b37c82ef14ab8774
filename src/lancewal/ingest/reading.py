"""Reads the rows of a file of any known format as Arrow batches, never the whole file at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import lance
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.ipc as paipc
import pyarrow.json as pajson
import pyarrow.parquet as pq

from lancewal.base import lance_errors
from lancewal.errors import InvalidInputError, StorageError
from lancewal.ingest.files import COMPRESSIONS, Format, SourceFile, first_line
from lancewal.storage import scrub_error

_BATCH_ROWS = 16_384
_TEXT_BLOCK_BYTES = 4 << 20
_ARROW_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class Opened:
    """An open file; ``fraction`` returns about how much of it was read, from 0 to 1."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    fraction: Callable[[], float]


def open_file(file: SourceFile, table: pa.Schema | None = None, *, drop_unknown: bool = False) -> Opened:
    """Open a file to read it once.

    ``table`` has the table's columns, and text in the file is read as their types. ``drop_unknown``
    leaves out columns that the table does not have.
    """
    try:
        opened = _OPENERS[file.format](file, table)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    keep = None
    if drop_unknown and table is not None:
        keep = [name for name in opened.schema.names if name in table.names]
        opened = Opened(
            pa.schema([opened.schema.field(name) for name in keep]), opened.batches, opened.fraction
        )
    return Opened(opened.schema, _guarded(file, opened.batches, keep), opened.fraction)


def _guarded(
    file: SourceFile, batches: Iterator[pa.RecordBatch], keep: list[str] | None
) -> Iterator[pa.RecordBatch]:
    try:
        for batch in batches:
            if batch.num_rows:
                yield batch if keep is None else batch.select(keep)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: SourceFile, error: BaseException) -> InvalidInputError | StorageError:
    reason = first_line(scrub_error(error))
    if isinstance(error, OSError) and not isinstance(error, pa.ArrowException):
        return StorageError(f"cannot read {file}: {reason}")
    return InvalidInputError(f"cannot read {file} as {file.format}: {reason}")


def _parquet(file: SourceFile, table: pa.Schema | None) -> Opened:
    parquet = pq.ParquetFile(file.filesystem.open_input_file(file.path))
    batches = parquet.iter_batches(batch_size=_BATCH_ROWS)
    return _counted(parquet.schema_arrow, batches, parquet.metadata.num_rows)


def _separated(file: SourceFile, table: pa.Schema | None) -> Opened:
    raw = _Stream(file)
    types = {} if table is None else {field.name: field.type for field in table}
    nested = sorted(name for name, type_ in types.items() if pa.types.is_nested(type_))
    options = pacsv.ConvertOptions(
        column_types={name: _read_as(type_) for name, type_ in types.items() if name not in nested},
        # An empty field is null. A quoted empty field, "", is an empty text.
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    reader = pacsv.open_csv(
        raw.stream,
        read_options=pacsv.ReadOptions(block_size=_TEXT_BLOCK_BYTES),
        parse_options=pacsv.ParseOptions(delimiter="\t" if file.format is Format.TSV else ","),
        convert_options=options,
    )
    impossible = [name for name in reader.schema.names if name in nested]
    if impossible:
        raise ValueError(
            f"it cannot hold lists and structs (column {', '.join(impossible)}); use JSON lines or Parquet"
        )
    return Opened(reader.schema, iter(reader), raw.fraction)


def _json_lines(file: SourceFile, table: pa.Schema | None) -> Opened:
    raw = _Stream(file)
    if file.size == 0:
        return Opened(pa.schema([]), iter(()), raw.fraction)
    explicit = None
    if table is not None:
        explicit = pa.schema([pa.field(field.name, _json_type(field.type)) for field in table])
    reader = pajson.open_json(
        raw.stream,
        read_options=pajson.ReadOptions(block_size=_TEXT_BLOCK_BYTES),
        parse_options=pajson.ParseOptions(explicit_schema=explicit, unexpected_field_behavior="infer"),
    )
    return Opened(reader.schema, iter(reader), raw.fraction)


def _json_type(type_: pa.DataType) -> pa.DataType:
    """A type that the JSON reader knows and that can be cast to ``type_``."""
    if pa.types.is_fixed_size_list(type_) or pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.list_(_json_type(type_.value_type))
    if pa.types.is_struct(type_):
        fields = [type_.field(place) for place in range(type_.num_fields)]
        return pa.struct([pa.field(field.name, _json_type(field.type)) for field in fields])
    return _read_as(type_)


def _read_as(type_: pa.DataType) -> pa.DataType:
    """A wider type in which numbers that are too large for a float do not become infinite."""
    return pa.float64() if pa.types.is_floating(type_) else type_


def _arrow(file: SourceFile, table: pa.Schema | None) -> Opened:
    source = file.filesystem.open_input_file(file.path)
    magic = source.read(len(_ARROW_MAGIC))
    source.seek(0)
    if magic != _ARROW_MAGIC:
        stream = paipc.open_stream(source)
        return Opened(stream.schema, iter(stream), lambda: source.tell() / max(file.size, 1))
    reader = paipc.open_file(source)
    count = reader.num_record_batches
    return _counted(reader.schema, map(reader.get_batch, range(count)), count, weight=lambda batch: 1)


def _lance(file: SourceFile, table: pa.Schema | None) -> Opened:
    action = f"read {file.path}"
    with lance_errors(action):
        dataset = lance.dataset(file.path, version=file.modified)
        total = dataset.count_rows()

    def batches() -> Iterator[pa.RecordBatch]:
        # In order, because a second read must find the same rows at the same positions.
        with lance_errors(action):
            yield from dataset.to_batches(batch_size=_BATCH_ROWS, scan_in_order=True)

    return _counted(dataset.schema, batches(), total)


def _counted(
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    total: int,
    weight: Callable[[pa.RecordBatch], int] = lambda batch: int(batch.num_rows),
) -> Opened:
    """An open file whose batches have weights that add up to ``total``; these give the fraction."""
    read = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal read
        for batch in batches:
            read += weight(batch)
            yield batch

    return Opened(schema, counted(), lambda: read / total if total else 1.0)


class _Stream:
    """A file as a stream that knows how far it was read; unpacked if its name says that it is compressed."""

    def __init__(self, file: SourceFile) -> None:
        self._size = max(file.size, 1)
        self._raw = file.filesystem.open_input_file(file.path)
        packed = COMPRESSIONS.get(os.path.splitext(file.name.lower())[1])
        self.stream: Any = self._raw if packed is None else pa.CompressedInputStream(self._raw, packed)

    def fraction(self) -> float:
        return min(1.0, self._raw.tell() / self._size) if not self._raw.closed else 1.0


_OPENERS: dict[Format, Callable[[SourceFile, pa.Schema | None], Opened]] = {
    Format.PARQUET: _parquet,
    Format.CSV: _separated,
    Format.TSV: _separated,
    Format.JSON_LINES: _json_lines,
    Format.ARROW: _arrow,
    Format.LANCE: _lance,
}
