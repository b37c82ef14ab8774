"""The pages say what the stored results say."""

from __future__ import annotations

from bench.pages import README, README_END, README_START, stored_results, with_measured

_ROW = {
    "name": "durable put",
    "peer_name": "Lance writer",
    "higher_is_better": False,
    "ratio": 0.4663,
    "target": 0.5,
    "target_met": True,
}


def test_the_readme_gets_the_measures_with_a_target_and_keeps_the_rest() -> None:
    results = [{"workload": "durable_latency", "rows": [_ROW, {**_ROW, "name": "p99", "target": None}]}]
    text = with_measured(f"before\n{README_START}\nold\n{README_END}\nafter\n", results)
    assert text.startswith(f"before\n{README_START}\n")
    assert text.endswith(f"\n{README_END}\nafter\n")
    assert "| durable put ↓ | 0.466× (Lance writer) | ≤ 0.5× met | `durable_latency` |" in text
    assert "old" not in text
    assert "p99" not in text


def test_the_readme_holds_what_was_measured_last() -> None:
    results = stored_results()
    readme = README.read_text()
    assert with_measured(readme, results) == readme
