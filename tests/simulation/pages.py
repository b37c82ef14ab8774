"""The simulator's part of ``docs/testing.md``."""

from __future__ import annotations

from typing import Any

from tests.simulation.found import FOUND
from tests.simulation.runs import Totals

#: Worlds of the soak test.
WANTED = 100_000

_TEXT = [
    "`tests/simulation/` runs writers, table writers, drains, compactors, collectors, readers, "
    "followers of the feed, owners and jobs that are run again and beside themselves, step by step: one seed "
    "decides which thread runs at every storage call and lock, what every clock says, and what goes "
    "wrong. Processes stall for hours, die, fork and are cloned; calls fail before or after their "
    "effect, take effect late, are throttled, lose their body; listings are no snapshots; clocks drift "
    "and are set. After every change of storage an oracle puts together what a reader has to be shown, "
    "and every read and every look at the feed is checked: acknowledged rows once, newest wins, whole "
    "batches, one snapshot, nothing that was shown is taken back, the feed once and in order, nothing "
    "needed was collected.",
    "In one world of eight processes know each other by owner records: owners that write, stall, die and "
    "come back, services, whoever asks them to flush or to adopt SSTables, and vandals who lose, date, "
    "damage, bring back and forge records and requests. The rows are checked as everywhere, whatever happens "
    "to the records. What records are for is checked where nothing goes wrong but deaths: nobody stops a "
    "writer that lives, nobody is refused or kept waiting for one that is dead, closed or superseded.",
    "In another world of eight up to three processes keep the table in shape, with real rounds of upkeep, "
    "while others make, read and drop checkpoints, old versions are cleaned up, and all die at random. "
    "A checkpoint shows the same rows from its first read to its drop, through compaction and a year of "
    "collections, also of those that ran while it was made; when it is dropped its files go. At the end one "
    "more round brings the table into shape.",
    "In nineteen of twenty worlds a base table of a few lines stands in for Lance, so that a world "
    "takes milliseconds; the others have Lance itself. A seed that fails is printed with the command "
    "that runs it again, and with the smallest world that still fails.",
]


def page(totals: Totals, first: int = 1) -> dict[str, Any]:
    """What the worlds of the seeds from ``first`` on came to."""
    return {
        "title": "A simulator: one seed decides everything",
        "text": [*_TEXT, *_progress(totals), *_failed(totals)],
        "figures": [
            ["worlds", totals.worlds],
            ["of them with Lance itself", totals.with_lance],
            ["steps", totals.steps],
            ["writes that were acknowledged and checked", totals.acknowledged],
            ["reads that were checked", totals.reads],
            ["looks at the feed that were checked", totals.feeds],
            ["seconds of one core", round(totals.seconds)],
            ["worlds that failed", len(totals.failures)],
        ],
        "tables": [
            {
                "caption": "What went wrong on purpose",
                "columns": ["fault", "times"],
                "rows": [list(each) for each in sorted(totals.struck.items())],
            },
            {
                "caption": "What was met",
                "columns": ["state", "times"],
                "rows": [list(each) for each in sorted(totals.met.items())],
            },
        ],
        "lists": [
            {
                "caption": "Seeds that failed once, which run in every `make test`",
                "items": [f"{seed}: {what}" for seed, what in FOUND.items()],
            }
        ],
        "command": f"python -m tests.simulation {first}:{first + totals.worlds} --processes 2 --store",
    }


def _progress(totals: Totals) -> list[str]:
    """A long run that was stopped, and goes on another day."""
    if totals.worlds >= WANTED:
        return []
    return [
        f"Of the {WANTED:,} worlds of a whole run {totals.worlds:,} are stored, the sum of chunks that ran "
        "one after the other while the code changed: not all are of the newest code."
    ]


def _failed(totals: Totals) -> list[str]:
    """Which worlds did, and which of them are mended: a long run goes on while the code changes."""
    seeds = [int(each["seed"]) for each in totals.failures]
    open_, mended = ([seed for seed in seeds if (seed in FOUND) is known] for known in (False, True))
    told = []
    if mended:
        told.append(f"Worlds that failed in the stored run, and pass since: {_listed(mended)}.")
    if open_:
        told.append(f"Worlds that fail: {_listed(open_)}.")
    return told


def _listed(seeds: list[int]) -> str:
    return "seeds " + ", ".join(map(str, seeds))
