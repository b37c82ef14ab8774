"""The twenty tasks run with lancewal, and the page has a figure for each of them."""

from __future__ import annotations

import pytest

from bench.user_tasks import lancewal_tasks
from bench.user_tasks.__main__ import PAGE, TOOLS, behind, lines_of, run
from bench.user_tasks.tasks import TASKS, Task


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_lancewal_does_the_task_in_the_lines_that_the_page_says(task: Task) -> None:
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {task.title} |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == 1 + len(TOOLS)
    assert str(run(lancewal_tasks, task)) == cells[1]


def test_a_wrong_result_is_no_success() -> None:
    task = next(task for task in TASKS if task.name == "count")
    with pytest.raises(AssertionError, match="count gave 4"):
        run(lancewal_tasks, Task(task.name, task.title, lambda found: found == 5))


def test_lines_are_those_that_a_user_writes() -> None:
    assert lines_of(lancewal_tasks.upsert) == 3


def test_a_task_that_takes_more_than_the_best_peer_and_a_line_is_told() -> None:
    lines = {task.name: 3 for task in TASKS}
    assert behind({"lancewal": lines, "duckdb": {**lines, "count": 1}}) == ["count rows with a condition"]
    assert behind({"lancewal": {**lines, "sql": None}, "duckdb": dict.fromkeys(lines)}) == ["ask with SQL"]


def test_nothing_on_the_page_takes_more_than_the_best_peer_and_a_line() -> None:
    _, _, after = PAGE.read_text().partition("\n| task |")
    table, _, _ = after.partition("\n| *")
    _, _, *lines = table.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {
        tool: {
            task.name: None if row[place] == "no" else int(row[place])
            for task, row in zip(TASKS, rows, strict=True)
        }
        for place, tool in enumerate(TOOLS, start=1)
    }
    assert behind(found) == []
