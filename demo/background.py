"""Work that goes on beside the story until it is told to stop."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class Background(ABC):
    """A thread whose :meth:`run` looks at ``stopping`` and ends when it is set."""

    def __init__(self, name: str) -> None:
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Tell it to stop and wait until it has; harmless when it never started."""
        self.stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    @abstractmethod
    def run(self) -> None:
        """The work, which must not raise."""
