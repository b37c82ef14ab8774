"""``python -m lancewal.demo [DIRECTORY]``: tell the story and leave the table behind."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from rich.console import Console

from lancewal.demo.story import Story

DEFAULT_DIRECTORY = "demo-output"


def main(directory: str = DEFAULT_DIRECTORY) -> int:
    console = Console()
    where = Path(directory)
    if where.exists():
        shutil.rmtree(where)
    where.mkdir(parents=True)
    return 0 if Story(where, console).tell() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
