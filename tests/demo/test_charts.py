"""Charts are well-formed and stay inside their frame."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st

from demo.charts import WIDTH, Axis, Note, Series, histogram, lines, stacked

AMOUNTS = st.lists(st.floats(0, 1e9), min_size=2, max_size=30)


def inside(svg: str) -> bool:
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    points = [point.split(",") for each in root.iter() for point in each.attrib.get("points", "").split()]
    return all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in points)


@given(AMOUNTS)
def test_any_amounts_can_be_drawn(values: list[float]) -> None:
    x = [float(place) for place in range(len(values))]
    series = [Series("a < b", "c1", values), Series("c", "c2", values[::-1])]
    notes = [Note(x[-1], "at the end & beyond"), Note(x[0], "begin"), Note(x[0], "again")]
    for drawn in (lines(x, series, "rows", notes), stacked(x, series, "rows", notes)):
        assert inside(drawn)
        assert drawn.count('class="note"') == 3


@given(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=200))
def test_a_histogram_counts_every_value_once(values: list[float]) -> None:
    drawn = histogram(values, "c1", "ms")
    ElementTree.fromstring(drawn)
    counted = re.findall(r"<title>([\d,]+) between", drawn)
    assert sum(int(each.replace(",", "")) for each in counted) == len(values)


def test_areas_are_stacked() -> None:
    drawn = stacked([0, 1], [Series("low", "c1", [1, 1]), Series("high", "c2", [3, 3])], "rows")
    low, high = (
        [tuple(map(float, point.split(","))) for point in points.split()]
        for points in re.findall(r'points="([^"]+)"', drawn)
    )
    assert low[:2] == high[:1:-1]
    assert high[0][1] < low[0][1]


def test_logarithmic_places_are_even() -> None:
    axis = Axis(1, 100, 0, WIDTH, logarithmic=True)
    assert axis.place(10) == WIDTH / 2
