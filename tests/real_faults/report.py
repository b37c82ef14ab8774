"""Counts of what real faults did to every operation; ``--store`` makes them the figures of a page.

``python -m tests.real_faults.report --disks --store``, as root, breaks disks under every operation.
``python -m tests.real_faults.report --interrupts --store`` interrupts each call at each of its bytecodes,
which takes twenty minutes of one core; what each call came to is stored at once, and ``--only TEXT`` takes
those whose names have the text. Both leave the figures of the other as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lancewal.writer.flush
from tests import report
from tests.real_faults.disks import BreakableDisk, MemoryDisk
from tests.real_faults.operations import OPERATIONS, build, settle
from tests.real_faults.test_bytecodes import CASES, attempts, make_template
from tests.real_faults.test_operations import FAULTS, attempt, begin

Rows = list[list[object]]


def faults() -> Rows:
    """For each fault: operations tried, and how many raised a typed error; the others gave right answers."""
    lancewal.writer.flush.FIRST_RETRY_SECONDS = 0.001
    found: Rows = []
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


def interrupted(only: str) -> Iterator[list[object]]:
    """For each call: at how many bytecodes a signal can reach it, and at how many one did.

    Fails on the first after which a row is lost or doubled, or somebody hangs.
    """
    lancewal.writer.flush.FIRST_RETRY_SECONDS = 0.001
    for call, one_shard, keyed in (case.values for case in CASES):
        name = _name(str(call), bool(one_shard), str(keyed))
        if only not in " ".join(name):
            continue
        counted: list[int] = []

        def all_of_them(count: int, counted: list[int] = counted) -> range:
            counted.append(count)
            return range(1, count + 1)

        with tempfile.TemporaryDirectory(prefix="lancewal-report-") as place:
            template = Path(place, "template")
            make_template(template, keyed=keyed == "keyed", one_shard=bool(one_shard))
            raised = attempts(str(call), template, Path(place), bool(one_shard), all_of_them)
        yield [*name, *counted, raised, 0]


def keep_interrupts(call: str, one_shard: bool, keyed: str, counted: int, raised: int) -> None:
    """Store what a test of one call came to."""
    _keep([*_name(call, one_shard, keyed), counted, raised, 0])


def _keep(row: list[object]) -> None:
    """Beside what is stored now: somebody else may try other calls at the same time."""
    struck, reached = _stored()
    report.store("faults", page(struck, _merged(reached, row)))


def _name(call: str, one_shard: bool, keyed: str) -> list[str]:
    of = "" if call == "compact" else "ShardWriter" if one_shard else "TableWriter"
    return [call.replace("_", " "), of, keyed]


def _stored() -> tuple[Rows, Rows]:
    """The rows of disks and of interrupts."""
    stored = report.stored("faults")
    return (stored["tables"][0]["rows"], stored["tables"][1]["rows"]) if stored else ([], [])


def page(struck: Rows, reached: Rows) -> dict[str, object]:
    return {
        "title": "Real faults",
        "text": [
            "File systems that are full, read-only, forbidden, broken or without free handles, under every "
            "operation; the fault begins before the operation, and in `make soak` also before each of its "
            "storage calls. Each ends with a typed error or a right answer, and afterwards the table has "
            "exactly the rows that were acknowledged.",
            "Ctrl-C is tried at the bytecodes at which Python delivers signals, some in `make test` and all "
            "in `make soak`. Afterwards the program goes on with its writer, or hears why it cannot, and "
            "closes it; the rows are read, and after every fifth one compacted and read again. A call that "
            "has threads beside it does not take the same number of bytecodes each time: where it ended "
            "before its interrupt came, none did.",
            "Besides: disks that are unmounted under a writer, power cuts, writers that are stopped beyond "
            "the collection age while clocks are stepped, copies of a process that write under one epoch, "
            "forks, symbolic links; and a proxy in front of S3, Azure and GCS servers that refuses, cuts and "
            "loses.",
        ],
        "command": "python -m tests.real_faults.report --disks --interrupts --store",
        "figures": [
            ["operations under real faults", sum(int(str(row[1])) for row in struck)],
            ["bytecodes at which a signal can come", sum(int(str(row[3])) for row in reached)],
            ["interrupts", sum(int(str(row[4])) for row in reached)],
        ],
        "tables": [
            {
                "caption": "Faults of a disk",
                "columns": ["fault", "operations", "typed errors", "right answers", "rows lost"],
                "rows": struck,
            },
            {
                "caption": "Ctrl-C",
                "columns": ["call", "of", "table", "bytecodes", "interrupts", "rows lost or doubled"],
                "rows": reached,
            },
        ],
    }


def _merged(known: Rows, found: list[object]) -> Rows:
    """The stored rows with a new one, in the order of the calls."""
    order = [str(case.values[0]).replace("_", " ") for case in CASES]
    others = [row for row in known if row[:3] != found[:3]]
    return sorted([*others, found], key=lambda row: (order.index(str(row[0])), str(row[1]), str(row[2])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disks", action="store_true", help="break disks under every operation")
    parser.add_argument("--interrupts", action="store_true", help="interrupt calls at each bytecode")
    parser.add_argument("--only", default="", help="of the calls that are interrupted")
    parser.add_argument("--store", action="store_true", help="as figures of docs/testing.md")
    arguments = parser.parse_args()
    if arguments.disks:
        struck = faults()
        print(json.dumps(struck), flush=True)
        if arguments.store:
            report.store("faults", page(struck, _stored()[1]))
    for row in interrupted(arguments.only) if arguments.interrupts else ():
        print(json.dumps(row), flush=True)
        if arguments.store:
            _keep(row)


if __name__ == "__main__":
    main()
