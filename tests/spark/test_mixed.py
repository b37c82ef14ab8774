"""Both stream paths, a Python writer, flush, compaction, collection and the feed, stopped again and again.

Streams are stopped in the middle of whatever they do: the micro-batch that was under way is in some shards
and not in others, and its tasks may still be running when the stream is started again. Once the streams have
come to the end of their sources, every row is in the table once, and in the feed once.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import LanceWalError
from lancewal.spark import changes, low_latency, stream
from tests.patience import wait_until
from tests.spark import faulty
from tests.spark.tables import named, new_table
from tests.tables import APPEND_ONLY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SHARDS = 4
NOW = {"availableNow": True}


class Source:
    """Files of rows, one a micro-batch; ids from ``first`` on."""

    def __init__(self, directory: Path, first: int, files: int, rows: int = 40) -> None:
        directory.mkdir()
        self.directory = directory
        self.rows = named(first, files * rows)
        for number in range(files):
            lines = [f'{{"id": {i}, "name": "{name}"}}' for i, name in self.rows[number * rows :][:rows]]
            (directory / f"{number:03}.json").write_text("\n".join(lines))

    def frame(self, spark: SparkSession) -> DataFrame:
        read = spark.readStream.schema("id long, name string").option("maxFilesPerTrigger", 1)
        return read.json(str(self.directory)).repartition(2)


class Mix:
    """One table, and everything that works on it at once."""

    def __init__(self, spark: SparkSession, place: Path, files: int) -> None:
        self.spark = spark
        self.place = place
        self.table = new_table(place / "table", APPEND_ONLY, bucket=("id", SHARDS))
        self.by_log = Source(place / "by-log", 0, files)
        self.by_format = Source(place / "by-format", 1_000_000, files)
        self.acknowledged: set[int] = set()
        #: Of puts that failed: nobody knows whether they are there.
        self.in_doubt: set[int] = set()
        self._next_put = itertools.count(2_000_000)

    def start(self, *, to_the_end: bool) -> list[StreamingQuery]:
        trigger = NOW if to_the_end else {"processingTime": "0 seconds"}
        low = stream(
            self.by_log.frame(self.spark), self.table.uri, str(self.place / "c-log"), trigger=trigger
        )
        by_format = self.by_format.frame(self.spark).writeStream.format("lancewal")
        by_format = by_format.option("checkpointLocation", str(self.place / "c-format"))
        return [low, by_format.trigger(**trigger).start(self.table.uri)]

    def follow(self, *, to_the_end: bool) -> StreamingQuery:
        """The feed, each micro-batch kept under its number: one that is repeated replaces itself."""
        kept = str(self.place / "seen")

        def keep(batch: DataFrame, number: int) -> None:
            batch.select("id", "name").write.mode("overwrite").parquet(f"{kept}/{number}")

        feed = changes(self.spark, self.table.uri, starting_position="earliest")
        writer = feed.writeStream.foreachBatch(keep).option("checkpointLocation", str(self.place / "c-feed"))
        return writer.trigger(**(NOW if to_the_end else {"processingTime": "0 seconds"})).start()

    def seen(self) -> Counter[int]:
        rows = self.spark.read.parquet(*map(str, (self.place / "seen").iterdir())).select("id").collect()
        return Counter(row.id for row in rows)

    def held(self) -> Counter[int]:
        return Counter(lancewal.open(self.table.uri).scan(columns=["id"]).to_table()["id"].to_pylist())

    def write(self, stop: threading.Event) -> None:
        """A Python writer, closed and opened again and again."""
        while not stop.is_set():
            with suppress(LanceWalError), self.table.writer() as writer:
                for _ in range(4):
                    ids = list(itertools.islice(self._next_put, 5))
                    self.in_doubt.update(ids)
                    writer.put(pa.table({"id": ids, "name": [f"name_{i}" for i in ids]}, schema=APPEND_ONLY))
                    self.acknowledged.update(ids)
                    stop.wait(0.05)
            stop.wait(0.2)

    def maintain(self, stop: threading.Event) -> None:
        works: list[Callable[[], object]] = [
            self.table.flush,
            self.table.compact,
            lambda: self.table.gc(min_age=timedelta(0)),
        ]
        for work in itertools.cycle(works):
            if stop.wait(0.1):
                return
            # Others change the table meanwhile: some attempts are lost to them, and made again.
            with suppress(LanceWalError):
                work()

    def expected(self) -> set[int]:
        return {i for i, _ in self.by_log.rows + self.by_format.rows} | self.acknowledged

    def check(self, found: Counter[int], where: str) -> None:
        doubled = sorted(i for i, count in found.items() if count > 1)
        assert not doubled, f"twice in {where}: {doubled[:10]} and {len(doubled)} in all"
        missing = sorted(self.expected() - found.keys())
        assert not missing, f"missing in {where}: {missing[:10]} and {len(missing)} in all"
        assert found.keys() <= self.expected() | self.in_doubt


@contextmanager
def beside(*works: Callable[[threading.Event], None]) -> Iterator[None]:
    stop = threading.Event()
    threads = [threading.Thread(target=work, args=(stop,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def ended(query: StreamingQuery) -> None:
    """Stop a stream in the middle of whatever it does; what it complains of then is no concern of ours."""
    with suppress(Exception):
        query.stop()


def run_mix(spark: SparkSession, place: Path, files: int, restarts: int) -> Mix:
    chance = random.Random(restarts)
    mix = Mix(spark, place, files)
    with beside(mix.write, mix.maintain):
        for _ in range(restarts):
            queries = mix.start(to_the_end=False)
            feed = mix.follow(to_the_end=False)
            first = chance.choice(queries)
            before = len(first.recentProgress)
            wait_until(
                lambda q=first, n=before: len(q.recentProgress) > n or not q.isActive,  # type: ignore[misc]
                "a micro-batch",
            )
            for query in chance.sample([*queries, feed], 3):
                ended(query)
        for query in mix.start(to_the_end=True):
            query.awaitTermination()
    mix.follow(to_the_end=True).awaitTermination()
    return mix


def check_mix(mix: Mix) -> None:
    mix.check(mix.held(), "the table")
    mix.check(mix.seen(), "the feed")
    table = lancewal.open(mix.table.uri)
    table.flush()
    table.compact()
    mix.check(mix.held(), "the table after a compaction")
    assert table.verify().ok


def test_streams_that_are_stopped_in_the_middle_bring_everything_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    check_mix(run_mix(spark, tmp_path, files=3, restarts=1))


def test_shards_that_lack_the_last_micro_batch_of_a_stopped_stream_get_it_when_it_starts_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a table shows whose stream was stopped: some shards have the batch, the others do not, yet."""
    monkeypatch.setattr(low_latency, "APPENDING", faulty.HalfAppending)
    stop = Path(os.environ[faulty.DIRECTORY]) / faulty.HALF
    mix = Mix(spark, tmp_path, files=1)
    uri, checkpoint = mix.table.uri, str(tmp_path / "c-log")
    everything = {i for i, _ in mix.by_log.rows}
    stop.touch()
    try:
        query = stream(mix.by_log.frame(spark), uri, checkpoint, trigger=NOW)
        with pytest.raises(Exception, match="InjectedError"):
            query.awaitTermination()
    finally:
        faulty.withdraw()
    held = mix.held()
    lacking = everything - held.keys()
    of_shards = [shard for shard, _ in mix.table.router().route(ids_of(sorted(lacking)))]
    assert held.keys() < everything
    assert held
    assert not set(of_shards) & {shard for shard, _ in mix.table.router().route(ids_of(sorted(held)))}
    stream(mix.by_log.frame(spark), uri, checkpoint, trigger=NOW).awaitTermination()
    assert mix.held() == Counter(everything)


def ids_of(ids: list[int]) -> pa.RecordBatch:
    names = [f"name_{i}" for i in ids]
    return pa.RecordBatch.from_arrays([pa.array(ids), pa.array(names)], schema=APPEND_ONLY)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("round_", range(3))
def test_a_mix_of_everything_with_seven_restarts(spark: SparkSession, tmp_path: Path, round_: int) -> None:
    check_mix(run_mix(spark, tmp_path, files=12 + round_, restarts=7))
