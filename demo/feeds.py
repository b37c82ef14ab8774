"""Who brings the stream into the table: a Spark driver in a process of its own, or this process."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

from demo.incoming import CHANGE
from demo.measurements import Arrival, Measurements
from demo.service import Service
from lancewal.errors import LanceWalError
from lancewal.table import Table

#: Longer than any step of the driver takes on a loaded machine.
_PATIENCE = 120.0


class FeedError(LanceWalError):
    """The stream ended although nobody ended it."""


class Feed(Protocol):
    """Takes the files of a directory into the table, in order, each once."""

    name: str

    def start(self) -> None: ...
    def arrived(self, file: Path) -> None:
        """A file was put into the directory."""

    def drain(self) -> None:
        """Return when every file so far is in the table."""

    def compact(self) -> None:
        """End the stream and bring everything into the base table."""

    def close(self) -> None: ...


class SparkFeed:
    """A Spark driver; it may be killed at any moment and started again."""

    name = "Spark"

    def __init__(self, uri: str, directory: Path, incoming: Path, measured: Measurements) -> None:
        self._uri = uri
        self._incoming = incoming
        self._checkpoint = directory / "checkpoint"
        self._log = directory / "spark.log"
        self._measured = measured
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._child: subprocess.Popen[str] | None = None
        self.version = ""
        self.batches = 0
        self.kills = 0

    def launch(self) -> None:
        """Start the driver, which takes some seconds, and do not wait for it."""
        command = [sys.executable, "-m", "demo.spark_child"]
        command += [self._uri, str(self._incoming), str(self._checkpoint)]
        self._events = queue.Queue()
        with self._log.open("a") as log:
            # A session of its own: the driver is killed together with the JVM that it starts.
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._listen, args=(self._child, self._events), daemon=True).start()

    def start(self) -> None:
        """Return when the stream runs."""
        self.version = self._wait_for("ready")["spark"]
        self._ask("stream")

    def arrived(self, file: Path) -> None:
        """Spark finds it by itself."""

    def wait_for_batches(self, number: int) -> None:
        while self.batches < number:
            self._wait_for("batch")

    def kill(self) -> None:
        """SIGKILL, for the driver and its JVM: nothing is tidied up."""
        assert self._child is not None
        os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self.kills += 1

    def drain(self) -> None:
        self._ask("drain")

    def compact(self) -> None:
        self._ask("compact")

    def close(self) -> None:
        if self._child is None or self._child.poll() is not None:
            return
        assert self._child.stdin is not None
        try:
            self._child.stdin.close()
            self._child.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(f"{command}\n")
            self._child.stdin.flush()
        except OSError:
            raise self._ended() from None
        return self._wait_for(command)

    def _wait_for(self, name: str) -> dict[str, Any]:
        while True:
            try:
                event = self._events.get(timeout=_PATIENCE)
            except queue.Empty:
                raise FeedError(f"Spark said nothing for {_PATIENCE:.0f} s; its log is {self._log}") from None
            if event is None:
                raise self._ended()
            if event["event"] == name:
                return event

    def _ended(self) -> FeedError:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return FeedError(f"Spark ended: {lines[-1] if lines else 'it said nothing'}; its log is {self._log}")

    def _listen(self, child: subprocess.Popen[str], events: queue.Queue[dict[str, Any] | None]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                # The JVM has the same standard output, and may have something to say as well.
                continue
            if event["event"] == "batch":
                self.batches += 1
                self._measured.arrivals.append(Arrival(self._measured.now(), event["rows"]))
            events.put(event)
        events.put(None)


class LocalFeed:
    """The same stream through the service's own writer, for machines without Spark."""

    name = "a second thread"

    def __init__(self, table: Table, service: Service, measured: Measurements) -> None:
        self._table = table
        self._writer = service.writer
        self._measured = measured

    def start(self) -> None:
        """Nothing to start: rows are written as they arrive."""

    def arrived(self, file: Path) -> None:
        rows = pq.read_table(file)
        withdrawn = rows[CHANGE][0].as_py() == "delete"
        rows = rows.drop_columns([CHANGE])
        if withdrawn:
            self._writer.delete(rows.select(["kind", "name"]))
        else:
            self._writer.put(rows)
        self._measured.arrivals.append(Arrival(self._measured.now(), rows.num_rows))

    def drain(self) -> None:
        """Every put has returned."""

    def compact(self) -> None:
        self._table.flush()
        self._table.compact()

    def close(self) -> None:
        """The writer is the service's to close."""
