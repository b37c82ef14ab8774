"""Counts of what real faults did to every operation; ``--store`` makes them the figures of a page.

python -m tests.real_faults.report --store      (as root)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import lancewal.writer.flush
from tests.real_faults.disks import BreakableDisk, MemoryDisk
from tests.real_faults.operations import OPERATIONS, build, settle
from tests.real_faults.signals import InterruptAt
from tests.real_faults.test_bytecodes import CALLS, Trial, make_template
from tests.real_faults.test_operations import FAULTS, attempt, begin
from tests.report import store


def faults() -> list[list[object]]:
    """For each fault: operations tried, and how many raised a typed error; the others gave right answers."""
    lancewal.writer.flush.FIRST_RETRY_SECONDS = 0.001
    found: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="lancewal-report-") as place:
        os.chmod(place, 0o755)
        template = Path(place, "template")
        rows = build(template)
        for name, fault in FAULTS.items():
            home = Path(place, name.replace(" ", "-"))
            home.mkdir()
            disk = BreakableDisk(home) if name == "EIO" else MemoryDisk(home)
            try:
                refused = 0
                for operation in OPERATIONS:
                    where = disk.path / operation
                    where.mkdir()
                    scene = begin(where, (template, rows))
                    refused += attempt(scene, operation, fault(disk))
                    settle(scene)
                    shutil.rmtree(where)
            finally:
                disk.remove()
            found.append([name, len(OPERATIONS), refused, len(OPERATIONS) - refused, 0])
    return found


def places() -> list[list[object]]:
    """For each call: at how many bytecodes a signal can reach it."""
    found: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="lancewal-report-") as place:
        for number, (name, call) in enumerate(CALLS.items()):
            for one_shard in (True, False):
                if one_shard and name == "compact":
                    continue
                home = Path(place, f"{number}-{one_shard}")
                make_template(home / "template", keyed=True, one_shard=one_shard)
                counted = InterruptAt(0)
                call(Trial(home / "template", home / "table", one_shard), counted)
                who = "" if name == "compact" else "ShardWriter" if one_shard else "TableWriter"
                found.append([name.replace("_", " "), who, counted.seen])
    return found


def report() -> dict[str, object]:
    struck, reached = faults(), places()
    return {
        "title": "Real faults",
        "text": [
            "File systems that are full, read-only, forbidden, broken or without free handles, under every "
            "operation; the fault begins before the operation, and in `make soak` also before each of its "
            "storage calls. Each ends with a typed error or a right answer, and afterwards the table has "
            "exactly the rows that were acknowledged. Ctrl-C is tried at the bytecodes at which Python "
            "delivers signals, some in `make test` and all in `make soak`.",
            "Besides: disks that are unmounted under a writer, power cuts, writers that are stopped beyond "
            "the collection age while clocks are stepped, copies of a process that write under one epoch, "
            "forks, symbolic links; and a proxy in front of S3, Azure and GCS servers that refuses, cuts and "
            "loses.",
        ],
        "command": "python -m tests.real_faults.report",
        "figures": [
            ["operations under real faults", sum(int(str(row[1])) for row in struck)],
            ["bytecodes at which a signal can come", sum(int(str(row[2])) for row in reached)],
        ],
        "tables": [
            {
                "caption": "Faults of a disk",
                "columns": ["fault", "operations", "typed errors", "right answers", "rows lost"],
                "rows": struck,
            },
            {"caption": "Ctrl-C", "columns": ["call", "of", "bytecodes"], "rows": reached},
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", action="store_true", help="as figures of docs/testing.md")
    arguments = parser.parse_args()
    found = report()
    print(json.dumps(found, indent=1, ensure_ascii=False))
    if arguments.store:
        store("faults", found)


if __name__ == "__main__":
    main()
