"""What the demo does, step by step; each step shows what came of it and checks it."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
from lance.mem_wal import LsmScanner, ShardSnapshot
from rich.console import Console

import lancewal
from lancewal.demo.corpus import SCHEMA, Corpus, documents, embed
from lancewal.objects import ObjectStore
from lancewal.sharding import discover_manifests

BUCKETS = 4
PUTS = 300
KILLS = 3


class Story:
    """One run of the demo in an empty directory."""

    def __init__(self, directory: Path, console: Console) -> None:
        self._uri = str(directory / "documents.lance")
        self._console = console
        self._corpus = Corpus.load()
        self._expected: dict[int, str] = {}
        self._ok = True

    def tell(self) -> bool:
        """Run every step; ``True`` when all of them showed what they should."""
        steps: list[tuple[str, Callable[[], None]]] = [
            ("Create a Lance table and give it a write path", self._create),
            ("Write documents one by one, each durable when put returns", self._write),
            ("Read them from another process while the writer is still open", self._read_elsewhere),
            ("Kill a writer with SIGKILL, three times, and recover", self._kill),
            ("Search rows that were written a moment ago, by words and by vector", self._search),
            ("Flush to SSTables and let Lance itself read them", self._flush),
            ("Compact into the base table, verify, and see what could be deleted", self._compact),
        ]
        started = time.monotonic()
        for number, (title, step) in enumerate(steps, 1):
            self._console.rule(f"[bold]{number}. {title}", align="left")
            step()
        self._console.rule(align="left")
        verdict = "[green]every step held" if self._ok else "[red]something did not hold, see above"
        self._console.print(f"{verdict}[/] ({time.monotonic() - started:.1f} s). The table is at {self._uri}")
        return self._ok

    def _create(self) -> None:
        first = self._corpus.slice(0, len(self._corpus) // 3)
        lance.write_dataset(first, self._uri, schema=SCHEMA)
        table = lancewal.initialize(self._uri, bucket=("id", BUCKETS))
        self._remember(first)
        self._say(
            f"{first.num_rows} paragraphs of Python's language reference in the base table, "
            f"{len(table.shards())} shards by hash of [cyan]id[/]"
        )

    def _write(self) -> None:
        start = len(self._corpus) // 3
        seconds = []
        table = lancewal.open(self._uri)
        with table.writer() as writer:
            for number in range(PUTS):
                row = self._corpus.slice(start + number, 1)
                began = time.perf_counter()
                writer.put(row)
                seconds.append(time.perf_counter() - began)
                self._remember(row)
            # The first paragraphs again, in a newer version: readers must see only these.
            newer = self._corpus.slice(0, 50)
            texts = pa.array([f"revised: {text}" for text in newer.column("text").to_pylist()])
            newer = newer.set_column(2, SCHEMA.field(2), texts)
            writer.put(newer)
            self._remember(newer)
            writer.delete([50, 51, 52])
            for gone in (50, 51, 52):
                del self._expected[gone]
            self._check("newest version of every document", self._rows(table))
        low, high = np.percentile(np.array(seconds) * 1e3, [50, 99])
        self._say(f"{PUTS} puts, each synced to disk: p50 {low:.2f} ms, p99 {high:.2f} ms")

    def _read_elsewhere(self) -> None:
        with lancewal.open(self._uri).writer() as writer:
            row = self._corpus.slice(len(self._corpus) - 1, 1)
            writer.put(row)
            self._remember(row)
            code = "import lancewal, sys; print(lancewal.open(sys.argv[1]).count_rows())"
            done = subprocess.run(
                [sys.executable, "-c", code, self._uri], check=True, capture_output=True, text=True
            )
        self._check(
            "another process counts every durable row",
            int(done.stdout) == len(self._expected),
            done.stdout.strip(),
        )

    def _kill(self) -> None:
        for _ in range(KILLS):
            acknowledged = self._write_and_kill(first=max(self._expected) + 1)
            rows = lancewal.open(self._uri).scan(columns=["id", "text"]).to_table().to_pylist()
            found = {row["id"]: row["text"] for row in rows}
            lost = [document for document in acknowledged if document not in found]
            self._expected = found
            self._check(
                f"all {len(acknowledged)} acknowledged rows survived the kill", not lost, f"lost {lost}"
            )

    def _write_and_kill(self, first: int) -> list[int]:
        command = [sys.executable, "-m", "lancewal.demo.crasher", self._uri, str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            acknowledged = [int(line) for line in itertools.islice(child.stdout, 40)]
            child.send_signal(signal.SIGKILL)
            return acknowledged + [int(line) for line in child.stdout if line.endswith("\n")]

    def _search(self) -> None:
        table = lancewal.open(self._uri)
        text = "the zebra crossing of a zookeeper"
        fresh = documents(range(max(self._expected) + 1, max(self._expected) + 2), ["demo"], [text])
        with table.writer() as writer:
            writer.put(fresh)
            self._remember(fresh)
            words = table.full_text_search("text", "zookeeper", k=3, columns=["id"])
            near = table.vector_search("vector", embed(text), k=3, columns=["id"])
        self._check("its words are found at once", words.column("id")[0] == fresh.column("id")[0])
        self._check("its vector is the nearest at once", near.column("id")[0] == fresh.column("id")[0])
        topics = table.full_text_search("text", "exception handler", k=3, columns=["topic"])
        self._say(f"'exception handler' finds the topics {', '.join(topics.column('topic').to_pylist())}")

    def _compact(self) -> None:
        table = lancewal.open(self._uri)
        report = table.compact()
        upserted = sum(shard.rows_upserted for shard in report.shards)
        deleted = sum(shard.rows_deleted for shard in report.shards)
        self._say(f"{upserted} rows upserted and {deleted} deleted in {report.seconds:.2f} s")
        plain = lance.dataset(self._uri).to_table(columns=["id", "text"]).to_pylist()
        self._check(
            "plain Lance reads exactly the newest rows, without lancewal",
            len(plain) == len(self._expected) and {r["id"]: r["text"] for r in plain} == self._expected,
        )
        findings = table.verify().findings
        self._check("every invariant on storage holds", not findings, str(findings[:3]))
        garbage = table.gc(dry_run=True, min_age=timedelta(0))
        self._say(f"garbage collection would remove {len(garbage.collected)} things now")

    def _flush(self) -> None:
        table = lancewal.open(self._uri)
        table.flush()
        self._check("the merged view is unchanged", self._rows(table))
        snapshots = []
        for manifest in discover_manifests(ObjectStore.from_uri(self._uri)):
            snapshot = ShardSnapshot(str(manifest.shard_id))
            snapshot = snapshot.with_current_generation(manifest.current_generation)
            for entry in manifest.sstables:
                snapshot = snapshot.with_sstable(entry.generation, entry.path)
            snapshots.append(snapshot)
        scanner = LsmScanner.from_snapshots(lance.dataset(self._uri), snapshots)
        found = {row["id"]: row["text"] for row in scanner.project(["id", "text"]).to_table().to_pylist()}
        self._check("Lance's own scanner sees the same rows in our SSTables", found == self._expected)

    def _rows(self, table: lancewal.Table) -> bool:
        rows = table.scan(columns=["id", "text"]).to_table().to_pylist()
        return len(rows) == len(self._expected) and {r["id"]: r["text"] for r in rows} == self._expected

    def _remember(self, rows: pa.Table) -> None:
        self._expected.update(
            zip(rows.column("id").to_pylist(), rows.column("text").to_pylist(), strict=True)
        )

    def _say(self, text: str) -> None:
        self._console.print(f"   {text}")

    def _check(self, claim: str, holds: bool, otherwise: str = "") -> None:
        self._ok = self._ok and holds
        mark = "[green]✓[/]" if holds else "[red]✗[/]"
        self._console.print(f"   {mark} {claim}" + ("" if holds or not otherwise else f": {otherwise}"))
