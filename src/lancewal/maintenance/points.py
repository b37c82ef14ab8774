"""Named moments at which a process may die; tests stop it there, nothing else happens.

Every point lies between two steps that storage sees one after the other. A test installs a
hook in a child process that kills it at one of them, and then checks that no reader can
tell, and that the next run ends what this one began.
"""

from __future__ import annotations

from collections.abc import Callable

#: In the order in which compaction with a key passes them.
MERGE_POINTS = (
    "merge: rows are read",
    "merge: a part of the rows is committed",
    "merge: rows and marker are committed",
)
#: Compaction without a key.
APPEND_POINTS = (
    "append: files are written",
    "append: rows and tag are committed",
    "append: the marker is committed",
    "append: the tag is removed",
)
#: Garbage collection.
COLLECT_POINTS = (
    "collect: nothing is deleted yet",
    "collect: manifest entries are pruned",
    "collect: a WAL entry is deleted",
    "collect: an SSTable is half deleted",
    "collect: an SSTable is deleted",
    "collect: an old manifest is deleted",
)
POINTS = (*MERGE_POINTS, *APPEND_POINTS, *COLLECT_POINTS)

_hook: Callable[[str], object] | None = None


def reached(point: str) -> None:
    """Called at every point; does nothing unless a test asked for it."""
    if _hook is not None:
        _hook(point)


def on_reached(hook: Callable[[str], object] | None) -> None:
    """Call ``hook`` with the name of every point that this process reaches from now on."""
    global _hook
    _hook = hook
