"""Replay: which WAL entries a new writer must load, and after which of them it may flush early."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from lancewal.errors import FencedError, WalTruncatedError
from lancewal.format import PUT_IDS_TAG, WalEntry
from lancewal.shard.log import WalAppender, first_unsettled, is_flushed
from lancewal.shard.tail import WalTailer

logger = logging.getLogger(__name__)

_HEADERS_AT_ONCE = 64


class Replay:
    """Reads the exact range that a claim has to restore, in order, with read-ahead.

    The range is fixed when this object is made: the sentinel (or, under the first
    epoch, the absence of any other writer) keeps it from growing.
    """

    def __init__(self, appender: WalAppender, tailer: WalTailer) -> None:
        self._appender = appender
        self._tailer = tailer
        start = first_unsettled(appender.claimed)
        end = appender.sentinel_position
        if end is None:
            # The first epoch has no predecessor, so the appender's tip is still exact.
            end = appender.next_position_hint
        #: The positions above the replay cursor, up to this writer's own sentinel.
        self.range = range(start, max(start, end))
        self._generations: dict[int, int | None] = {}
        #: The put-id tags of the entries that were read.
        self.put_ids: list[str] = []

    @property
    def next_position(self) -> int:
        """The position after the replayed range and the sentinel."""
        return self.range.stop + (1 if self._appender.sentinel_position is not None else 0)

    def entries(self) -> Iterator[WalEntry]:
        """Yield the entries with rows that no SSTable holds yet.

        Raises :class:`FencedError` on an entry of a higher epoch: a successor claimed the
        shard while this writer was opening it.
        """
        try:
            for entry in self._tailer.entries(self.range.start, self.range.stop):
                if entry.writer_epoch > self._appender.epoch:
                    raise FencedError(
                        entry.shard_id,
                        self._appender.epoch,
                        entry.writer_epoch,
                        f"(WAL replay aborted at position {entry.position})",
                    )
                if PUT_IDS_TAG in entry.tags:
                    self.put_ids.append(entry.tags[PUT_IDS_TAG])
                if entry.sentinel or self._is_flushed(entry.position, entry.generation):
                    continue
                yield entry
        except WalTruncatedError:
            # Only a successor can have flushed entries that this claim has to replay.
            self._appender.check_fenced()
            raise

    def may_split_after(self, position: int, generation: int) -> bool:
        """Whether a MemTable of ``generation`` may be flushed with ``position`` as its last entry.

        A flush raises the current generation, and replay skips entries of lower generations. So
        no later entry may belong to ``generation`` or an older one.
        """
        return not any(
            later <= generation
            for above in range(position + 1, self.range.stop)
            if (later := self._generation_at(above)) is not None
        )

    def _generation_at(self, position: int) -> int | None:
        """The generation of the rows to replay at ``position``; ``None`` without such rows or generation."""
        if position not in self._generations:
            some = range(position, min(position + _HEADERS_AT_ONCE, self.range.stop))
            for at, header in zip(some, self._tailer.headers(some.start, some.stop), strict=True):
                if header is None or header.sentinel or self._is_flushed(at, header.generation):
                    self._generations[at] = None
                else:
                    self._generations[at] = header.generation
        return self._generations[position]

    def _is_flushed(self, position: int, generation: int | None) -> bool:
        return is_flushed(self._appender.claimed, position, generation)
