"""pylance's errors as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from lancewal.errors import LanceWalError, StorageError


@contextmanager
def lance_errors(action: str) -> Iterator[None]:
    """Turns what pylance raises into StorageError; ``action`` says what could not be done.

    A panic in Lance's native code is a BaseException of a class that cannot be imported.
    """
    try:
        yield
    except LanceWalError:
        raise
    except (OSError, ValueError, RuntimeError, TypeError, NotImplementedError, pa.ArrowException) as error:
        raise StorageError(f"cannot {action}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise StorageError(f"cannot {action}: Lance failed internally: {error}") from error
