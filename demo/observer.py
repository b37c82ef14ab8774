"""A reader that looks at the table all the time: is what it sees always one sound state?"""

from __future__ import annotations

import threading
import time
from collections import Counter
from uuid import UUID

import pyarrow as pa

from demo.background import Background
from demo.corpus import LIBRARY_KINDS, REMARK, embed
from demo.incoming import Incoming, Names
from demo.measurements import Levels, Measurements
from demo.service import Service, Written
from lancewal.table import Table

_PAUSE = 0.6
#: Squared distance of a vector to itself, but for rounding.
_SAME = 1e-6
#: A question, and what every text that answers it contains; words are stemmed.
_QUESTION = ("exceptions", "except")


class Observer(Background):
    """Scans and searches until it is stopped; what it sees that must not be, it keeps in ``wrong``.

    Of the stream's documents a scan must find whole files only in each shard, and never fewer than before.
    Of the service's remarks, in the same shards, it must find every acknowledged edition, or a later one.
    """

    def __init__(self, table: Table, incoming: Incoming, service: Service, measured: Measurements) -> None:
        super().__init__("demo-observer")
        self._table = table
        self._incoming = incoming
        self._service = service
        self._measured = measured
        #: Shards whose writer is in this process: their fresh rows are read from its MemTables.
        self.in_process: set[UUID] = {table.shard_for(kind) for kind in LIBRARY_KINDS}
        self.wrong: list[str] = []
        self.scans = 0
        self._files = dict.fromkeys(LIBRARY_KINDS, 0)
        self._looking = threading.Lock()

    @property
    def files_seen(self) -> int:
        """How many files of the stream are in every shard."""
        return min(self._files.values())

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.look()
                self.stopping.wait(_PAUSE)
            self.look()
        except Exception as error:
            self.wrong.append(f"a read failed: {error}")

    def look(self) -> None:
        """One scan and two searches; one look at a time, so that each is newer than the last."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        before = self._service.written()
        found = self._table.scan(["kind", "name", "edition"], with_row_source=True).to_table()
        after = self._service.written()
        self.scans += 1
        self._measured.levels.append(self._levels(found))
        names, remarks = _by_kind(found)
        for kind in LIBRARY_KINDS:
            self._check_stream(kind, names.get(kind, {}))
        self._check_service(remarks, before, after)
        self._search_vector(after)
        self._search_words()

    def _levels(self, found: pa.Table) -> Levels:
        counts: Counter[str] = Counter()
        sources = zip(found["_source"].to_pylist(), found["_shard_id"].to_pylist(), strict=True)
        for (source, shard), number in Counter(sources).items():
            kind = source.partition(":")[0]
            if kind == "memtable" and UUID(shard) not in self.in_process:
                kind = "wal"
            counts[kind] += number
        return Levels(
            self._measured.now(), counts["memtable"], counts["wal"], counts["sstable"], counts["base"]
        )

    def _check_stream(self, kind: str, found: Names) -> None:
        files = self._incoming.whole_files(kind, found, self._files[kind])
        if files is None:
            self.wrong.append(
                f"{len(found)} documents of kind {kind} that fit no whole number of files "
                f"from {self._files[kind]} on"
            )
        else:
            self._files[kind] = files

    def _check_service(self, found: Names, before: Written, after: Written) -> None:
        for name, number in before.acknowledged.items():
            if not number <= found.get(name, 0) <= after.begun[name]:
                self.wrong.append(f"{name}: edition {found.get(name)}, acknowledged was {number}")

    def _search_vector(self, written: Written) -> None:
        if written.last is None:
            return
        query = embed(written.last.text)
        began = time.perf_counter()
        hit = self._table.vector_search("vector", query, k=1, columns=["name"]).to_pylist()
        self._measured.searches.append(time.perf_counter() - began)
        newer = self._service.written().begun[written.last.name] > written.last.number
        if query.any() and not newer and (not hit or hit[0]["_distance"] > _SAME):
            self.wrong.append(f"the vector of {written.last.name}, just written, was not found")

    def _search_words(self) -> None:
        words, part = _QUESTION
        began = time.perf_counter()
        hits = self._table.full_text_search("text", words, k=5, columns=["text"])["text"].to_pylist()
        self._measured.searches.append(time.perf_counter() - began)
        self.wrong += [f"{text[:40]!r} was found by {words!r}" for text in hits if part not in text.lower()]


def _by_kind(found: pa.Table) -> tuple[dict[str, Names], Names]:
    """Edition by name, of each kind and of remarks; a name that comes twice makes one that fits nothing."""
    names: dict[str, Names] = {}
    remarks: Names = {}
    columns = (found[name].to_pylist() for name in ("kind", "name", "edition"))
    for kind, name, edition in zip(*columns, strict=True):
        where = remarks if name.startswith(REMARK) else names.setdefault(kind, {})
        where[name] = -1 if name in where else edition
    return names, remarks
