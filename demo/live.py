"""The main part: a stream comes in while a service writes and a reader looks, and Spark dies once."""

from __future__ import annotations

import time
from collections import Counter
from uuid import UUID

import numpy as np
import pyarrow as pa

from demo.background import Background
from demo.corpus import LIBRARY_KINDS, REMARK
from demo.feeds import SparkFeed
from demo.stage import Stage
from lancewal.cli.console import count, duration, plural
from lancewal.errors import LanceWalError
from lancewal.publish.feed import ChangeFeed
from lancewal.table import Table

#: Micro-batches before the driver is killed, and how far into the next one.
_BATCHES_BEFORE_KILL = 4
_INTO_THE_NEXT = 0.25
_COMPACT_EVERY = 4.0
_LOOK_EVERY = 0.02


def stream_in(stage: Stage) -> None:
    """Run all three side by side until the last file is in."""
    table, players = stage.open(), stage.players
    players.service.start()
    while not players.service.has_all_shards:
        time.sleep(_LOOK_EVERY)
    epochs = _epochs(table)
    players.feed.start()
    players.observer.start()
    with _Compactor(table, stage):
        began = time.monotonic()
        if stage.spark is not None:
            _through_spark(stage, stage.spark, table)
        else:
            _drop(stage, 0, len(stage.incoming.files), stage.scale.seconds_per_file)
        players.feed.drain()
        seconds = time.monotonic() - began
    kept = _epochs(table) == epochs
    players.service.stop()
    players.observer.look()
    _tell(stage, seconds, kept)


def _epochs(table: Table) -> dict[UUID, int]:
    """Grows when a shard is claimed."""
    return {shard.shard_id: shard.epoch for shard in table.shards()}


def _through_spark(stage: Stage, feed: SparkFeed, table: Table) -> None:
    half = len(stage.incoming.files) // 2
    _drop(stage, 0, half, 0.0)
    feed.wait_for_batches(min(_BATCHES_BEFORE_KILL, half - 1))
    time.sleep(_INTO_THE_NEXT)
    feed.kill()
    stage.measured.mark("Spark killed")
    stage.narration.say(
        f"Spark {feed.version}, driver and JVM, was killed with SIGKILL after "
        f"{plural(feed.batches, 'micro-batch', 'micro-batches')}, in the middle of the next"
    )
    feed.launch()
    table.flush()
    feed.start()
    stage.measured.mark("Spark is back")
    _drop(stage, half, len(stage.incoming.files), stage.scale.seconds_per_file)


def _drop(stage: Stage, first: int, end: int, pause: float) -> None:
    for number in range(first, end):
        stage.players.feed.arrived(stage.incoming.drop(number, stage.files))
        time.sleep(pause)


def _tell(stage: Stage, seconds: float, kept_shards: bool) -> None:
    said, observer = stage.narration, stage.players.observer
    incoming, puts = stage.incoming, stage.measured.puts
    said.say(
        f"{stage.players.feed.name} brought {count(incoming.changes)} changes in {len(incoming.files)} "
        f"files to {len(LIBRARY_KINDS)} shards in {duration(seconds)}; a Python service put "
        f"{count(len(puts))} remarks one by one into the same shards"
    )
    low, high = np.percentile([put.seconds * 1e3 for put in puts], [50, 99])
    said.say(
        f"a put beside all that, synced to disk: median {low:.1f}\u00a0ms, 99th percentile {high:.1f}\u00a0ms"
    )
    failure = stage.players.service.failure
    said.check("no put of the service failed", failure is None, str(failure))
    said.check("nobody took a shard from the service: what others wanted there, it did for them", kept_shards)
    searches = stage.measured.searches
    said.check(
        f"{plural(observer.scans, 'scan')} and {plural(len(searches), 'search', 'searches')} meanwhile saw "
        "whole micro-batches only, every acknowledged put, and never an older state than before",
        not observer.wrong,
        "; ".join(observer.wrong[:3]),
    )
    said.check(
        "all files of the stream are in the table",
        observer.files_seen == len(incoming.files),
        f"{observer.files_seen} of {len(incoming.files)}",
    )
    _check_feed(stage)
    found = stage.open().scan(["kind", "name", "text"]).to_table()
    said.check(
        f"the table holds exactly the newest {count(found.num_rows)} documents", stage.holds_exactly(found)
    )


def _check_feed(stage: Stage) -> None:
    """The log has every change of the stream once, also those around the kill."""
    feed = ChangeFeed.open(stage.uri)
    changes = pa.Table.from_batches(feed.changes(feed.earliest(), feed.latest()), feed.schema)
    logged = Counter(
        (kind, name, change)
        for kind, name, change in zip(
            *(changes[column].to_pylist() for column in ("kind", "name", "_change_type")), strict=True
        )
        if kind in LIBRARY_KINDS and not name.startswith(REMARK)
    )
    sent = Counter(
        (each.kind, each.name, "delete" if file.withdrawn else "upsert")
        for file in stage.incoming.files
        for each in file.editions
    )
    twice = sum((logged - sent).values())
    lost = sum((sent - logged).values())
    stage.narration.check(
        f"the change feed has each of the {count(stage.incoming.changes)} changes exactly once",
        logged == sent,
        f"{lost} lost, {twice} too many",
    )


class _Compactor(Background):
    """Compacts beside everybody else, which disturbs nobody."""

    def __init__(self, table: Table, stage: Stage) -> None:
        super().__init__("demo-compactor")
        self._table = table
        self._stage = stage

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self) -> None:
        while not self.stopping.wait(_COMPACT_EVERY):
            try:
                if self._table.compact().generations:
                    self._stage.measured.compactions.append(self._stage.measured.now())
            except LanceWalError as error:
                self._stage.narration.check("compaction beside the writers", False, str(error))
