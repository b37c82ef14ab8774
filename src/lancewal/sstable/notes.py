"""Notes: what lancewal records about an SSTable beyond Lance's format, in a file of its own.

Lance compares the schema metadata of an SSTable with the metadata of other levels, and some versions of Lance
panic at an unknown key. So the notes are beside the rows, in ``_lancewal.json``, which Lance ignores. The
shard's manifest has a copy of the part that readers on object storage need, which saves them a request. Lance
drops the copy when it rewrites the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import crc32c
import numpy as np
import pyarrow as pa

from lancewal.errors import StorageError
from lancewal.format import RowSum, byte_spans, decode_record, encode_record, numbers
from lancewal.storage import layout

#: A longer text is not copied into the manifest, which every commit rewrites.
_MAX_COPIED = 4_096
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class SsTableNotes:
    """The notes of one SSTable.

    ``base_version`` is the version of the base table that had the SSTable's columns. ``rows`` is a checksum
    of the rows that the flush wrote, over all columns of the SSTable.

    The others are checksums of the files that answer lookups: whole files by name, the bounds of
    the key index's pages, and each page. They are ``None`` or empty if they were not recorded.

    The whole files of the key index are checked only on local disks, where reading them costs little. The
    check is needed because some damaged bits make Lance's reader take all memory before
    the content can be checked.
    """

    base_version: int | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    bounds: int | None = None
    pages: tuple[int, ...] = ()
    rows: RowSum | None = None

    def copy(self) -> str:
        """The copy for the manifest; empty if it would be long.

        It leaves out the files that Lance writes, because they have other bytes when they are rebuilt from
        the same rows.
        """
        ours = {name: value for name, value in self.files.items() if name == layout.BLOOM_FILTER_NAME}
        text = replace(self, files=ours).to_text()
        return text if len(text) <= _MAX_COPIED else ""

    def to_text(self) -> str:
        """The notes as a record; see :mod:`lancewal.format.records`.

        >>> SsTableNotes.parse(SsTableNotes(7, {"a": 1}, 2, (3, 4), RowSum(5, 6)).to_text(), "t")
        SsTableNotes(base_version=7, files={'a': 1}, bounds=2, pages=(3, 4), rows=RowSum(rows=5, value=6))
        """
        notes: dict[str, object] = {}
        if self.base_version is not None:
            notes["base_version"] = self.base_version
        if self.files:
            notes["files"] = {name: f"{value:08x}" for name, value in sorted(self.files.items())}
        if self.bounds is not None:
            notes["bounds"] = f"{self.bounds:08x}"
            notes["pages"] = "".join(f"{page:08x}" for page in self.pages)
        if self.rows is not None:
            notes["rows"] = self.rows.rows
            notes["sum"] = f"{self.rows.value:016x}"
        return encode_record(notes).decode()

    @classmethod
    def parse(cls, text: str, uri: str) -> SsTableNotes:
        """The inverse of :meth:`to_text`; raises StorageError for other text. ``uri`` names the SSTable."""
        try:
            notes = decode_record(text, must_have_checksum=True)
            bounds, pages = notes.get("bounds"), notes.get("pages", "")
            return cls(
                notes.get("base_version"),
                {name: int(value, 16) for name, value in notes.get("files", {}).items()},
                None if bounds is None else int(bounds, 16),
                tuple(int(pages[at : at + 8], 16) for at in range(0, len(pages), 8)),
                RowSum(int(notes["rows"]), int(notes["sum"], 16)) if "rows" in notes else None,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StorageError(f"lancewal's notes of the SSTable at {uri} are damaged: {error}") from error


def checksum(columns: Sequence[pa.Array], *others: int) -> int:
    """CRC-32C of the values of key columns, independent of their Arrow layout, and of other numbers."""
    value: int = crc32c.crc32c(np.array(others, "<i8").tobytes())
    for column in columns:
        if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
            value = crc32c.crc32c(np.ascontiguousarray(numbers(column)), value)
        else:
            spans = byte_spans(column)
            value = crc32c.crc32c(spans.lengths.astype("<i8").tobytes(), value)
            value = crc32c.crc32c(np.ascontiguousarray(spans.data), value)
    return value


def file_checksum(path: str) -> int:
    """CRC-32C of a local file of any size."""
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = crc32c.crc32c(chunk, value)
    return value
