"""Tries every order of a model's steps, breadth first: the first counter-example is a shortest one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.protocol.model import Protocol, State, violation


@dataclass(frozen=True)
class CounterExample:
    """A shortest way to a state in which a promise is broken."""

    steps: Sequence[str]
    broken: str

    def __str__(self) -> str:
        numbered = (f"{number:3}. {step}" for number, step in enumerate(self.steps, 1))
        return "\n".join([*numbered, f"  => {self.broken}"])


@dataclass(frozen=True)
class Checked:
    states: int
    #: How often each step was taken, by its name.
    steps: Counter[str]
    counter_example: CounterExample | None


def check(protocol: Protocol, start: State, most_states: int = 5_000_000) -> Checked:
    """Every state that can be reached from ``start``; ends at the first one that breaks a promise."""
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    level, taken = [start], Counter[str]()
    while level:
        following: list[State] = []
        for state in level:
            for name, after in protocol.steps(state):
                taken[name] += 1
                if after in came_from:
                    continue
                came_from[after] = (state, name)
                if (broken := violation(after)) is not None:
                    return Checked(len(came_from), taken, CounterExample(_way_to(after, came_from), broken))
                following.append(after)
        if len(came_from) > most_states:
            raise RuntimeError(f"more than {most_states} states: use fewer actors or rows")
        level = following
    return Checked(len(came_from), taken, None)


def _way_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    steps: list[str] = []
    while (before := came_from[state]) is not None:
        state, name = before
        steps.append(name)
    return steps[::-1]
