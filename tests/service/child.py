"""A process that writes to a table as it is told: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import lancewal
from lancewal.errors import LanceWalError, PartialWriteError
from tests.tables import rows

ROOT = Path(__file__).parents[2]
#: Long enough for a busy machine to write three heartbeats in it.
LEASE = 3.0


class WritingProcess:
    """Another process with a writer; killed at the end unless it was told to quit."""

    def __init__(self, table: lancewal.Table, *, lease: float = LEASE, **settings: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.service.child"],
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        options = dict(table._store.storage_options)
        self.send({"uri": table.uri, "options": options, "lease": lease, "settings": settings})
        self.answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, what: str, **arguments: Any) -> Any:
        """Have it done; what it raised is given as ``{"error": class, "text": …}``."""
        self.send({"do": what, **arguments})
        return self.answer()

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def __enter__(self) -> WritingProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class _Child:
    def __init__(self, told: Mapping[str, Any]) -> None:
        self.table = lancewal.open(told["uri"], told["options"])
        lease = timedelta(seconds=told["lease"])
        self.writer = self.table.writer(fsync=False, owner_lease=lease, **told["settings"])

    def put(self, start: int, count: int, prefix: str = "name") -> int:
        return self.writer.put(rows(start, count, prefix=prefix)).num_rows

    def fill(self, start: int, count: int) -> list[int]:
        """Put rows one by one; those that were acknowledged."""
        return [number for number in range(start, start + count) if self.put(number, 1)]

    def flush(self) -> None:
        self.table.flush(fsync=False)

    def close(self) -> None:
        self.writer.close()


def _run(child: _Child, told: dict[str, Any]) -> Any:
    what = told.pop("do")
    try:
        return {"done": getattr(child, what)(**told)}
    except LanceWalError as error:
        cause = next(iter(error.failed.values())) if isinstance(error, PartialWriteError) else error
        return {"error": type(cause).__name__, "text": str(cause)}


def main() -> None:
    child: _Child | None = None
    for line in sys.stdin:
        told = json.loads(line)
        if child is None:
            child = _Child(told)
            reply: Any = "ready"
        else:
            reply = _run(child, told)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
