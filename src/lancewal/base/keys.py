"""Check and declare the primary key of a table that already has rows.

Lance does not enforce a key. So the rows are checked once, when the key is declared: no nulls, no duplicates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.commit import CommitConflictError

from lancewal.base.lance import lance_errors, with_key_columns
from lancewal.base.table import table_schema
from lancewal.errors import InvalidInputError, OutcomeUnknownError, StorageError
from lancewal.format import check_key_type, key_words, row_keys

logger = logging.getLogger(__name__)

_COMMIT_ATTEMPTS = 5

#: Returns the key columns of all rows; it is called a second time to find an example for an error.
Rows = Callable[[], Iterable[pa.RecordBatch]]


def declare_key(dataset: lance.LanceDataset, key: Sequence[str]) -> None:
    """Make ``key`` the primary key of a table without one; declaring the same key again has no effect.

    Nullable columns become non-null in the same commit. Rows are read first. The commit fails if others
    wrote meanwhile, and then the rows are read again. ``dataset`` is at the newest version afterwards.
    """
    for _ in range(_COMMIT_ATTEMPTS):
        present = table_schema(dataset).primary_key
        if present == tuple(key):
            return
        if present:
            raise InvalidInputError(
                f"the table at {dataset.uri} has the primary key {', '.join(present)}, which cannot be "
                "changed; leave the key out"
            )
        check_key_columns(dataset.schema, key)
        check_unique(_key_rows(dataset, key), key)
        committed = _commit(dataset, key)
        with lance_errors(f"open the table at {dataset.uri}"):
            dataset.checkout_latest()
        if committed:
            return
    raise StorageError(
        f"the table at {dataset.uri} changed {_COMMIT_ATTEMPTS} times while its key was checked"
    )


def check_key_columns(columns: pa.Schema, key: Sequence[str]) -> None:
    """Refuse a key whose columns are missing, named twice, or of a type that a key cannot have."""
    if not key or len(set(key)) != len(key):
        raise InvalidInputError(f"the key is {list(key)!r}; name its columns, each once")
    for name in key:
        if name not in columns.names:
            raise InvalidInputError(
                f"the table has no column {name!r} that could be its key; its columns are "
                f"{', '.join(columns.names)}"
            )
        check_key_type(columns.field(name).type, name)


def check_unique(rows: Rows, key: Sequence[str]) -> None:
    """Refuse rows that have nulls in ``key``, or the same key twice.

    Needs eight bytes of memory per row. Text and composite keys are first compared by a 64-bit hash.
    """
    words: list[npt.NDArray[np.uint64]] = []
    for batch in rows():
        for name in key:
            nulls = batch.column(name).null_count
            if nulls:
                raise InvalidInputError(
                    f"column {name} has nulls, {nulls} in one batch of rows; a key has none. Delete or fill "
                    f"those rows first, for example where {name} IS NULL"
                )
        words.append(_words(batch, key))
    every = np.sort(np.concatenate(words)) if words else np.array([], np.uint64)
    twice = every[1:][every[1:] == every[:-1]]
    example = _doubled(rows, key, twice) if len(twice) else None
    if example is not None:
        raise InvalidInputError(
            f"{len(twice)} of {len(every)} rows have a key ({', '.join(key)}) that another row has too, "
            f"such as {example!r}; delete all but one of them first, or choose another key"
        )


def _words(batch: pa.RecordBatch, key: Sequence[str]) -> npt.NDArray[np.uint64]:
    return key_words(row_keys(batch, key))


def _doubled(rows: Rows, key: Sequence[str], words: npt.NDArray[np.uint64]) -> object | None:
    """A key that two rows have; ``None`` if only their hashes are equal."""
    seen = set()
    for batch in rows():
        for place in np.flatnonzero(np.isin(_words(batch, key), words)):
            found = tuple(batch.column(name)[int(place)].as_py() for name in key)
            if found in seen:
                return found[0] if len(key) == 1 else found
            seen.add(found)
    return None


def _key_rows(dataset: lance.LanceDataset, key: Sequence[str]) -> Rows:
    def rows() -> Iterable[pa.RecordBatch]:
        with lance_errors(f"read the keys of {dataset.uri}"):
            yield from dataset.scanner(columns=list(key)).to_batches()

    return rows


def _commit(dataset: lance.LanceDataset, key: Sequence[str]) -> bool:
    """Commit the key; False if others committed rows meanwhile.

    Lance treats a change of nullability as a conflict with every concurrent write.
    """
    operation = lance.LanceOperation.Project(with_key_columns(dataset.lance_schema, key))
    try:
        with lance_errors(f"declare the primary key of {dataset.uri}", commits=True):
            lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
    except (StorageError, OutcomeUnknownError) as error:
        if isinstance(error.__cause__, CommitConflictError):
            logger.debug("the key was not declared, rows came meanwhile: %s", error.__cause__)
            return False
        raise
    return True
