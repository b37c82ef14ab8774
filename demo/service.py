"""A Python service that writes while others do: one document a put, each durable when it returns."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from demo.background import Background
from demo.corpus import LIBRARY_KINDS, Document, Edition, rows
from demo.incoming import Names, Texts
from demo.measurements import Measurements, Put
from lancewal.table import Table

#: Between two puts. A service has other things to do, and so have two cores.
_PAUSE = 0.02
#: Small, so that a short demo sees MemTables become SSTables.
_MEMTABLE_ROWS = 300


@dataclass(frozen=True)
class Written:
    """Newest edition by name: what was acknowledged, and what was begun."""

    acknowledged: Names
    begun: Names
    last: Edition | None


class Service(Background):
    """Writes remarks again and again, to the shards that the stream writes to as well; it is their owner."""

    def __init__(self, table: Table, documents: Sequence[Document], measured: Measurements) -> None:
        super().__init__("demo-service")
        #: For whoever else of this process writes to the same shards.
        self.writer = table.writer(max_memtable_rows=_MEMTABLE_ROWS)
        self._documents = documents
        self._measured = measured
        self._acknowledged: dict[str, Edition] = {}
        self._begun: Names = {}
        self._last: Edition | None = None
        self._lock = threading.Lock()
        #: Why it stopped by itself.
        self.failure: Exception | None = None

    def written(self) -> Written:
        with self._lock:
            acknowledged = {name: each.number for name, each in self._acknowledged.items()}
            return Written(acknowledged, dict(self._begun), self._last)

    def texts(self) -> Texts:
        """What the table must hold of this service's documents."""
        with self._lock:
            return {(each.kind, name): each.text for name, each in self._acknowledged.items()}

    @property
    def has_all_shards(self) -> bool:
        """Whether it has written to every shard, or has ended by itself."""
        with self._lock:
            kinds = {each.kind for each in self._acknowledged.values()}
        return self.failure is not None or kinds == set(LIBRARY_KINDS)

    def run(self) -> None:
        try:
            with self.writer as writer:
                for edition in self._editions():
                    row = rows([edition])
                    with self._lock:
                        self._begun[edition.name] = edition.number
                    began = time.perf_counter()
                    writer.put(row)
                    seconds = time.perf_counter() - began
                    with self._lock:
                        self._acknowledged[edition.name] = edition
                        self._last = edition
                    self._measured.puts.append(Put(self._measured.now(), seconds))
                    if self.stopping.wait(_PAUSE):
                        return
        except Exception as error:
            self.failure = error

    def _editions(self) -> Iterator[Edition]:
        for number in itertools.count(1):
            for document in self._documents:
                again = "" if number == 1 else f"Edition {number}. "
                yield document.edition(number, again + document.text)
