"""Search fresh rows; then flush and compact everything, until plain Lance reads it."""

from __future__ import annotations

import time
from datetime import timedelta

import lance
import pyarrow as pa
from lance.mem_wal import LsmScanner, ShardSnapshot

from demo.corpus import NOTE, Edition, embed, rows
from demo.stage import Stage, directory_bytes
from lancewal.cli.console import count, duration, plural, size
from lancewal.maintenance import Severity
from lancewal.shard.discovery import discover_manifests
from lancewal.storage import ObjectStore

_COLUMNS = ["kind", "name", "text"]


def search(stage: Stage) -> None:
    """A row is found by its words and by its vector as soon as put has returned."""
    table = stage.open()
    fresh = Edition(NOTE, "zebra", 1, "the zebra crossing of a zookeeper")
    with table.writer() as writer:
        writer.put(rows([fresh]))
        stage.notes[fresh.kind, fresh.name] = fresh.text
        words = table.full_text_search("text", "zookeeper", k=3, columns=["name"])
        near = table.vector_search("vector", embed(fresh.text), k=3, columns=["name"])
    stage.narration.check("its words are found at once", words["name"].to_pylist()[:1] == [fresh.name])
    stage.narration.check("its vector is the nearest", near["name"].to_pylist()[:1] == [fresh.name])
    question = "cancel a task that waits"
    best = table.full_text_search("text", question, k=3, columns=["name"])["name"].to_pylist()
    stage.narration.say(f"“{question}” finds {', '.join(best) or 'nothing'}")


def flush(stage: Stage) -> None:
    """SSTables are Lance datasets, which Lance's own reader of its write path understands."""
    table = stage.open()
    waiting = table.status().unflushed.count
    table.flush()
    status = table.status()
    flushed = f"{plural(waiting, 'WAL entry was', 'WAL entries were')} flushed; " if waiting else ""
    stage.narration.say(
        f"{flushed}{plural(status.uncompacted.count, 'SSTable')} with "
        f"{count(status.uncompacted.rows or 0)} rows above the base table"
    )
    stage.narration.check(
        "the merged view has not changed", stage.holds_exactly(table.scan(_COLUMNS).to_table())
    )
    stage.narration.check(
        "Lance's own scanner sees the same rows in our SSTables", stage.holds_exactly(_read_by_lance(stage))
    )


def compact(stage: Stage) -> None:
    """Atomic commits; afterwards the base table is all there is."""
    table = stage.open()
    waiting = table.status().uncompacted
    began = time.monotonic()
    stage.players.feed.compact()
    stage.measured.compactions.append(stage.measured.now())
    table.compact(optimize_indexes=True)
    by = "a Spark job" if stage.spark else "this process"
    stage.narration.say(
        f"{by} brought {plural(waiting.count, 'SSTable')} into the base table in "
        f"{duration(time.monotonic() - began)}, and its index is up to date"
    )
    plain = lance.dataset(stage.uri)
    stage.narration.check(
        f"plain Lance reads exactly the newest {count(plain.count_rows())} documents, without lancewal",
        stage.holds_exactly(plain.to_table(columns=_COLUMNS)),
    )
    hits = plain.to_table(full_text_query="zookeeper", columns=["name", "_score"])["name"].to_pylist()
    stage.narration.check("and finds the note by its words", hits == ["zebra"], str(hits))
    # A killed task leaves an SSTable that no manifest names: garbage, which the collector removes.
    findings = [each for each in table.verify().findings if each.severity is not Severity.INFO]
    stage.narration.check("every invariant on storage holds", not findings, str(findings[:3]))
    garbage = table.gc(dry_run=True, min_age=timedelta(0))
    stage.narration.say(
        f"garbage collection would free {size(garbage.num_bytes)} of "
        f"{size(directory_bytes(stage.directory / 'documents.lance'))} now"
    )


def _read_by_lance(stage: Stage) -> pa.Table:
    snapshots = []
    for manifest in discover_manifests(ObjectStore.from_uri(stage.uri)):
        snapshot = ShardSnapshot(str(manifest.shard_id))
        snapshot = snapshot.with_current_generation(manifest.current_generation)
        for entry in manifest.sstables:
            snapshot = snapshot.with_sstable(entry.generation, entry.path)
        snapshots.append(snapshot)
    return LsmScanner.from_snapshots(lance.dataset(stage.uri), snapshots).project(_COLUMNS).to_table()
