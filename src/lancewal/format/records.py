"""lancewal's own small records: JSON objects with a checksum.

Without the checksum a flipped digit would go unnoticed: the rows of a file would count as written, or
one column would be taken for another.
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
    """Encode a record.

    >>> decode_record(encode_record({"rows": 7}))
    {'rows': 7}
    """
    return json.dumps({**content, _KEY: _checksum(content)}, separators=(",", ":")).encode()


def decode_record(data: bytes | str, *, must_have_checksum: bool = False) -> dict[str, Any]:
    """The inverse of :func:`encode_record`; raises ``ValueError`` for any other bytes.

    Earlier versions wrote records without a checksum; these are accepted unless ``must_have_checksum``. They
    have spaces between their parts. So a record without spaces and without a checksum has lost it.
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
    """Convert the errors of reading a damaged record to a :class:`StorageError` that names the record."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise StorageError(f"the record {path!r} is damaged: {error!r}") from error


def _has_spaces(content: Mapping[str, object], data: bytes | str) -> bool:
    return json.dumps(content) == (data if isinstance(data, str) else bytes(data).decode())


def _checksum(content: Mapping[str, object]) -> str:
    return f"{crc32c.crc32c(json.dumps(content, sort_keys=True).encode()):08x}"
