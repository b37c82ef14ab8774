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


def test_the_readme_gets_the_measures_that_miss_their_target_and_keeps_the_rest() -> None:
    missed = {**_ROW, "name": "durable put, fsync", "ratio": 1.386, "target_met": False}
    results = [{"workload": "durable_latency", "rows": [_ROW, missed, {**_ROW, "target": None}]}]
    text = with_measured(f"before\n{README_START}\nold\n{README_END}\nafter\n", results)
    assert text.startswith(f"before\n{README_START}\n1 of 2 measures that have a target meet it.\n")
    assert text.endswith(f"\n{README_END}\nafter\n")
    assert "| durable put, fsync ↓ | 1.39× (Lance writer) | ≤ 0.5× missed | `durable_latency` |" in text
    assert "old" not in text
    assert "durable put ↓" not in text


def test_the_readme_has_no_table_if_every_target_is_met() -> None:
    results = [{"workload": "durable_latency", "rows": [_ROW]}]
    text = with_measured(f"{README_START}\n{README_END}\n", results)
    assert text == f"{README_START}\n1 of 1 measures that have a target meet it.\n{README_END}\n"


def test_the_readme_holds_what_was_measured_last() -> None:
    results = stored_results()
    readme = README.read_text()
    assert with_measured(readme, results) == readme
