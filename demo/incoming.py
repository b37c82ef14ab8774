"""The stream of the demo: what its files bring, and what the table must hold after each of them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from demo.corpus import LIBRARY_KINDS, Document, Edition, rows

#: The column that says what becomes of a row.
CHANGE = "change"
_SUMMARY = 60

Names = dict[str, int]
Texts = dict[tuple[str, str], str]


@dataclass(frozen=True)
class StreamFile:
    """One file of the stream: documents that are written, or names that are withdrawn."""

    editions: Sequence[Edition]
    withdrawn: bool

    def table(self) -> pa.Table:
        found = rows(self.editions)
        change = "delete" if self.withdrawn else "upsert"
        return found.append_column(CHANGE, pa.array([change] * found.num_rows, pa.string()))


class Incoming:
    """A library of documents that arrives in files.

    The table begins with a summary of every third document. The stream brings all of them in
    full, mixed, so that a file goes to many shards, and then withdraws those of private names.
    """

    def __init__(self, documents: Sequence[Document], rows_per_file: int) -> None:
        mixed = sorted(documents, key=lambda each: zlib.crc32(f"{each.kind} {each.name}".encode()))
        self.first = [each.edition(1, each.text[:_SUMMARY]) for each in mixed[::3]]
        full = [each.edition(2) for each in mixed]
        private = [each for each in full if each.name.rpartition(".")[2].startswith("_")]
        self.files = [
            *_files(full, rows_per_file, withdrawn=False),
            *_files(private, rows_per_file, withdrawn=True),
        ]
        self._states = {kind: self._states_of(kind) for kind in LIBRARY_KINDS}

    @property
    def changes(self) -> int:
        """Rows of all files together."""
        return sum(len(file.editions) for file in self.files)

    def last(self) -> Texts:
        """Kind and name of every document with its text, once the whole stream is in."""
        found = {(each.kind, each.name): each.text for each in self.first}
        for file in self.files:
            for each in file.editions:
                if file.withdrawn:
                    found.pop((each.kind, each.name), None)
                else:
                    found[each.kind, each.name] = each.text
        return found

    def whole_files(self, kind: str, found: Names, at_least: int) -> int | None:
        """After how many files a shard looks like this; ``None`` if it never does from ``at_least`` on.

        A file without rows of this kind changes nothing, so the last of several answers counts.
        """
        states = self._states[kind]
        return next((k for k in reversed(range(at_least, len(states))) if states[k] == found), None)

    def drop(self, number: int, directory: Path) -> Path:
        """Put a file where the stream finds it, whole or not at all."""
        name = f"documents-{number:04}.parquet"
        hidden, shown = directory / f".{name}", directory / name
        pq.write_table(self.files[number].table(), hidden)
        os.replace(hidden, shown)
        return shown

    def _states_of(self, kind: str) -> list[Names]:
        state = {each.name: each.number for each in self.first if each.kind == kind}
        states = [dict(state)]
        for file in self.files:
            for each in file.editions:
                if each.kind == kind and file.withdrawn:
                    state.pop(each.name, None)
                elif each.kind == kind:
                    state[each.name] = each.number
            states.append(dict(state))
        return states


def _files(editions: Sequence[Edition], size: int, *, withdrawn: bool) -> list[StreamFile]:
    return [StreamFile(editions[at : at + size], withdrawn) for at in range(0, len(editions), size)]
