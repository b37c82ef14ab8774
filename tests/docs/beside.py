"""A writer in another process, which goes on while pages are run that speak of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.docs.blocks import ROOT

# Each line asks for one row; the answer says what became of it.
_CHILD = """
import sys
import lancewal, pyarrow as pa
from lancewal.errors import LanceWalError, PartialWriteError

table = lancewal.open(sys.argv[1])
writer = table.writer()
for line in sys.stdin:
    word, number = line.split()
    try:
        if word == "open":
            writer = table.writer()
        rows = pa.table({"id": [int(number)], "name": ["beside"]}, table.schema)
        writer.put(rows)
        print("written", flush=True)
    except PartialWriteError as error:
        print(type(next(iter(error.failed.values()))).__name__, flush=True)
    except LanceWalError as error:
        print(type(error).__name__, flush=True)
"""


class WriterBeside:
    """One open ``TableWriter`` of another process, on the shard of one key."""

    KEY = 1_000_000

    def __init__(self, table: Path) -> None:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(table)],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.put() == "written"

    def put(self) -> str:
        """Have it put a row: ``"written"``, or the name of the error that it got."""
        return self._ask("put")

    def open(self) -> None:
        """Have it open its writer anew."""
        assert self._ask("open") == "written"

    def _ask(self, word: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word} {self.KEY}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def __enter__(self) -> WriterBeside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # It may hold a writer that was fenced, whose end is of no interest.
        self._process.kill()
        self._process.communicate()
