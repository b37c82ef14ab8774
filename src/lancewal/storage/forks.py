"""Forked children: they may not use lancewal once their parent has used it.

Lance and the object stores run their own threads, which a child does not inherit. In experiments some
calls to Lance in such a child worked, some crashed, and some never returned. And a writer that the
child inherits belongs to the parent: both would write under one epoch, and rows that were acknowledged
to the child would be lost. So all calls are refused in the child.

A child that was forked before its parent used lancewal is like any other process.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from lancewal.errors import ForkedError

_used = False
_forked = False


def check_process() -> None:
    """Raise :class:`ForkedError` in a child that was forked after lancewal was used."""
    if _forked:
        raise ForkedError(
            f"process {os.getpid()} was forked from one that had used lancewal, whose writers, tables and "
            "threads do not work here; start processes by spawn (multiprocessing.get_context('spawn')), "
            "or fork before the first table is opened, and open tables in each process"
        )


def is_forked() -> bool:
    """Whether this process was forked from one that had used lancewal."""
    return _forked


def note_use() -> None:
    """Record that lancewal was used: children forked from now on cannot use it."""
    global _used
    _used = True


def in_forked_child(reset: Callable[[], None]) -> None:
    """Call ``reset`` in every forked child, to clear state that the child must not inherit."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)


def _mark() -> None:
    global _forked
    _forked = _used


in_forked_child(_mark)
