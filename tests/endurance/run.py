"""A long mixed run on one table: writers, readers, a follower, upkeep, and what they take of the machine.

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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import lance
import psutil
import pyarrow as pa

import lancewal
from lancewal.errors import ClosedError, FencedError, LanceWalError, PartialWriteError, WalTruncatedError
from lancewal.maintenance import Retention, collect_garbage
from lancewal.publish import ChangeFeed
from lancewal.storage import ObjectStore
from tests.report import store
from tests.tables import KEY

KEYS_OF_A_WRITER = 5_000
WRITERS = 2
#: Garbage is kept so long; a real table keeps it for a day.
_AGE = timedelta(seconds=60)
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
        defaults = {"fsync": "false", "stats_log_interval_ms": "0", "max_memtable_rows": "2000"}
        self.table = lancewal.initialize(self.uri, bucket=("id", 4), writer_defaults=defaults)
        self._started = time.monotonic()
        self._table_writer = self.table.writer(take_over="now")
        self._swap = threading.Lock()
        work: list[Callable[[], None]] = [lambda n=n: self._write(n) for n in range(WRITERS)]  # type: ignore[misc]
        work += [self._read, self._follow, self._maintain]
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
        self._check()

    def _goes_on(self) -> bool:
        return not self.errors and time.monotonic() - self._started < self.seconds

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def _write(self, number: int) -> None:
        """Keys of its own, so that it knows their newest version."""
        chance = random.Random(number)
        first = number * KEYS_OF_A_WRITER
        step = 0
        while self._goes_on():
            step += 1
            keys = sorted({first + chance.randrange(KEYS_OF_A_WRITER) for _ in range(50)})
            gone = step % 5 == 0
            with self._swap:
                writer = self._table_writer
            try:
                if gone:
                    writer.delete(keys)
                else:
                    writer.put(_rows(keys, step))
            except LanceWalError as error:
                # The writer was taken over or closed meanwhile: the same rows go through the next one.
                if not _is_fence(error):
                    raise
                continue
            for key in keys:
                if gone:
                    self.acknowledged.pop(key, None)
                else:
                    self.acknowledged[key] = _text(key, step)
            self.counts["deletes" if gone else "puts"] += 1
            time.sleep(0.01)

    def _read(self) -> None:
        chance = random.Random(99)
        while self._goes_on():
            found = self.table.scan(columns=["id"]).to_table()
            assert len(set(found["id"].to_pylist())) == found.num_rows, "a key is there twice"
            self.table.lookup([chance.randrange(WRITERS * KEYS_OF_A_WRITER) for _ in range(20)])
            self.table.vector_search("vector", [chance.random()] * 8, 10, columns=["id"])
            self.counts["reads"] += 3
            time.sleep(0.2)

    def _follow(self) -> None:
        place = None
        while self._goes_on():
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
            time.sleep(1.0)

    def _maintain(self) -> None:
        """Compaction, collection, and every now and then another writer."""
        retention = Retention(*[_AGE] * 6, allow_unsafe=True)
        rounds = 0
        while self._goes_on():
            rounds += 1
            time.sleep(2.0)
            self.table.compact()
            self.counts["compactions"] += 1
            collect_garbage(ObjectStore.from_uri(self.uri, fsync=False), retention=retention)
            lance.dataset(self.uri).cleanup_old_versions(_AGE)
            self.counts["collections"] += 1
            if rounds % 5 == 0:
                with self._swap:
                    before, self._table_writer = self._table_writer, self.table.writer(take_over="now")
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
                compactions=self.counts["compactions"],
            )
        )

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
                "Two writers, a reader with scans, lookups and searches, a follower of the feed, compaction, "
                "collection and take-overs on one table in one process. At the end every row was as it was "
                f"acknowledged. The last third of the run over the second: {growth}."
            ],
            "command": "python -m tests.endurance.run --minutes 60",
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
