"""Files of a directory as they come."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from lancewal.ingest.files import Format, SourceFile, find_files


def watch(
    paths: Iterable[str | os.PathLike[str]],
    *,
    stop: Callable[[], bool],
    format: Format | str | None = None,
    poll_interval: float = 2.0,
    settle: float = 2.0,
    wait: Callable[[float], object] | None = None,
    now: Callable[[], float] = time.time,
) -> Iterator[list[SourceFile]]:
    """The files that are complete, at every look, until ``stop()`` is true.

    A file counts as complete when it was the same at two looks in a row, or has not been
    written to for ``settle`` seconds. Whoever writes slowly should write under a name that
    starts with a dot and rename the file when it is whole.
    """
    pause = wait or threading.Event().wait
    places = list(paths)
    seen: dict[str, tuple[int, int]] = {}
    while not stop():
        found = find_files(places, format)
        oldest = (now() - settle) * 1e9
        whole = [
            file
            for file in found
            if file.format is Format.LANCE
            or seen.get(str(file)) == file.identity
            or 0 < file.modified <= oldest
        ]
        seen = {str(file): file.identity for file in found}
        yield whole
        if not stop():
            pause(poll_interval)
