"""How long a test waits for what has to happen: long enough for a busy machine, not for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds without what is waited for that fail a test; a bit less than pytest's own limit.
PATIENCE = 600.0


def wait_until(condition: Callable[[], object], what: str = "what is waited for") -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE:.0f} seconds: {what}"
        time.sleep(0.01)
