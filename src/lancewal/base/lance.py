"""Code that depends on pylance's internals: conversion of its errors, and fields that it does not expose."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lance
import pyarrow as pa
from lance.lance import LanceSchema

from lancewal.errors import InvalidInputError, LanceWalError, OutcomeUnknownError, StorageError
from lancewal.format import PRIMARY_KEY_KEY, FieldMessage, KeyFieldMessage, TableManifestMessage
from lancewal.storage import is_panic, path_text, scrub_error

# For a damaged file pylance raises many classes, not only storage errors.
_FAILURES = (
    OSError,
    ValueError,
    RuntimeError,
    TypeError,
    NotImplementedError,
    LookupError,
    ArithmeticError,
    MemoryError,
    pa.ArrowException,
)


#: Not permitted, permission denied, no space, read-only, quota: the write did not happen.
_REFUSED = re.compile(r"os error (1|13|28|30|122)\b")
_UNKNOWN = "cannot {}: {}; it may have taken effect nevertheless"


@contextmanager
def lance_errors(action: str, *, commits: bool = False, sql: str | None = None) -> Iterator[None]:
    """Turn pylance's errors into StorageError; ``action`` says what could not be done.

    If Lance refuses the filter ``sql``, when planning or for a row's value, this raises an InvalidInputError.

    Every call of pylance that may fail is made within this context. If the call ``commits``, a storage
    failure or a panic may have come after the commit, so that only the reply was lost. This raises an
    OutcomeUnknownError, unless the system refused the write.

    A panic in Lance's native code, which is not an ``Exception``, is converted too. Credentials in
    pylance's messages are removed from the error and its causes.
    """
    try:
        yield
    except LanceWalError as error:
        scrub_error(error)
        raise
    except _FAILURES as error:
        scrub_error(error)
        if sql is not None and _is_about_filter(error):
            raise InvalidInputError(f"the filter {sql!r} is refused: {error}") from error
        if commits and isinstance(error, OSError) and not _REFUSED.search(str(error)):
            raise OutcomeUnknownError(_UNKNOWN.format(action, error)) from error
        raise StorageError(f"cannot {action}: {error}") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        scrub_error(error)
        text = f"Lance failed internally: {error}"
        if commits:
            raise OutcomeUnknownError(_UNKNOWN.format(action, text)) from error
        raise StorageError(f"cannot {action}: {text}") from error


def _is_about_filter(error: Exception) -> bool:
    about_rows = isinstance(error, pa.ArrowException)
    return isinstance(error, ValueError) and (not about_rows or "filter expression" in str(error))


def operation_of(dataset: lance.LanceDataset, version: int) -> object | None:
    """What made a version, one of ``lance.LanceOperation``; ``None`` if pylance cannot say."""
    with lance_errors(f"read the transaction of version {version} of {dataset.uri}"):
        try:
            transaction = dataset.read_transaction(version)
        except TypeError:
            # pylance 14 cannot make the object of a rewrite that moved the rows of an index.
            return None
        return None if transaction is None else transaction.operation


def row_count(dataset: lance.LanceDataset) -> int:
    """How many rows a dataset has; reads only metadata."""
    with lance_errors(f"count the rows of {dataset.uri}"):
        return int(dataset.count_rows())


def projection(columns: Sequence[str], every: Sequence[str]) -> list[str] | None:
    """The ``columns`` argument for Lance; ``None`` stands for all columns in order.

    Lance takes longer to resolve thousands of names than to read a row of that many columns.
    """
    return None if list(columns) == list(every) else list(columns)


def committed_at(dataset: lance.LanceDataset) -> int:
    """The commit time of the version in nanoseconds; needs no request."""
    return int(dataset._ds.current_version()["timestamp"])


def fragments_of(dataset: lance.LanceDataset) -> list[lance.LanceFragment]:
    with lance_errors(f"list the fragments of {dataset.uri}"):
        return list(dataset.get_fragments())


def tagged_versions(dataset: lance.LanceDataset) -> dict[str, int]:
    """The tagged versions by the names of their tags."""
    with lance_errors(f"read the tags of {dataset.uri}"):
        return {name: int(tag["version"]) for name, tag in dataset.tags.list().items()}


#: The ``parent_id`` of a column.
_ROOT = -1


def next_fragment_id(dataset: lance.LanceDataset) -> int:
    """A fragment id above all that the table has ever had.

    The id of a dropped fragment must not be reused, because indexes may still list it.
    """
    manifest = TableManifestMessage.FromString(dataset._ds.serialized_manifest())
    present = [fragment.fragment_id for fragment in dataset.get_fragments()]
    return max([int(manifest.max_fragment_id), *present]) + 1 if present or manifest.max_fragment_id else 0


def with_column_metadata(
    schema: LanceSchema, change: Callable[[int, Mapping[str, bytes]], Mapping[str, bytes]]
) -> LanceSchema:
    """``schema`` with changed metadata on its columns; nested fields stay as they are.

    ``change`` gets the position and the metadata of a column. The pickle format is the only way that pylance
    offers.
    """
    reduced: Any = schema.__reduce__()
    restore, (schema_metadata, *fields) = reduced
    place = 0
    changed = []
    for raw in fields:
        column = FieldMessage.FromString(raw)
        if column.parent_id != _ROOT:
            changed.append(raw)
            continue
        metadata = change(place, {entry.key: entry.value for entry in column.metadata})
        place += 1
        del column.metadata[:]
        for key, value in sorted(metadata.items()):
            column.metadata.add(key=key, value=value)
        changed.append(bytes(column.SerializeToString()))
    result: LanceSchema = restore(schema_metadata, *changed)
    return result


def key_marks(place: int) -> dict[str, str]:
    """Lance's metadata for the column at position ``place`` of a primary key, counted from 1."""
    mark = PRIMARY_KEY_KEY.decode()
    return {mark: "true", f"{mark}:position": str(place)}


def with_key_columns(schema: LanceSchema, key: Sequence[str]) -> LanceSchema:
    """``schema`` with the columns ``key`` as primary key, in this order and not null; field ids stay."""
    reduced: Any = schema.__reduce__()
    restore, (schema_metadata, *fields) = reduced
    changed = []
    for raw in fields:
        column = KeyFieldMessage.FromString(raw)
        if column.parent_id == _ROOT and column.name in key:
            place = list(key).index(column.name) + 1
            column.nullable = False
            column.unenforced_primary_key = True
            column.unenforced_primary_key_position = place
            for name, value in key_marks(place).items():
                column.metadata.add(key=name, value=value.encode())
        changed.append(bytes(column.SerializeToString()))
    result: LanceSchema = restore(schema_metadata, *changed)
    return result


def locate(
    uri: str | os.PathLike[str] | lance.LanceDataset, storage_options: Mapping[str, str] | None
) -> tuple[str, dict[str, str]]:
    """The address and storage options of a table, from the arguments of a caller."""
    if isinstance(uri, lance.LanceDataset):
        options = uri._storage_options if storage_options is None else storage_options
        return uri.uri, dict(options or {})
    return path_text(uri), dict(storage_options or {})
