"""Help texts: paragraphs that fill the terminal, and no types behind switches that take none."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption


class Command(TyperCommand):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = filled(self.help or "")

    def get_params(self, ctx: Any) -> list[Any]:
        return [without_type(param) for param in super().get_params(ctx)]


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return [without_type(param) for param in super().get_params(ctx)]


def filled(text: str) -> str:
    """Paragraphs as one line each; the lines of a docstring end where the source does.

    >>> filled("Do it.\\n\\nOnce or\\ntwice.")
    'Do it.\\n\\nOnce or twice.'
    """
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def without_type(param: Any) -> Any:
    """``--watch <bool>`` looks as if a value had to follow."""
    if isinstance(param, TyperOption) and param.metavar is None and (param.is_flag or param.count):
        param.metavar = ""
    return param
