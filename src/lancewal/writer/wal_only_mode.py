"""WAL-only mode: rows go to the log and nowhere else."""

from __future__ import annotations

import threading
from typing import NoReturn

from lancewal.errors import InvalidInputError
from lancewal.memtable import MemTableView
from lancewal.writer.backpressure import Backpressure
from lancewal.writer.commit_log import CommitLog
from lancewal.writer.config import ShardWriterConfig
from lancewal.writer.intake import Rows
from lancewal.writer.results import InMemoryMemTables, MemTableStats
from lancewal.writer.state import WriterState
from lancewal.writer.stats import WriteStats
from lancewal.writer.wal_flush import WalFlushWorker


class WalOnlyMode:
    """The commit log's queue is all there is; its budget is ``max_unflushed_memtable_bytes``.

    A put that meets a full queue writes the queue itself, so nobody has to be waited for.
    """

    def __init__(
        self, config: ShardWriterConfig, log: CommitLog, state: WriterState, stats: WriteStats
    ) -> None:
        self.lock = threading.Lock()
        self._log = log
        self._state = state
        self._flusher = WalFlushWorker(config, log, state)
        self.backpressure = Backpressure(
            config.max_unflushed_memtable_bytes,
            config.backpressure_log_interval.total_seconds(),
            stats,
            unflushed=lambda: log.pending_bytes,
            relieve=self._write_queue,
            context=state.context,
        )
        state.when_ended(self.backpressure.wake)
        log.on_progress = self.backpressure.wake

    def insert(self, rows: Rows) -> range:
        return self._log.enqueue(rows.batches, rows.num_bytes)

    def nudge(self) -> None:
        self._flusher.nudge()

    def has_rows(self) -> bool:
        return False

    def finish(self) -> None:
        """Nothing beyond the log, which the writer commits itself."""

    def stop(self) -> None:
        self._flusher.stop(self._state.patience())

    def views(self) -> list[MemTableView]:
        self._refuse("scan")

    def memtables(self) -> InMemoryMemTables:
        self._refuse("in_memory_memtable_refs")

    def memtable_stats(self) -> MemTableStats:
        self._refuse("memtable_stats")

    def seal_active(self) -> None:
        self._refuse("force_seal_active")

    def wait_for_flush_drain(self) -> None:
        self._refuse("wait_for_flush_drain")

    def _write_queue(self) -> None:
        self._state.check_usable()
        self._log.commit_all()

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidInputError(
            f"{what} is not available in WAL-only mode, which has no MemTable; "
            "open the writer with enable_memtable=True, or read through Table.scan"
        )
