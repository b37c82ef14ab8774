"""Every order of the protocol's steps keeps its promises; without any one of its rules some order does not.

``python -m tests.protocol.test_protocol`` prints the counter-examples; with ``--store`` it also stores the
figures of ``docs/testing.md``.
"""

from __future__ import annotations

import sys
from functools import cache

import pytest

from tests import report
from tests.protocol.checker import Checked, check
from tests.protocol.model import Collector, Compactor, Protocol, Reader, Rule, State, Writer


def _start(*writers: Writer, compactors: int = 0, collections: int = 0, reads: int = 0) -> State:
    return State(
        writers=writers,
        compactors=(Compactor(),) * compactors,
        collector=Collector(rounds=collections),
        reader=Reader(reads=reads),
    )


def _writer(*rows: int, flushes: int = 1, is_lance: bool = False) -> Writer:
    return Writer(to_put=rows, flushes=flushes, is_lance=is_lance)


#: Small shards, and who is at work on them.
STARTS = {
    "a take-over and a collection": _start(_writer(1, 2), _writer(3), collections=1),
    "two take-overs and a collection": _start(_writer(1), _writer(2), _writer(3, flushes=0), collections=1),
    "a writer of Lance after a collection": _start(_writer(1, 2), _writer(3, is_lance=True), collections=1),
    "a take-over beside two compactors": _start(_writer(1), _writer(2), compactors=2),
    "compaction and collection, read twice": _start(
        _writer(1, 2, flushes=2), compactors=1, collections=1, reads=2
    ),
}

#: For each rule who shows what becomes of a shard without it.
SHOWN_BY = {
    Rule.CREATE_MANIFEST_ONCE: "a take-over and a collection",
    Rule.CREATE_ENTRY_ONCE: "a take-over and a collection",
    Rule.SENTINEL: "a take-over and a collection",
    Rule.END_BEFORE_CLAIM: "a take-over and a collection",
    Rule.CONFLICT_CHECKS_EPOCH: "a take-over and a collection",
    Rule.SEARCH_THEN_CHECK: "two take-overs and a collection",
    Rule.RECHECK_AFTER_WRITE: "a take-over and a collection",
    Rule.AGE_OF_GARBAGE: "a take-over and a collection",
    Rule.COLLECT_BELOW_CURSOR: "a take-over and a collection",
    Rule.KEEP_LAST_ENTRY: "a writer of Lance after a collection",
    Rule.FLUSH_CHECKS_EPOCH: "a take-over and a collection",
    Rule.FLUSH_COVERS_ITS_ROWS: "a take-over and a collection",
    Rule.SSTABLE_BEFORE_MANIFEST: "a take-over and a collection",
    Rule.REPLAY_SKIPS_FLUSHED: "a take-over and a collection",
    Rule.ROWS_WITH_MARKER: "a take-over beside two compactors",
    Rule.MARKER_IS_COMPARED: "a take-over beside two compactors",
    Rule.PRUNE_BELOW_MARKER: "a take-over beside two compactors",
    Rule.BASE_LAST: "compaction and collection, read twice",
    Rule.MARKER_BELOW_GENERATION: "compaction and collection, read twice",
    Rule.MANIFEST_TWICE: "compaction and collection, read twice",
    Rule.VANISHED_ENTRY: "compaction and collection, read twice",
    Rule.HIDE_COMPACTED: "compaction and collection, read twice",
}


def _without(rule: Rule) -> Checked:
    return check(Protocol(rule), STARTS[SHOWN_BY[rule]])


@cache
def _checked(name: str) -> Checked:
    return check(Protocol(), STARTS[name])


@pytest.mark.parametrize("name", STARTS)
def test_no_order_of_steps_breaks_a_promise(name: str) -> None:
    checked = _checked(name)
    assert checked.counter_example is None, str(checked.counter_example)
    assert checked.states > 1000


@pytest.mark.parametrize("rule", Rule)
def test_without_any_one_rule_a_promise_is_broken(rule: Rule) -> None:
    example = _without(rule).counter_example
    assert example is not None, f"nothing shows that this is needed: {rule}"


def test_every_step_of_the_model_is_taken() -> None:
    """A model whose actors get nowhere would keep every promise."""
    names = {name for start in STARTS for name in _checked(start).steps}
    taken = {"".join(letter for letter in name if not letter.isdigit()) for name in names}
    expected = (
        "writer : claims epoch ",
        "writer : loses the claim to another",
        "writer : puts the sentinel at ",
        "writer : puts the sentinel at  and looks again",
        "writer : puts row  at : acknowledged",
        "writer : finds position  taken",
        "writer : was superseded",
        "writer : an entry vanished: a successor has flushed it",
        "writer : loses the commit to another",
        "writer : publishes generation ",
        "collector: deletes entry ",
        "compactor : commits rows and marker ",
        "compactor : prunes the manifest",
        "reader: a flush came in between",
        "reader: an entry vanished: starts again",
        "reader: the base is ahead: starts again",
    )
    assert set(expected) <= taken, set(expected) - taken


@pytest.mark.soak
@pytest.mark.parametrize("collections", [0, 1])
def test_everybody_at_once_breaks_no_promise(collections: int) -> None:
    start = _start(_writer(1), _writer(2), compactors=1, collections=collections, reads=1)
    checked = check(Protocol(), start, most_states=20_000_000)
    assert checked.counter_example is None, str(checked.counter_example)


def _report() -> dict[str, object]:
    """For ``docs/testing.md``."""
    checked = {name: _checked(name) for name in STARTS}
    examples = [(rule, str(_without(rule).counter_example).strip().splitlines()) for rule in Rule]
    return {
        "title": "A model of the protocol, tried in every order",
        "text": [
            "`tests/protocol/model.py` says what claims, appends, flushes, compactions, collections and "
            "reads do on storage, one call a step, and a checker tries every order of these steps. Each "
            "rule that the protocol rests on is then taken away, and the checker finds the shortest order "
            "that breaks a promise."
        ],
        "figures": [
            ["states", sum(each.states for each in checked.values())],
            ["steps", sum(each.steps.total() for each in checked.values())],
            ["rules without which a promise is broken", f"{len(examples)} of {len(Rule)}"],
        ],
        "tables": [
            {
                "caption": "Who is at work, and in how many states that can end",
                "columns": ["who", "states", "steps"],
                "rows": [[name, each.states, each.steps.total()] for name, each in checked.items()],
            },
            {
                "caption": "What goes wrong without a rule",
                "columns": ["rule", "steps", "then"],
                "rows": [
                    [rule.value, len(lines) - 1, lines[-1].strip().removeprefix("=> ")]
                    for rule, lines in examples
                ],
            },
        ],
        "command": "python -m tests.protocol.test_protocol",
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--store"]:
        report.store("protocol", _report())
    for name in STARTS:
        checked = _checked(name)
        print(
            f"{name}: {checked.states:,} states, {checked.steps.total():,} steps, {checked.counter_example}"
        )
    for rule in Rule:
        print(f"\nWithout: {rule}\n{_without(rule).counter_example}")
