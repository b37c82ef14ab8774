"""Many worlds, also in several processes; what was met in them, and the smallest that fails."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.simulation.actors import Simulation, new_templates, simulate
from tests.simulation.plan import Plan, plan_of

#: Worlds of one process: what they leave in memory goes with it.
CHUNK = 1000
#: Other orders that are tried for a world with one thing less.
_ORDERS = 6
_MOST_TRIES = 400


@dataclass
class Totals:
    """What many worlds came to."""

    worlds: int = 0
    with_lance: int = 0
    steps: int = 0
    acknowledged: int = 0
    reads: int = 0
    feeds: int = 0
    seconds: float = 0.0
    met: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Totals) -> None:
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def plain(self) -> dict[str, Any]:
        return {
            name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()
        }

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Totals:
        totals = cls(**plain)
        totals.met, totals.struck = Counter(plain["met"]), Counter(plain["struck"])
        return totals


@contextmanager
def quiet() -> Iterator[None]:
    """Processes that die leave warnings by the hundred."""
    hook = sys.unraisablehook
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # a writer of a dead process cannot end its threads, as it should not
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook


def run(seeds: Iterable[int], templates: Path, directory: Path, *, most_failures: int = 1) -> Totals:
    """The worlds of some seeds; what fails is shrunk and told, and ``most_failures`` of it end the run."""
    totals, started = Totals(), time.process_time()
    with quiet():
        for seed in seeds:
            plan = plan_of(seed)
            totals.worlds += 1
            totals.with_lance += not plan.is_light
            try:
                world = simulate(plan, templates, directory)
            except Exception as error:
                totals.failures.append({"seed": seed, "error": _told(error), "plan": str(plan)})
                if len(totals.failures) >= most_failures:
                    break
                continue
            totals.steps += world.world.steps
            totals.met += world.met
            totals.struck += world.faults.struck
            totals.acknowledged += len(world.history.acknowledged())
            totals.reads += world.history.reads
            totals.feeds += world.history.fed
    totals.seconds = time.process_time() - started
    return totals


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def shrunk(plan: Plan, templates: Path, directory: Path) -> tuple[Plan, str, list[tuple[str, str, str]]]:
    """The smallest world that still fails, how, and the steps of it."""
    with quiet():
        tries = 0
        best, error, trace = plan, *_failure(plan, templates, directory)
        assert error is not None, f"{plan.command()} does not fail"
        is_smaller = True
        while is_smaller and tries < _MOST_TRIES:
            is_smaller = False
            for less in best.smaller():
                for order in range(_ORDERS):
                    tries += 1
                    candidate = less if order == 0 else replace(less, schedule=1_000_000 + order)
                    found, steps = _failure(candidate, templates, directory)
                    if found is not None:
                        best, error, trace, is_smaller = candidate, found, steps, True
                        break
                if is_smaller or tries >= _MOST_TRIES:
                    break
    return best, error, trace


def _failure(plan: Plan, templates: Path, directory: Path) -> tuple[str | None, list[tuple[str, str, str]]]:
    simulation = Simulation(plan, templates, directory)
    try:
        simulation.run()
    except Exception as error:
        return _told(error), simulation.world.trace
    return None, simulation.world.trace


def explain(seed: int, templates: Path, directory: Path, *, steps: int = 60) -> str:
    """Of a seed that fails: the smallest world that does, how to run both again, and its last steps."""
    plan = plan_of(seed)
    with quiet():
        again, _ = _failure(plan, templates, directory)
    if again is None:  # the last look at a world has the machine's clock, which may have stood still
        return f"seed {seed} failed, and does not when it is run again: {plan.command()}"
    best, error, trace = shrunk(plan, templates, directory)
    lines = [
        f"seed {seed} fails; again: {plan.command()}",
        f"  {plan}",
        f"smaller: {best.command()}",
        f"  {best}",
        f"  {error}",
        f"its last steps of {len(trace)}:",
        *(f"  {process}/{thread}: {place}" for process, thread, place in trace[-steps:]),
    ]
    return "\n".join(lines)


def in_processes(first: int, count: int, processes: int | None = None, kept: Path | None = None) -> Totals:
    """Many worlds, in chunks, each in a process of its own.

    The reports of chunks lie in the directory ``kept`` if there is one: what lies there already is not run
    again, so that a run that was stopped goes on where it was.
    """
    processes = processes or os.cpu_count() or 1
    chunk = max(1, min(CHUNK, -(-count // processes)))
    chunks = [range(start, min(start + chunk, first + count)) for start in range(first, first + count, chunk)]
    with tempfile.TemporaryDirectory() as place:
        reports = {seeds: (kept or Path(place)) / f"{seeds.start}-{seeds.stop}.json" for seeds in chunks}
        waiting = [seeds for seeds in chunks if not reports[seeds].exists()]
        running: list[tuple[subprocess.Popen[bytes], Path, Path]] = []
        while waiting or running:
            while waiting and len(running) < processes:
                seeds = waiting.pop(0)
                unfinished = Path(place) / f"{seeds.start}.json"
                command = [sys.executable, "-m", "tests.simulation", f"{seeds.start}:{seeds.stop}"]
                process = subprocess.Popen([*command, "--report", str(unfinished)])
                running.append((process, unfinished, reports[seeds]))
            process, unfinished, report = running.pop(0)
            process.wait()
            shutil.move(unfinished, report)
        return sum_of(reports.values())


def sum_of(reports: Iterable[Path]) -> Totals:
    """What chunks came to that ran by themselves."""
    totals = Totals()
    for report in reports:
        totals.add(Totals.of(json.loads(report.read_text())))
    return totals


@contextmanager
def places() -> Iterator[tuple[Path, Path]]:
    """Empty tables to copy, and where to copy one to."""
    with tempfile.TemporaryDirectory() as place:
        yield new_templates(Path(place) / "templates"), Path(place) / "table"
