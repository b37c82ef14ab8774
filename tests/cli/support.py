"""Commands as a user runs them: in this process, or as a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from typer.testing import CliRunner

import lancewal
from lancewal.cli.app import app, debug_first
from tests.patience import PATIENCE
from tests.tables import KEYED, rows, writable_table, write_parquet

SOURCE = Path(__file__).resolve().parents[2] / "src"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What ``--json`` printed."""
        return json.loads(self.out)

    @property
    def documents(self) -> list[Any]:
        """The lines that ``--json`` printed."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> str:
        """The one sentence on standard error; fails when there is a traceback or more than one line."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert len(lines) == 1, self.err
        assert lines[0].startswith(("error: ", "stopped: ")), self.err
        return lines[0].partition(": ")[2]


def run(*arguments: object, columns: int = 100, input: str | None = None) -> Outcome:
    """``lancewal ARGUMENTS`` in this process."""
    texts = debug_first([str(each) for each in arguments])
    environment = {"COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, texts, env=environment, input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def ok(*arguments: object, **options: Any) -> Outcome:
    """As :func:`run`, for commands that must succeed."""
    outcome = run(*arguments, **options)
    assert outcome.code == 0, outcome.err
    return outcome


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """``lancewal ARGUMENTS`` as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "lancewal.cli", *map(str, arguments)],
        env={**environment, **options.pop("env", {})},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
    )


def spawn(*arguments: object, **options: Any) -> Outcome:
    """As :func:`start`, until it ends."""
    with start(*arguments, **options) as process:
        out, err = process.communicate(timeout=PATIENCE)
    return Outcome(process.returncode, out, err)


def new_table(where: Path, count: int = 0, schema: pa.Schema = KEYED, **options: Any) -> lancewal.Table:
    """A table with a write path and ``count`` rows in its base."""
    data = pa.Table.from_batches([rows(0, count, schema=schema)]) if count else None
    return writable_table(where, schema, data, **options)


def write_files(where: Path) -> Path:
    """A directory with ids 0 to 12 in files of three formats."""
    where.mkdir()
    write_parquet(where / "a.parquet", 0, 10)
    (where / "b.csv").write_text("id,name\n10,x\n11,\n")
    (where / "c.jsonl").write_text('{"id": 12, "name": "z"}\n')
    return where
