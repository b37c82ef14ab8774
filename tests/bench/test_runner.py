from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.__main__ import main
from bench.comparison import Comparison, summarize
from bench.context import Context, Laps
from bench.registry import Registry, load_workloads
from bench.report import render
from bench.runner import run


def latency(ours: float, peer: float, target: float | None = None) -> Comparison:
    return Comparison("put", ours, peer, "ms", False, "file", target)


def rate(ours: float, peer: float, target: float | None = None) -> Comparison:
    return Comparison("scan", ours, peer, "MB/s", True, "file", target)


@pytest.fixture
def registry() -> Registry:
    registry = Registry()

    @registry.workload("second", "counts its passes")
    def second(context: Context) -> list[Comparison]:
        return [latency(ours=(4.0, 1.0, 2.0)[context.repeat], peer=4.0, target=0.5), rate(30.0, 10.0)]

    @registry.workload("first", "does little")
    def first(context: Context) -> list[Comparison]:
        (context.directory("made") / "file").write_text("x")
        return [rate(1.0, 2.0, target=3.0)]

    return registry


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs of this test keep their results."""
    directory = tmp_path / "results"
    monkeypatch.setattr("bench.__main__.RESULTS", directory)
    return directory


class TestComparison:
    def test_ratio_is_ours_by_peer_in_both_directions(self) -> None:
        assert latency(2.0, 8.0).ratio == 0.25
        assert rate(2.0, 8.0).ratio == 0.25

    def test_advantage_above_one_always_means_better(self) -> None:
        assert latency(2.0, 8.0).advantage == 4.0
        assert rate(2.0, 8.0).advantage == 0.25

    @pytest.mark.parametrize(("ours", "met"), [(3.9, True), (4.0, True), (4.1, False)])
    def test_target_bounds_a_latency_from_above(self, ours: float, met: bool) -> None:
        assert latency(ours, 8.0, target=0.5).target_met is met

    @pytest.mark.parametrize(("ours", "met"), [(15.9, False), (16.0, True), (16.1, True)])
    def test_target_bounds_a_rate_from_below(self, ours: float, met: bool) -> None:
        assert rate(ours, 8.0, target=2.0).target_met is met

    def test_without_target_nothing_is_met_or_missed(self) -> None:
        assert latency(1.0, 1.0).target_met is None

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
    def test_refuses_figures_that_give_no_ratio(self, bad: float) -> None:
        with pytest.raises(ValueError, match="put: ours measured"):
            latency(bad, 1.0)
        with pytest.raises(ValueError, match="put: peer measured"):
            latency(1.0, bad)


class TestSummary:
    def test_takes_medians_of_each_side_and_the_range_of_the_ratios(self) -> None:
        (row,) = summarize([[latency(1.0, 10.0)], [latency(9.0, 3.0)], [latency(2.0, 5.0)]])
        assert (row.median.ours, row.median.peer, row.median.ratio) == (2.0, 5.0, 0.4)
        assert (row.lowest_ratio, row.highest_ratio) == (0.1, 3.0)

    def test_one_measure_against_two_peers_gives_two_rows(self) -> None:
        against_file = Comparison("put", 1.0, 2.0, "ms", False, "file")
        against_lance = Comparison("put", 1.0, 4.0, "ms", False, "lance")
        rows = summarize([[against_file, against_lance]])
        assert [row.median.peer_name for row in rows] == ["file", "lance"]

    @pytest.mark.parametrize(
        "passes",
        [
            [],
            [[]],
            [[latency(1.0, 1.0)], []],
            [[latency(1.0, 1.0)], [rate(1.0, 1.0)]],
            [[latency(1.0, 1.0), latency(2.0, 1.0)]],
        ],
        ids=["no pass", "no row", "row missing", "other row", "row twice"],
    )
    def test_refuses_passes_that_do_not_match(self, passes: list[list[Comparison]]) -> None:
        with pytest.raises(ValueError, match="workload must return"):
            summarize(passes)


class TestContext:
    def test_sides_change_places_from_pass_to_pass(self, tmp_path: Path) -> None:
        def order(repeat: int) -> list[str]:
            ran: list[str] = []
            context = Context(tmp_path, quick=False, repeat=repeat)
            results = context.in_turn(ours=lambda: ran.append("ours"), peer=lambda: ran.append("peer"))
            assert results.keys() == {"ours", "peer"}
            return ran

        assert [order(0), order(1), order(2)] == [["ours", "peer"], ["peer", "ours"], ["ours", "peer"]]

    def test_each_side_gets_what_it_returned(self, tmp_path: Path) -> None:
        context = Context(tmp_path, quick=True, repeat=1)
        assert context.in_turn(ours=lambda: 1, peer=lambda: 2) == {"ours": 1, "peer": 2}

    def test_alternating_sides_change_places_from_call_to_call(self, tmp_path: Path) -> None:
        calls: list[tuple[str, int]] = []
        laps = Context(tmp_path, quick=False).alternate(
            3,
            ours=lambda index: calls.append(("ours", index)),
            peer=lambda index: calls.append(("peer", index)),
        )
        assert calls == [("ours", 0), ("peer", 0), ("peer", 1), ("ours", 1), ("ours", 2), ("peer", 2)]
        assert {name: len(side.seconds) for name, side in laps.items()} == {"ours": 3, "peer": 3}

    def test_quick_chooses_the_small_size(self, tmp_path: Path) -> None:
        assert Context(tmp_path, quick=True).size(full=100, quick=3) == 3
        assert Context(tmp_path, quick=False).size(full=100, quick=3) == 100

    def test_a_directory_is_never_handed_out_twice(self, tmp_path: Path) -> None:
        context = Context(tmp_path, quick=True)
        context.directory("a")
        with pytest.raises(FileExistsError):
            context.directory("a")


class TestLaps:
    def test_time_passes_arguments_and_the_result_through(self) -> None:
        laps = Laps()
        assert laps.time(lambda a, b: a - b, 5, b=3) == 2
        assert len(laps.seconds) == 1
        assert laps.total == laps.seconds[0] >= 0

    def test_percentiles(self) -> None:
        laps = Laps([float(number) for number in range(1, 102)])
        assert (laps.percentile(50), laps.percentile(99), laps.percentile(100)) == (51.0, 100.0, 101.0)


class TestRun:
    def test_every_pass_starts_in_an_empty_place_that_is_gone_afterwards(self) -> None:
        places: list[Path] = []
        registry = Registry()

        @registry.workload("w", "writes")
        def writes(context: Context) -> list[Comparison]:
            assert list(context.scratch.iterdir()) == []
            (context.directory("d") / "file").write_text("x")
            places.append(context.scratch)
            return [rate(1.0, 1.0)]

        run(registry.select(["w"])[0], repeats=3, quick=True)
        assert len(set(places)) == 3
        assert not any(place.exists() for place in places)

    def test_tells_its_progress(self, registry: Registry) -> None:
        heard: list[int] = []
        run(registry.select(["second"])[0], repeats=3, quick=False, progress=heard.append)
        assert heard == [0, 1, 2]

    def test_refuses_to_make_no_pass(self, registry: Registry) -> None:
        with pytest.raises(ValueError, match="at least one pass"):
            run(registry.select(["first"])[0], repeats=0, quick=False)


class TestCommand:
    def test_lists_workloads_by_name_and_runs_none(
        self, registry: Registry, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--list"], registry) == 0
        assert capsys.readouterr().out.splitlines() == ["first   does little", "second  counts its passes"]
        assert not results.exists()

    def test_unknown_workload_is_one_plain_sentence(
        self, registry: Registry, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["first", "third"], registry) == 2
        out, err = capsys.readouterr()
        assert err == "bench: no workload is named third; there are: first, second\n"
        assert out == ""
        assert not results.exists()

    @pytest.mark.parametrize("number", ["0", "-1", "many"])
    def test_refuses_a_senseless_number_of_passes(
        self, number: str, registry: Registry, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(["--repeat", number], registry)
        assert stopped.value.code == 2
        assert "Traceback" not in capsys.readouterr().err

    def test_a_full_run_keeps_one_file_per_workload(self, registry: Registry, results: Path) -> None:
        assert main(["second", "--repeat", "3"], registry) == 0
        assert [path.name for path in results.iterdir()] == ["second.json"]
        kept = json.loads((results / "second.json").read_text(encoding="utf-8"))
        assert kept["rows"][0] == {
            "name": "put",
            "unit": "ms",
            "higher_is_better": False,
            "ours": 2.0,
            "peer": 4.0,
            "peer_name": "file",
            "ratio": 0.5,
            "ratio_range": [0.25, 1.0],
            "advantage": 2.0,
            "target": 0.5,
            "target_met": True,
        }
        assert (kept["workload"], kept["repeats"], kept["quick"]) == ("second", 3, False)
        assert kept["rows"][1]["target_met"] is None

    def test_results_say_what_they_ran_on_and_not_where(self, registry: Registry, results: Path) -> None:
        main(["first", "--repeat", "1"], registry)
        machine = json.loads((results / "first.json").read_text(encoding="utf-8"))["machine"]
        assert machine.keys() == {
            "cores",
            "memory_gb",
            "load",
            "system",
            "architecture",
            "python",
            "libraries",
        }
        assert machine["libraries"]["pylance"]
        assert "/" not in json.dumps(machine)

    def test_a_quick_run_overwrites_nothing_that_was_kept(self, registry: Registry, results: Path) -> None:
        assert main(["first", "--quick"], registry) == 0
        assert not results.exists()

    def test_a_json_path_takes_all_results_of_the_run(
        self, registry: Registry, results: Path, tmp_path: Path
    ) -> None:
        target = tmp_path / "new" / "all.json"
        assert main(["--quick", "--json", str(target)], registry) == 0
        kept = json.loads(target.read_text(encoding="utf-8"))
        assert [(each["workload"], each["repeats"], each["quick"]) for each in kept] == [
            ("first", 1, True),
            ("second", 1, True),
        ]
        assert not results.exists()

    def test_table_shows_both_sides_the_ratio_and_the_target(self, registry: Registry) -> None:
        console = Console(width=120, record=True, quiet=False, file=None)
        with console.capture() as captured:
            console.print(render(run(registry.select(["first"])[0], repeats=1, quick=False)))
        line = next(line for line in captured.get().splitlines() if "scan" in line)
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert cells == ["scan ↑", "1.00 MB/s", "2.00 MB/s", "file", "0.500×", "≥ 3.00× missed"]


class TestRegistry:
    def test_two_workloads_cannot_share_a_name(self, registry: Registry) -> None:
        with pytest.raises(ValueError, match="two workloads are named 'first'"):
            registry.workload("first", "again")(lambda context: [])

    def test_a_workload_named_twice_runs_once(self, registry: Registry) -> None:
        assert [each.name for each in registry.select(["second", "first", "second"])] == ["second", "first"]

    def test_finds_the_workloads_of_the_package(self) -> None:
        assert "append_tail" in [each.name for each in load_workloads().all()]


class TestAppendTail:
    def test_measures_appends_with_and_without_sync_and_the_tail(self) -> None:
        (workload,) = load_workloads().select(["append_tail"])
        result = run(workload, repeats=1, quick=True)
        assert [row.median.name for row in result.rows] == [
            "append, fsync, p50",
            "append, fsync",
            "append, no fsync, p50",
            "append, no fsync",
            "tail",
        ]
