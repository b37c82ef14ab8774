"""Run simulated worlds by hand.

``python -m tests.simulation SEED`` runs one again, step by step the same, and prints its steps;
``--without``, ``--off``, ``--sizes`` and ``--schedule`` are what a smaller world of it says.
``python -m tests.simulation FIRST:END`` runs many; ``--report FILE`` stores what was met in them, and
``--store`` makes it the figures of ``docs/testing.md``. With ``--keep DIRECTORY`` they are run in chunks,
whose reports lie there: a run that was stopped goes on where it was, and ``--sum`` tells how far it came.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from tests import report
from tests.simulation.actors import Simulation
from tests.simulation.pages import page
from tests.simulation.plan import Plan, plan_of
from tests.simulation.runs import Totals, explain, in_processes, places, quiet, run, sum_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", help="one, or FIRST:END")
    parser.add_argument("--without", default="", help="numbers of actors")
    parser.add_argument("--off", default="", help="names of faults")
    parser.add_argument("--sizes", default="", help="NUMBER=SIZE of actors")
    parser.add_argument("--schedule", type=int)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a directory for the reports of chunks")
    parser.add_argument("--sum", action="store_true", help="of what --keep has; runs nothing")
    parser.add_argument("--until-failure", action="store_true", help="end with the first one")
    parser.add_argument("--store", action="store_true")
    given = parser.parse_args()
    if ":" not in given.seeds:
        return _again(_plan(given))
    first, end = map(int, given.seeds.split(":"))
    if given.sum:
        return _told(sum_of(_kept(given.keep, first, end)), given)
    with places() as (templates, directory):
        if given.processes > 1 or given.keep is not None:
            if given.keep is not None:
                given.keep.mkdir(parents=True, exist_ok=True)
            totals = in_processes(first, end - first, given.processes, given.keep)
        else:
            most = 1 if given.until_failure else 5
            totals = run(range(first, end), templates, directory, most_failures=most)
        for failure in [] if given.until_failure else totals.failures:
            print(explain(failure["seed"], templates, directory))
    return _told(totals, given)


def _kept(directory: Path, first: int, end: int) -> list[Path]:
    """The reports of chunks between two seeds."""
    found = {tuple(map(int, path.stem.split("-"))): path for path in directory.glob("*-*.json")}
    return [path for (start, stop), path in sorted(found.items()) if first <= start and stop <= end]


def _told(totals: Totals, given: argparse.Namespace) -> int:
    if given.report is not None:
        given.report.write_text(json.dumps(totals.plain(), indent=1))
    else:
        print(json.dumps(totals.plain(), indent=1))
    if given.store:
        report.store("simulation", page(totals, int(given.seeds.split(":")[0])))
    return 1 if totals.failures else 0


def _plan(given: argparse.Namespace) -> Plan:
    plan = plan_of(int(given.seeds))
    actors = list(plan.actors)
    for each in filter(None, given.sizes.split(",")):
        number, size = map(int, each.split("="))
        actors[number] = replace(actors[number], size=size)
    return replace(
        plan,
        actors=tuple(actors),
        schedule=plan.schedule if given.schedule is None else given.schedule,
        left_out=frozenset(int(number) for number in given.without.split(",") if number),
        turned_off=frozenset(name for name in given.off.split(",") if name),
    )


def _again(plan: Plan) -> int:
    with places() as (templates, directory), quiet():
        simulation = Simulation(plan, templates, directory)
        error: Exception | None = None
        try:
            simulation.run()
        except Exception as found:
            error = found
    for process, thread, place in simulation.world.trace:
        print(f"{process}/{thread}: {place}")
    print(plan)
    if error is not None:
        raise error
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
