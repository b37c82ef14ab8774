"""Worlds of many seeds keep the guarantees; what goes wrong in them is counted, and must have gone wrong.

A seed that fails is printed with the command that runs it again, step by step the same, and with the smallest
world that still fails. ``SIMULATED_WORLDS`` says how many the soak test runs; what was met in them becomes
the figures of ``docs/testing.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from lancewal.service.presence import presence_at
from lancewal.shard.log import WalAppender
from tests import report
from tests.patience import wait_until
from tests.simulation import world as world_room
from tests.simulation.actors import new_templates, simulate
from tests.simulation.found import FOUND
from tests.simulation.oracle import OWN, BrokenError, History, Seen
from tests.simulation.pages import WANTED, page
from tests.simulation.plan import plan_of
from tests.simulation.runs import Totals, explain, in_processes, quiet, run, shrunk
from tests.simulation.store import Faults
from tests.simulation.world import LEFT_ALONE, Process, StuckError, World
from tests.tables import rows, wal_table

#: In `make test`; one in twenty of them has Lance itself in it.
WORLDS = 2000

#: What has to happen somewhere in the worlds of a run, or the run shows nothing.
INTERESTING = (
    "a put meets a fence",
    "a put beside another fails",
    "a row is deleted",
    "a take-over during a flush",
    "an emptied slot is filled again",
    "rows were compacted",
    "a compactor finds its marker stale",
    "a compactor loses a race",
    "collected wal_entries",
    "collected manifest_versions",
    "collected manifest_entries",
    "collected sstables",
    "collected orphans",
    "a log is drained",
    "a job is run again",
    "a publication is found done",
    "a publication comes too late",
    "an append is found done",
    "a pointer in the feed is dropped",
    "a forked child is refused",
    "a parent dies after its fork",
    "clone: FencedError",
    "writer: OutcomeUnknownError",
    # Owners, requests, take-over.
    "a request is done",
    "a request: its owner is gone",
    "a flush that was asked for is checked",
    "when_gone: refused for an owner",
    "never: refused for an owner",
    "the shard of a process that died on this host is taken",
    "the shard of a process that died elsewhere is taken",
    "an owner stands still for longer than its lease",
    "a service comes back",
    "a record is lost",
    "a record is of long ago",
    "a record is of the future",
    "a record is damaged",
    "a record is forged",
    "an older record comes back",
    "a request is forged",
    "a request is damaged",
    "a request is lost",
    # Upkeep and checkpoints.
    "upkeep: flush",
    "upkeep: compact",
    "upkeep: versions",
    "upkeep: collect",
    "a part of upkeep is left to another process",
    "a part of upkeep fails",
    "upkeep brings the table into shape",
    "old versions are cleaned up",
    "a checkpoint is made",
    "a checkpoint is read",
    "a checkpoint is dropped",
    "a checkpoint has that name already",
    "a checkpoint that is gone is dropped",
    "files of a checkpoint outlive their collection",
    "the files of a dropped checkpoint go",
    "rows are collected while a checkpoint is made",
)
#: What happens in a few of two thousand worlds: each change of the code makes other worlds of the same
#: seeds, so `make test` asks for most of them, and `make soak`, with fifty times as many worlds, for all.
RARE = (
    "a snapshot starts again",
    "a follower is too far behind",
    "a request is refused",
    "a request: its owner has let the shard go",
    "a shard is taken from one that lives, by mistake",
    "a shard is handed over",
    "two claim what nobody has",
)
STRIKES = (
    "a process dies",
    "a process stands still",
    "a clock is set",
    "a call is throttled",
    "a body is cut",
    "a listing is no snapshot",
    "a merge breaks before",
    "a merge breaks after",
    "delete_many half done",
    *(f"{kind} fails before" for kind in ("create", "replace", "read", "head", "list", "delete_many")),
    *(f"{kind} fails after" for kind in ("create", "replace", "delete_many")),
    *(f"{kind} breaks before" for kind in ("create", "replace", "read", "head", "list")),
    *(f"{kind} breaks after" for kind in ("create", "replace")),
    *(f"{kind} takes effect late" for kind in ("create", "replace", "delete_many")),
)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_templates(tmp_path_factory.mktemp("simulation"))


@pytest.fixture(scope="module")
def totals() -> Totals:
    """From a process of its own: among the threads and objects of other tests worlds take twice as long."""
    return in_processes(1, WORLDS, 1)


def test_worlds_keep_the_guarantees(totals: Totals, templates: Path, tmp_path: Path) -> None:
    for failure in totals.failures:
        pytest.fail(explain(failure["seed"], templates, tmp_path / "table"), pytrace=False)
    assert totals.worlds == WORLDS
    assert totals.with_lance >= WORLDS // 20
    assert totals.acknowledged > 2 * WORLDS
    assert totals.reads > 4 * WORLDS
    assert totals.feeds > WORLDS // 2


def test_every_fault_strikes(totals: Totals) -> None:
    print(json.dumps(totals.plain(), indent=1))
    assert [each for each in STRIKES if not totals.struck[each]] == []


def test_every_interesting_state_is_met(totals: Totals) -> None:
    assert [each for each in INTERESTING if not totals.met[each]] == []
    assert sum(totals.met[each] > 0 for each in RARE) > len(RARE) // 2


@pytest.mark.soak
def test_many_worlds_keep_the_guarantees(templates: Path, tmp_path: Path) -> None:
    count = int(os.environ.get("SIMULATED_WORLDS", WANTED))
    totals = in_processes(1, count)
    print(json.dumps(totals.plain(), indent=1))
    report.store("simulation", page(totals))
    for failure in totals.failures:
        pytest.fail(explain(failure["seed"], templates, tmp_path / "table"), pytrace=False)
    assert totals.worlds == count
    assert [each for each in STRIKES if not totals.struck[each]] == []
    assert [each for each in (*INTERESTING, *RARE) if not totals.met[each]] == []


def test_worlds_that_were_run_before_are_not_run_again(tmp_path: Path) -> None:
    whole = in_processes(1, 6, 2, tmp_path)
    first, second = sorted(tmp_path.iterdir())
    told = json.loads(first.read_text())
    first.write_text(json.dumps(told | {"steps": told["steps"] + 1000}))
    second.unlink()
    again = in_processes(1, 6, 2, tmp_path)
    assert again.steps == whole.steps + 1000
    assert (again.worlds, again.met, again.struck) == (6, whole.met, whole.struck)


def test_how_far_a_run_came_that_was_stopped(tmp_path: Path) -> None:
    whole = in_processes(1, 6, 2, tmp_path)
    (tmp_path / "4-7.json").unlink()
    command = [sys.executable, "-m", "tests.simulation", "1:7", "--keep", str(tmp_path), "--sum"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert told["worlds"] == 3
    assert 0 < told["steps"] < whole.steps


def test_a_seed_that_does_not_fail_again_ended_a_run(templates: Path, tmp_path: Path) -> None:
    assert explain(3, templates, tmp_path / "table").startswith("seed 3 failed, and does not when it is run")


def test_the_page_names_the_seeds_of_its_run() -> None:
    assert page(Totals(worlds=9), 101)["command"].startswith("python -m tests.simulation 101:110 ")


def test_the_page_tells_what_a_run_lacks_and_which_worlds_failed() -> None:
    known = min(FOUND)
    failures = [{"seed": seed, "error": "", "plan": ""} for seed in (known, 5)]
    text = page(Totals(worlds=9, failures=failures))["text"]
    assert f"Worlds that failed in the stored run, and pass since: seeds {known}." in text
    assert "Worlds that fail: seeds 5." in text
    assert f"Of the {WANTED:,} worlds of a whole run 9 are stored" in "".join(text)
    whole = "".join(page(Totals(worlds=WANTED))["text"])
    assert "Worlds that" not in whole
    assert "are stored" not in whole


@pytest.mark.parametrize(
    "seed",
    [7, 11, 14, 18, 40],
    ids=["light", "with owners", "with upkeep", "light too", "with Lance"],
)
def test_a_seed_decides_every_step(seed: int, templates: Path, tmp_path: Path) -> None:
    with quiet():
        one, other, third = (simulate(each, templates, tmp_path / "table") for each in (seed, seed, seed + 1))
    assert one.world.trace == other.world.trace
    assert one.met == other.met
    assert one.faults.struck == other.faults.struck
    assert one.world.trace != third.world.trace


@pytest.mark.parametrize(("seed", "what"), FOUND.items())
def test_seeds_that_found_something(seed: int, what: str, templates: Path, tmp_path: Path) -> None:
    with quiet():
        simulate(seed, templates, tmp_path / "table")


def test_a_heartbeat_of_this_process_ended_with_a_world(templates: Path, tmp_path: Path) -> None:
    """Its thread lived on, with a clock and threads of a world that was over."""
    table = wal_table(tmp_path / "real")
    with table.writer(owner_lease=timedelta(milliseconds=40), fsync=False) as writer:
        writer.put(rows(0, 1))
        here = presence_at(table._store.uri)
        for seed in range(1, 25):
            with quiet():
                simulate(seed, templates, tmp_path / "table")
            beats = here._beats
            wait_until(lambda: here._beats > beats, "the next heartbeat")  # noqa: B023


def test_a_world_in_which_nobody_can_go_on_is_stuck() -> None:
    world = World(1)
    world.spawn(Process("sleeper"), lambda: world.wait("for ever", lambda: False) and None)
    with pytest.raises(StuckError, match="sleeper"):
        world.run()


def test_a_world_ends_some_time_after_all_but_the_workers_have() -> None:
    world = World(1)
    tries: list[float] = []

    def try_again_for_ever() -> None:
        while True:
            tries.append(world.now)
            world.wait("a pause before the next try", lambda: False, 30.0)

    process = Process("writer")
    world.spawn(process, lambda: world.wait("a pause", lambda: False, 500.0) and None)
    world.spawn(process, try_again_for_ever, "lancewal-flush")
    world.run()
    assert tries[-1] > 500.0 + LEFT_ALONE - 31.0
    assert len(tries) < 500


@pytest.mark.parametrize(
    ("pause", "waits"),
    [(0.0, False), (30.0, True)],
    ids=["a worker that never pauses", "somebody waits for a worker that gets nowhere"],
)
def test_a_hang_is_no_end(pause: float, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_room, "MOST_STEPS", 1000)
    world = World(1)

    def try_again_for_ever() -> None:
        while True:
            world.wait("the next try", lambda: False, pause)

    process = Process("writer")
    world.spawn(process, try_again_for_ever, "lancewal-flush")
    if waits:
        world.spawn(process, lambda: world.wait("the flush", lambda: False) and None)
    with pytest.raises(StuckError, match="no end"):
        world.run()


def test_a_world_that_fails_is_shrunk_and_runs_again(
    templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the sentinel a claim leaves the predecessor's next position free."""
    monkeypatch.setattr(WalAppender, "fence_predecessor", lambda _: None)
    failures = run(range(1, 200), templates, tmp_path / "table").failures
    assert failures, "a missing sentinel is not noticed"
    plan = plan_of(failures[0]["seed"])
    best, error, trace = shrunk(plan, templates, tmp_path / "table")
    assert len(best.present) < len(plan.present)
    assert best.rates() != Faults() or plan.mood == "calm"
    with quiet(), pytest.raises(Exception, match=r".") as again:
        simulate(best, templates, tmp_path / "table")
    assert error.endswith(str(again.value))
    assert best.command() in "".join(again.value.__notes__)
    assert len(trace) > 10


