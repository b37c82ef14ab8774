"""A long mixed run on one table: writers, readers, a follower, upkeep, and what they take of the machine.

The load is that of a service: so many puts and reads a second, whatever time the machine has left, and upkeep
as users have it, a thread of the writer. A run at full speed would measure who of writers and upkeep gets
more of the machine, and nothing of what a table takes.

``python -m tests.endurance.run --minutes 60 --store`` writes the figures that the
page on testing shows. The run fails when a row is not as it was acknowledged.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import lance
import psutil
import pyarrow as pa

import lancewal
from lancewal.errors import ClosedError, FencedError, LanceWalError, PartialWriteError, WalTruncatedError
from lancewal.publish import ChangeFeed
from lancewal.storage import process_totals
from lancewal.upkeep import Work
from tests.report import store
from tests.tables import KEY

KEYS_OF_A_WRITER = 5_000
WRITERS = 2
ROWS_PER_PUT = 50
#: Seconds from one to the next: puts and deletes of each writer, reads, looks at the feed, take-overs.
PUT_EVERY, READ_EVERY, LOOK_EVERY, TAKE_OVER_EVERY = 0.25, 1.0, 2.0, 60.0
#: As short as a table may keep what is old, so that an hour sees it come and go: entries of logs and versions
#: of the base ten minutes, the rest two.
_UPKEEP = lancewal.UpkeepSettings(garbage_age=timedelta(minutes=2), version_age=timedelta(minutes=10))
_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 8)),
    ]
)


@dataclass(frozen=True)
class Sample:
    """What the process takes at one moment."""

    minute: float
    memory_mb: float
    threads: int
    handles: int
    disk_mb: float
    puts: int
    reads: int
    sstables: int
    compactions: int


@dataclass
class Endurance:
    """The run; ``acknowledged`` holds the text of every row as its writer knows it."""

    uri: str
    seconds: float
    acknowledged: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        lance.write_dataset(_SCHEMA.empty_table(), self.uri)
        defaults = {"fsync": "false", "stats_log_interval_ms": "0", "max_memtable_rows": "1000"}
        self.table = lancewal.initialize(self.uri, bucket=("id", 4), writer_defaults=defaults, upkeep=_UPKEEP)
        self._started = time.monotonic()
        self._table_writer = self._next_writer()
        self._swap = threading.Lock()
        work: list[Callable[[], None]] = [lambda n=n: self._write(n) for n in range(WRITERS)]  # type: ignore[misc]
        work += [self._read, self._follow, self._take_over]
        threads = [threading.Thread(target=self._guarded, args=(each,), daemon=True) for each in work]
        for thread in threads:
            thread.start()
        every = min(10.0, self.seconds / 24)
        while self._goes_on():
            time.sleep(every)
            self._sample()
        for thread in threads:
            thread.join()
        self._table_writer.close()
        if self.errors:
            raise self.errors[0]
        for work in Work:
            self.counts[f"upkeep: {work}"] = self._of_upkeep(work)
        self._check()

    def _next_writer(self) -> lancewal.TableWriter:
        return self.table.writer(take_over="now", upkeep=True)

    def _goes_on(self) -> bool:
        return not self.errors and time.monotonic() - self._started < self.seconds

    def _paced(self, every: float, what: str) -> Iterator[int]:
        """Numbers from 1, one ``every`` so many seconds; what is late is counted, and not made up for."""
        due = time.monotonic()
        number = 0
        while self._goes_on():
            number += 1
            yield number
            due += every
            late = time.monotonic() - due
            if late > every:
                due += late
                self.counts[f"{what} that were late"] += 1
            else:
                time.sleep(max(0.0, -late))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def _write(self, number: int) -> None:
        """Keys of its own, so that it knows their newest version."""
        chance = random.Random(number)
        first = number * KEYS_OF_A_WRITER
        for step in self._paced(PUT_EVERY, "puts"):
            keys = sorted({first + chance.randrange(KEYS_OF_A_WRITER) for _ in range(ROWS_PER_PUT)})
            gone = step % 5 == 0
            while not self._written(keys, step, gone):
                self.counts["writes that went through the next writer"] += 1
            for key in keys:
                if gone:
                    self.acknowledged.pop(key, None)
                else:
                    self.acknowledged[key] = _text(key, step)
            self.counts["deletes" if gone else "puts"] += 1

    def _written(self, keys: list[int], step: int, gone: bool) -> bool:
        """Whether they were: not if the writer was taken over or closed meanwhile."""
        with self._swap:
            writer = self._table_writer
        try:
            if gone:
                writer.delete(keys)
            else:
                writer.put(_rows(keys, step))
        except LanceWalError as error:
            if not _is_fence(error):
                raise
            return False
        return True

    def _read(self) -> None:
        chance = random.Random(99)
        for _ in self._paced(READ_EVERY, "reads"):
            found = self.table.scan(columns=["id"]).to_table()
            assert len(set(found["id"].to_pylist())) == found.num_rows, "a key is there twice"
            self.table.lookup([chance.randrange(WRITERS * KEYS_OF_A_WRITER) for _ in range(20)])
            self.table.vector_search("vector", [chance.random()] * 8, 10, columns=["id"])
            self.counts["reads"] += 3

    def _follow(self) -> None:
        place = None
        for _ in self._paced(LOOK_EVERY, "looks at the feed"):
            feed = ChangeFeed.open(self.uri)
            try:
                place = feed.earliest() if place is None else place
                latest = feed.latest()
                for batch in feed.changes(place, latest):
                    self.counts["changes"] += batch.num_rows
                place = latest
            except WalTruncatedError:
                place = None
                self.counts["followers too slow"] += 1

    def _take_over(self) -> None:
        """Every now and then another writer, with an upkeep of its own."""
        for number in self._paced(min(TAKE_OVER_EVERY, self.seconds / 4), "take-overs"):
            if number > 1:
                with self._swap:
                    before, self._table_writer = self._table_writer, self._next_writer()
                before.close()
                self.counts["take-overs"] += 1

    def _sample(self) -> None:
        gc.collect()
        process = psutil.Process()
        self.samples.append(
            Sample(
                minute=round((time.monotonic() - self._started) / 60, 2),
                memory_mb=round(process.memory_info().rss / 1e6, 1),
                threads=process.num_threads(),
                handles=process.num_fds(),
                disk_mb=round(_disk_bytes(Path(self.uri)) / 1e6, 2),
                puts=self.counts["puts"] + self.counts["deletes"],
                reads=self.counts["reads"],
                sstables=max(shard.uncompacted.count for shard in self.table.status().shards),
                compactions=self._of_upkeep("compact"),
            )
        )

    def _of_upkeep(self, work: str) -> int:
        return int(process_totals.by_table().get(self.table.uri, {}).get(f"upkeep.{work}.tasks", 0))

    def _check(self) -> None:
        found = lancewal.open(self.uri).scan(columns=["id", "text"]).to_table()
        there = dict(zip(found["id"].to_pylist(), found["text"].to_pylist(), strict=True))
        assert len(there) == found.num_rows, "a key is there twice"
        wrong = {
            key for key in there.keys() | self.acknowledged if there.get(key) != self.acknowledged.get(key)
        }
        assert not wrong, f"{len(wrong)} rows are not as they were acknowledged: {sorted(wrong)[:5]}"
        report = self.table.verify()
        assert report.ok, report

    def growth(self) -> dict[str, float]:
        """The last third of the run over the second, by median: 1 is flat."""
        third = len(self.samples) // 3
        middle, last = self.samples[third : 2 * third], self.samples[-third:]
        figures = ("memory_mb", "threads", "handles", "disk_mb")
        return {
            name: round(
                statistics.median(getattr(each, name) for each in last)
                / statistics.median(getattr(each, name) for each in middle),
                2,
            )
            for name in figures
        }

    def report(self) -> dict[str, object]:
        """As the page on testing takes it."""
        chosen = self.samples[:: max(1, len(self.samples) // 12)]
        growth = ", ".join(f"{name.removesuffix('_mb')} × {ratio}" for name, ratio in self.growth().items())
        columns = [name.replace("_", " ") for name in asdict(chosen[0])]
        return {
            "title": "Endurance",
            "text": [
                "Two writers, a reader with scans, lookups and searches, a follower of the feed, take-overs "
                "and upkeep on one table in one process. The load is that of a service, so many puts and "
                f"reads a second whatever time the machine has left: {WRITERS / PUT_EVERY:g} puts or deletes "
                f"of {ROWS_PER_PUT} rows, {3 / READ_EVERY:g} reads. Upkeep is as users have it, a thread of "
                "the writer, with what is old kept as shortly as a table may keep it. At the end every row "
                "was as it was acknowledged, and `verify` found nothing.",
                f"The last third of the run over the second: {growth}.",
            ],
            "command": "python -m tests.endurance.run --minutes 60 --store",
            "figures": [
                ["minutes", round(self.samples[-1].minute)],
                *([name, count] for name, count in sorted(self.counts.items())),
            ],
            "tables": [
                {
                    "caption": "What the process takes, over time",
                    "columns": columns,
                    "rows": [list(asdict(sample).values()) for sample in chosen],
                }
            ],
        }


def _is_fence(error: LanceWalError) -> bool:
    kinds = (FencedError, ClosedError)
    if isinstance(error, PartialWriteError):
        return all(isinstance(each, kinds) for each in error.failed.values())
    return isinstance(error, kinds)


def _text(key: int, step: int) -> str:
    return f"text of {key} at {step}"


def _rows(keys: list[int], step: int) -> pa.RecordBatch:
    vectors = pa.array([[float(key % 97)] * 8 for key in keys], _SCHEMA.field("vector").type)
    columns = [pa.array(keys, pa.int64()), pa.array([_text(key, step) for key in keys]), vectors]
    return pa.record_batch(columns, schema=_SCHEMA)


def _disk_bytes(root: Path) -> int:
    total = 0
    for place, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(f"{place}/{name}").st_size
            except FileNotFoundError:
                continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--store", action="store_true", help="as figures of docs/testing.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lancewal-endurance-", ignore_cleanup_errors=True) as place:
        endurance = Endurance(f"{place}/table", arguments.minutes * 60)
        endurance.run()
    found = endurance.report()
    print(json.dumps(found, indent=1, ensure_ascii=False))
    if arguments.store:
        store("endurance", found)


if __name__ == "__main__":
    main()
