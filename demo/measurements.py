"""What was measured while the story went on; every plot of the report is drawn from it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Put:
    at: float
    seconds: float


@dataclass(frozen=True)
class Arrival:
    """Rows that the stream brought, reported at ``at``."""

    at: float
    rows: int


@dataclass(frozen=True)
class Levels:
    """Where the newest version of each row was at one moment."""

    at: float
    memtable: int
    wal: int
    sstables: int
    base: int


@dataclass(frozen=True)
class Mark:
    """Something worth a line in every plot over time."""

    at: float
    text: str


@dataclass
class Measurements:
    """Times are seconds since the story began. Lists are only appended to, from any thread."""

    puts: list[Put] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    levels: list[Levels] = field(default_factory=list)
    searches: list[float] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    compactions: list[float] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        return time.monotonic() - self._began

    def mark(self, text: str) -> None:
        self.marks.append(Mark(self.now(), text))