def test_the_command_of_a_smaller_world_runs_it(tmp_path: Path) -> None:
    smaller = next(each for each in plan_of(3).smaller() if each.left_out)
    command = smaller.command().removeprefix("python ").split()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    assert str(smaller) in done.stdout


@pytest.mark.parametrize(
    ("rows", "must_show", "broken"),
    [
        ([(0, 1), (1, 1), (OWN + 1, 1)], {1}, None),
        ([(0, 2), (1, 2), (OWN + 1, 1), (OWN + 2, 2)], {1, 2}, None),
        ([(0, 1), (1, 1), (OWN + 1, 1)], {1, 2}, "lost"),
        ([(0, 1), (1, 1), (OWN + 1, 1), (OWN + 1, 1)], {1}, "twice"),
        ([(0, 2), (1, 1), (OWN + 1, 1), (OWN + 2, 2)], {1}, "half a put"),
        ([(OWN + 1, 1)], {1}, "without their registers"),
        ([(0, 1), (1, 1)], set(), "its row is missing"),
        ([(0, 1), (1, 1), (OWN + 1, 1), (OWN + 2, 2)], {1, 2}, "came after"),
        ([(0, 3), (1, 3), (OWN + 3, 3)], set(), "refused"),
        ([(0, 9), (1, 9), (OWN + 9, 9)], set(), "nobody put"),
    ],
)
def test_the_oracle_sees_what_is_wrong(
    rows: list[tuple[int, int]], must_show: set[int], broken: str | None
) -> None:
    history = _history()
    if broken is None:
        assert history.check(rows, frozenset(must_show)) >= must_show
    else:
        with pytest.raises(BrokenError, match=broken):
            history.check(rows, frozenset(must_show))


