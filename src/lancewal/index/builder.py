"""Graphs are built in the background, one at a time in a process, oldest request first.

The thread exists while there is work. It holds no index alive: the graph of an index
that was dropped is abandoned.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol

from lancewal.forks import is_forked
from lancewal.index.distance import Vectors
from lancewal.index.kinds import VectorParams
from lancewal.parallel import Bell, start_thread

if TYPE_CHECKING:
    from lancewal.index.graph import Graph

logger = logging.getLogger(__name__)


class Buildable(Protocol):
    """An index whose sealed vectors want graphs."""

    params: VectorParams

    def next_without_graph(self) -> Vectors | None: ...
    def take_graph(self, held: Vectors, graph: Graph | None) -> None: ...


class GraphBuilder:
    """The queue and its thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[weakref.ref[Buildable]] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._idle = Bell()

    def request(self, index: Buildable) -> None:
        """Build what ``index`` has to build, some time soon."""
        with self._lock:
            self._queue.append(weakref.ref(index))
            if self._thread is None and not self._stopping:
                # A daemon, stopped by atexit between two steps: work must not keep a process alive.
                thread = threading.Thread(target=self._run, name="lancewal-graphs", daemon=True)
                start_thread(thread)
                self._thread = thread

    def stop(self) -> None:
        """Abandon the work; the current step is waited for."""
        if is_forked():
            return  # the work and the thread are the parent's
        with self._lock:
            self._stopping = True
        self._idle.wait_for(lambda: self._thread is None)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopping or not self._queue:
                    self._thread = None
                    break
                reference = self._queue.popleft()
            self._build(reference)
        self._idle.ring()

    def _build(self, reference: weakref.ref[Buildable]) -> None:
        index = reference()
        held = None if index is None else index.next_without_graph()
        if index is None or held is None:
            return
        params = index.params
        del index
        graph = None
        try:
            # faiss takes long to import, and most MemTables never need it.
            from lancewal.index.graph import build_graph

            graph = build_graph(held, params, lambda: self._stopping or reference() is None)
        except Exception:
            logger.exception(
                "a vector graph could not be built; its %d rows are searched exactly", len(held.rows)
            )
        index = reference()
        if index is not None and not self._stopping:
            index.take_graph(held, graph)


BUILDER = GraphBuilder()
atexit.register(BUILDER.stop)
