"""Files of a directory as they come."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator

from lancewal.ingest.files import Format, SourceFile, find_files


def watch(
    paths: Iterable[str | os.PathLike[str]],
    *,
    stop: Callable[[], bool],
    format: Format | str | None = None,
    poll_interval: float = 2.0,
    wait: Callable[[float], object] | None = None,
) -> Iterator[list[SourceFile]]:
    """The files that are complete, at every look, until ``stop()`` is true.

    A file counts as complete when it was the same at two looks in a row. Its age does not
    count: the clock that stamps it may be behind this machine's. Whoever writes slowly should
    write under a name that starts with a dot and rename the file when it is whole.
    """
    pause = wait or threading.Event().wait
    places = list(paths)
    seen: dict[str, tuple[int, int]] = {}
    while not stop():
        found = find_files(places, format)
        whole = [
            file for file in found if file.format is Format.LANCE or seen.get(str(file)) == file.identity
        ]
        seen = {str(file): file.identity for file in found}
        yield whole
        if not stop():
            pause(poll_interval)
