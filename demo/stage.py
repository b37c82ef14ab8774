"""What the steps of the demo share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

import lancewal
from demo.corpus import NOTE, library, remarks
from demo.feeds import Feed, LocalFeed, SparkFeed
from demo.incoming import Incoming, Texts
from demo.measurements import Measurements
from demo.narration import Narration
from demo.observer import Observer
from demo.service import Service

_TABLE = "documents.lance"
_FILES = "incoming"


@dataclass(frozen=True)
class Scale:
    """How much is shown; ``None`` is everything that there is."""

    library: int | None = None
    remarks: int | None = None
    rows_per_file: int = 500
    seconds_per_file: float = 0.5
    kills: int = 3
    puts_per_kill: int = 40


@dataclass(frozen=True)
class Players:
    """Who works on the table."""

    service: Service
    observer: Observer
    feed: Feed


@dataclass
class Stage:
    """One run: its directory, what the table must hold, and who works on it."""

    directory: Path
    narration: Narration
    measured: Measurements
    scale: Scale
    incoming: Incoming
    #: What the table must hold of the notes, beside the stream and the service.
    notes: Texts
    spark: SparkFeed | None = None
    _players: Players | None = None

    @classmethod
    def prepare(cls, directory: Path, narration: Narration, scale: Scale, *, with_spark: bool) -> Stage:
        """Read the documents; Spark, if it takes part, starts meanwhile."""
        measured, spark = Measurements(), None
        if with_spark:
            spark = SparkFeed(str(directory / _TABLE), directory, directory / _FILES, measured)
            spark.launch()
        incoming = Incoming(library(scale.library), scale.rows_per_file)
        return cls(directory, narration, measured, scale, incoming, {}, spark)

    @property
    def uri(self) -> str:
        return str(self.directory / _TABLE)

    @property
    def files(self) -> Path:
        """Where the stream's files are put."""
        return self.directory / _FILES

    def open(self) -> lancewal.Table:
        return lancewal.open(self.uri)

    def set(self) -> None:
        """Bring on who works on the table; it must exist."""
        table = self.open()
        service = Service(table, remarks(self.scale.remarks), self.measured)
        observer = Observer(table, self.incoming, service, self.measured)
        self.files.mkdir()
        feed = self.spark or LocalFeed(table, service, self.measured)
        self._players = Players(service, observer, feed)

    @property
    def players(self) -> Players:
        assert self._players is not None, "set() comes first"
        return self._players

    def expected(self) -> Texts:
        """Kind and name of every document with its text, once the stream is in."""
        return self.incoming.last() | self.players.service.texts() | self.notes

    def holds_exactly(self, found: pa.Table) -> bool:
        """Whether rows are the expected documents, each once."""
        return found.num_rows == len(self.expected()) and texts_of(found) == self.expected()

    def strike(self) -> None:
        """Send everybody home, whatever happened."""
        if self.spark is not None:
            self.spark.close()
        if self._players is not None:
            self._players.feed.close()
            self._players.observer.stop()
            self._players.service.stop()


def texts_of(found: pa.Table) -> Texts:
    columns = (found[name].to_pylist() for name in ("kind", "name", "text"))
    return {(kind, name): text for kind, name, text in zip(*columns, strict=True)}


def note_texts(found: pa.Table) -> Texts:
    return {key: text for key, text in texts_of(found).items() if key[0] == NOTE}


def directory_bytes(where: Path) -> int:
    return sum(
        entry.stat().st_size
        for folder, _, names in os.walk(where)
        for entry in (Path(folder, name) for name in names)
    )