def test_the_oracle_sees_a_row_that_comes_back() -> None:
    history = _history()
    history.acknowledge_delete(history.begin_delete(1))
    both = [(0, 2), (1, 2), (OWN + 1, 1), (OWN + 2, 2)]
    with pytest.raises(BrokenError, match="deleted"):
        history.check_reader(both, Seen(), history.now())
    seen = history.check_reader([(0, 2), (1, 2), (OWN + 2, 2)], Seen(frozenset({1})), Seen())
    with pytest.raises(BrokenError, match="deleted"):
        history.check_reader(both, seen, Seen())


@pytest.mark.parametrize(
    ("order", "must_show", "broken"),
    [
        ((1, 2), {1, 2}, None),
        ((1,), {1, 2}, "lacks"),
        ((1, 2, 1), {1}, "twice"),
        ((2, 1), {1, 2}, "before one"),
        ((3,), set(), "refused"),
    ],
)
def test_the_oracle_sees_what_is_wrong_with_a_feed(
    order: tuple[int, ...], must_show: set[int], broken: str | None
) -> None:
    changes = [change for n in order for change in ((0, n), (1, n), (OWN + n, n))]
    if broken is None:
        _history().check_feed(changes, frozenset(must_show))
        with pytest.raises(BrokenError, match="half"):
            _history().check_feed(changes[:-1], frozenset())
    else:
        with pytest.raises(BrokenError, match=broken):
            _history().check_feed(changes, frozenset(must_show))


def _history() -> History:
    history = History()
    for step in (0, 10, 20):
        history.acknowledge(history.begin(step), step + 5)
    history.puts[3].acknowledged, history.puts[3].refused = None, True
    return history
