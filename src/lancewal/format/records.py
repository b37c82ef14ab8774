"""Small records of lancewal's own: JSON objects with a checksum.

Without it a flipped digit would be believed: the rows of a file would count as written, or one
column would be taken for another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import crc32c

from lancewal.errors import StorageError

_KEY = "crc32c"


def encode_record(content: Mapping[str, object]) -> bytes:
    """The bytes of a record.

    >>> decode_record(encode_record({"rows": 7}))
    {'rows': 7}
    """
    return json.dumps({**content, _KEY: _checksum(content)}, separators=(",", ":")).encode()


def decode_record(data: bytes | str, *, must_have_checksum: bool = False) -> dict[str, Any]:
    """The inverse of :func:`encode_record`; raises ``ValueError`` for any other bytes.

    Earlier versions wrote records without a checksum; they are accepted unless ``must_have_checksum``. Those
    have spaces between their parts: one without spaces has lost its checksum.
    """
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it is a {type(content).__name__}, not an object")
    stored = content.pop(_KEY, None)
    if stored is None and not must_have_checksum and _has_spaces(content, data):
        return content
    if stored != (actual := _checksum(content)):
        raise ValueError(f"its checksum is {stored}, not {actual}")
    return content


@contextmanager
def reading_record(path: str) -> Iterator[None]:
    """Turns the errors of a reader that meets a damaged record into a :class:`StorageError` that names it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise StorageError(f"the record {path!r} is damaged: {error!r}") from error


def _has_spaces(content: Mapping[str, object], data: bytes | str) -> bool:
    return json.dumps(content) == (data if isinstance(data, str) else bytes(data).decode())


def _checksum(content: Mapping[str, object]) -> str:
    return f"{crc32c.crc32c(json.dumps(content, sort_keys=True).encode()):08x}"
