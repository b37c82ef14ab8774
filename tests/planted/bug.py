"""What a planted bug is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"


@dataclass(frozen=True)
class Bug:
    """``tests`` are asked where the simulator notices nothing."""

    name: str
    file: str
    old: str
    new: str
    #: What goes wrong.
    breaks: str
    tests: tuple[str, ...]
    #: Further texts of the same file, and what takes their place: a second protection against the same.
    also: tuple[tuple[str, str], ...] = ()
    #: Whether the simulator runs the code.
    simulated: bool = True

    @property
    def path(self) -> Path:
        return SOURCE / "lancewal" / self.file

    def planted_in(self, text: str) -> str:
        """The file's ``text`` with the bug."""
        for old, new in ((self.old, self.new), *self.also):
            assert text.count(old) == 1, f"{self.name}: {self.file} has its text {text.count(old)} times"
            text = text.replace(old, new)
        return text

    def plant(self, source: Path) -> None:
        """Change the copy of the code at ``source``."""
        path = source / "lancewal" / self.file
        path.write_text(self.planted_in(path.read_text()))
