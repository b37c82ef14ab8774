"""What the demo says: steps, what they did, and checks that hold or do not."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape


@dataclass(frozen=True)
class Line:
    """``holds`` is ``None`` for what is told and not checked."""

    text: str
    holds: bool | None = None


@dataclass
class Step:
    title: str
    lines: list[Line] = field(default_factory=list)


class Narration:
    """Prints as it goes, and keeps everything for the report."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.steps: list[Step] = []

    @property
    def holds(self) -> bool:
        """Whether every check so far held."""
        return not any(line.holds is False for step in self.steps for line in step.lines)

    @property
    def checks(self) -> int:
        return sum(line.holds is not None for step in self.steps for line in step.lines)

    def step(self, title: str) -> None:
        self.steps.append(Step(title))
        self._console.rule(f"[bold]{len(self.steps)}. {escape(title)}", align="left")

    def say(self, text: str) -> None:
        self._add(Line(text), " ")

    def check(self, claim: str, holds: bool, otherwise: str = "") -> None:
        text = claim if holds or not otherwise else f"{claim}: {otherwise}"
        self._add(Line(text, holds), "[green]✓[/]" if holds else "[red]✗[/]")

    def _add(self, line: Line, mark: str) -> None:
        self.steps[-1].lines.append(line)
        self._console.print(f"  {mark} ", end="")
        width = max(self._console.width - 4, 20)
        first, *more = line_wrapped(line.text, width)
        self._console.print(first, markup=False, highlight=False)
        for each in more:
            self._console.print(f"    {each}", markup=False, highlight=False)


def line_wrapped(text: str, width: int) -> list[str]:
    """
    >>> line_wrapped("one two three", 8)
    ['one two', 'three']
    """
    return textwrap.wrap(text, width) or [""]
