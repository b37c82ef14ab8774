"""pylance's errors as ours: every call of pylance that may fail stands in :func:`lance_errors`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lance
import pyarrow as pa

from lancewal.errors import LanceWalError, StorageError
from lancewal.objects import is_panic, scrub_error

# What a damaged file makes pylance raise is not always an error of storage.
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


@contextmanager
def lance_errors(action: str) -> Iterator[None]:
    """Turns what pylance raises into StorageError; ``action`` says what could not be done.

    So does it with a panic in Lance's native code, which is no ``Exception``. Credentials that
    pylance's texts quote are taken out of the error and all that led to it.
    """
    try:
        yield
    except LanceWalError as error:
        scrub_error(error)
        raise
    except _FAILURES as error:
        scrub_error(error)
        raise StorageError(f"cannot {action}: {error}") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        scrub_error(error)
        raise StorageError(f"cannot {action}: Lance failed internally: {error}") from error


def row_count(dataset: lance.LanceDataset) -> int:
    """How many rows a dataset has; reads nothing but what describes it."""
    with lance_errors(f"count the rows of {dataset.uri}"):
        return int(dataset.count_rows())


def fragments_of(dataset: lance.LanceDataset) -> list[lance.LanceFragment]:
    with lance_errors(f"list the fragments of {dataset.uri}"):
        return list(dataset.get_fragments())
