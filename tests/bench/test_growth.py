"""Curves of growing tables: how they are measured, fitted, stored and shown."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import growth_pages
from bench.comparison import Comparison, Point, summarize
from bench.context import Context
from bench.growth import FLAT, LINEAR, Growth, Measure, Steps, exponent, grow, growths
from bench.growth_profile import keep, profile
from bench.pages import with_measured
from bench.registry import Registry, load_workloads
from bench.report import Result
from bench.runner import run
from bench.workloads import steady

_SIZES = (1, 10, 100, 1000)


def _points(power: float, *, fixed: float = 0.0, sizes: Sequence[int] = _SIZES) -> list[Point]:
    return [Point(size, fixed + size**power, None) for size in sizes]


def _growth(*measures: Measure, sizes: Sequence[int] = _SIZES) -> Growth:
    def steps(context: Context, sizes: Sequence[int]) -> Steps:
        for size in sizes:
            yield size, measures

    return Growth("growth_of_nothing", "things", "nobody", sizes, sizes, steps)


def _burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class TestExponent:
    @pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 1.8])
    def test_is_the_power_of_the_size(self, power: float) -> None:
        assert exponent(_points(power)) == pytest.approx(power)

    def test_fixed_costs_of_small_sizes_do_not_hide_it(self) -> None:
        points = _points(1.0, fixed=50.0, sizes=(1, 10, 100, 10_000, 100_000, 1_000_000))
        assert exponent(points) == pytest.approx(1.0, abs=0.01)

    def test_of_a_single_point_is_none_at_all(self) -> None:
        assert exponent(_points(1.0)[:1]) == 0.0


class TestGrow:
    def test_each_operation_is_a_curve_with_its_bound(self, tmp_path: Path) -> None:
        figures = iter([1, 10, 100, 1000])
        this = _growth(Measure("objects", lambda: next(figures), bound=FLAT, unit="objects"))
        (row,) = grow(this, Context(tmp_path, quick=False))
        assert (row.name, row.points_unit) == ("objects", "objects")
        assert (row.peer_name, row.target) == ("linear", FLAT)
        assert row.points == tuple(Point(size, size, None) for size in _SIZES)
        assert row.ratio == pytest.approx(1.0)
        assert row.target_met is False

    def test_what_comes_before_a_call_is_not_measured(self, tmp_path: Path) -> None:
        calls: list[str] = []

        def prepare() -> None:
            calls.append("before")
            _burn(0.05)

        this = _growth(Measure("quick", lambda: calls.append("call"), before=prepare, samples=2), sizes=(1,))
        (row,) = grow(this, Context(tmp_path, quick=False))
        assert calls == ["before", "call"] * 2
        assert row.points[0].ours < 50

    def test_a_call_that_can_be_repeated_is_warm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # No second sample, as where a call takes long.
        monkeypatch.setattr("bench.growth._ENOUGH_SECONDS", 0.0)
        calls: list[int] = []

        def call() -> None:
            calls.append(1)
            if len(calls) == 1:
                _burn(0.05)

        (row,) = grow(_growth(Measure("warm", call), sizes=(1,)), Context(tmp_path, quick=False))
        assert row.points[0].ours < 50

    def test_the_peer_is_measured_beside_ours(self, tmp_path: Path) -> None:
        this = _growth(Measure("requests", lambda: 3, lambda: 5, unit="requests"), sizes=(1, 2))
        (row,) = grow(this, Context(tmp_path, quick=False))
        assert row.points == (Point(1, 3, 5), Point(2, 3, 5))

    def test_work_may_grow_as_the_peer_does(self, tmp_path: Path) -> None:
        bounds = {}
        for name, power, bound in [("slower", 0.5, LINEAR), ("faster", 1.2, LINEAR), ("flat", 1.2, FLAT)]:
            theirs = iter([size**power for size in _SIZES])
            measure = Measure(name, lambda: 1, lambda each=theirs: next(each), bound=bound, unit="requests")
            (row,) = grow(_growth(measure), Context(tmp_path, quick=False))
            bounds[name] = row.target
        assert bounds == {"slower": LINEAR, "faster": 1.2, "flat": FLAT}

    def test_a_slope_that_is_known_is_not_climbed_for_hours(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bench.growth._LONGEST_MILLISECONDS", 5.0)
        seconds = iter([0.001, 0.004, 0.4, 4.0])
        this = _growth(Measure("steep", lambda: _burn(next(seconds)), before=lambda: None, samples=1))
        (row,) = grow(this, Context(tmp_path, quick=False))
        assert [point.size for point in row.points] == [1, 10]

    def test_passes_keep_the_points(self) -> None:
        curve = Comparison("scan", 1.0, 1.0, "", False, "linear", 1.1, tuple(_points(1.0)), "ms")
        (row,) = summarize([[curve]])
        assert row.median.points == curve.points


class TestWorkloads:
    def test_the_first_word_names_them_all(self) -> None:
        names = [each.name for each in load_workloads().select(["growth"])]
        assert names == sorted(growths)
        assert {"growth_base", "growth_entries", "growth_shards", "growth_sstables"} <= set(names)

    def test_a_whole_name_comes_before_a_first_word(self) -> None:
        registry = Registry()
        for name in ("scan", "scan_cold"):
            registry.workload(name, "reads")(lambda context: [])
        assert [each.name for each in registry.select(["scan"])] == ["scan"]

    @pytest.mark.parametrize(
        "name",
        [
            name if name == "growth_threads" else pytest.param(name, marks=pytest.mark.soak)
            for name in sorted(load_workloads() and growths)
        ],
    )
    def test_a_quick_run_measures_every_operation_at_every_size(self, name: str) -> None:
        (workload,) = load_workloads().select([name])
        assert workload.repeats == 1
        rows = [row.median for row in run(workload, repeats=1, quick=True).rows]
        assert len(rows) >= 2
        for row in rows:
            assert [point.size for point in row.points] == list(growths[name].quick_sizes)

    def test_a_profile_names_the_functions_of_one_point(self) -> None:
        text = profile("growth_versions", "open", size=3, top=5, quick=True)
        lines = text.splitlines()
        assert lines[0].startswith("growth_versions: open at 3 base versions, ")
        assert len(lines) == 2 + 5
        whole = profile("growth_versions", "open", size=3, top=500, quick=True)
        assert str(Path(__file__).parents[2]) not in whole, "a stored profile names no directory of a machine"

    def test_profiles_are_shown_before_and_after(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("growth_profile", "growth_pages"):
            monkeypatch.setattr(f"bench.{module}.PROFILES", tmp_path)
        for label in ("after", "before"):
            keep("growth_shards: gc, nothing to do", "growth_shards", "gc, nothing to do", label)
        growth_pages.write_scale([], tmp_path)
        page = (tmp_path / "scale.md").read_text()
        assert 0 < page.index("before, growth_shards: gc") < page.index("after, growth_shards: gc")


class TestSteady:
    def test_the_last_minute_is_compared_with_the_second(self) -> None:
        minutes = [
            {"minute": number, "memory": 100 * number, **dict.fromkeys(steady.MEASURES, figure)}
            for number, figure in ((1, 9.0), (2, 2.0), (3, 3.0))
        ]
        rows = {row.name: row for row in steady.compared(minutes)}
        assert (rows["lookup"].ratio, rows["lookup"].target_met) == (1.5, False)
        assert [point.ours for point in rows["gc"].points] == [9.0, 2.0, 3.0]
        assert rows["memory beyond the start"].ours == 300

    def test_on_a_busy_machine_the_time_was_over_before_the_first_minute(self, tmp_path: Path) -> None:
        minutes: list[dict[str, object]] = []
        steady.run(tmp_path, seconds=0.0, cycle=0.5, keys=600, report=minutes.append)
        assert [minute["minute"] for minute in minutes[:1]] == [1]
        assert set(steady.MEASURES) < minutes[0].keys()


class TestPage:
    @pytest.fixture
    def results(self) -> list[dict[str, object]]:
        points = tuple(Point(size, size, size**0.5) for size in _SIZES)
        curve = Comparison("scan, warm", 1.43, 1.0, "", False, "linear", 1.1, points, "ms")
        goal = Comparison("scan, 64 SSTables", 3.0, 2.0, "ms", False, "plain read by Lance", 3.0)
        minutes = tuple(Point(minute, 2.0, None) for minute in (1, 2, 3))
        course = Comparison("lookup", 2.0, 2.0, "ms", False, "minute two", 1.3, minutes, "ms")
        return [
            json.loads(json.dumps(Result(name, f"about {name}", "2026-11-16", 1, False, {}, rows).to_dict()))
            for name, rows in (
                ("growth_sstables", summarize([[curve, goal]])),
                ("steady", summarize([[course]])),
            )
        ]

    def test_shows_each_curve_with_its_ends_and_its_exponent(
        self, results: list[dict[str, object]], tmp_path: Path
    ) -> None:
        growth_pages.write_scale(results, tmp_path)
        page = (tmp_path / "scale.md").read_text()
        assert (
            "| scan, warm | 1 ms at 1 | 1,000 ms at 1,000 | 31.6 ms | 1.43 | 0.50 | ≤ 1.1 **missed** |"
            in page
        )
        assert "scan, 64 SSTables: 3 ms, 1.5× the plain read by Lance (≤ 3 met)." in page
        assert "| lookup | 2 ms | 2 ms (minute two) | 1.00× | ≤ 1.3 met |" in page
        for name in ("scale-sstables.svg", "scale-steady.svg"):
            assert f"]({name})" in page
            assert "<svg" in (tmp_path / name).read_text()

    def test_the_readme_counts_exponents_with_the_other_goals(self, results: list[dict[str, object]]) -> None:
        marks = "<!-- measured: written by python -m bench.pages -->\n<!-- end of measured -->"
        text = with_measured(marks, results)
        assert "2 of 3 measures that have a target meet it." in text
        assert "| scan, warm ↓ | 1.43× (linear) | ≤ 1.1× missed | `growth_sstables` |" in text
