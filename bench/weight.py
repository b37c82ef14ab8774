"""What an installation weighs: bytes on disk and CPU time of an import, ours beside the peers'.

``python -m bench.weight`` builds the wheel and makes an empty environment for each tool; ``--write`` stores
the result for the documentation.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.environments import ROOT, Environment, built_wheel, stored, write_between

RESULT = ROOT / "bench" / "weight.json"
PAGE = ROOT / "docs" / "tasks.md"
_REPEATS = 5
#: Packages that are named one by one in the table; the rest is one figure.
_LARGE = 10 << 20


@dataclass(frozen=True)
class Tool:
    """A tool, and what a program imports and does that writes one row with it."""

    title: str
    package: str
    imported: str
    first_write: str


TOOLS = (
    Tool(
        "lancewal",
        "lancewal",
        "import lancewal",
        "import lancewal\n"
        "table = lancewal.create('t', [{'id': 1}], key='id')\n"
        "with table.writer() as writer: writer.put({'id': 2})",
    ),
    Tool(
        "LanceDB",
        "lancedb",
        "import lancedb",
        "import lancedb\n"
        "table = lancedb.connect('db').create_table('t', [{'id': 1}])\n"
        "table.merge_insert('id').when_matched_update_all().when_not_matched_insert_all()"
        ".execute([{'id': 2}])",
    ),
    Tool(
        "Delta Lake",
        "deltalake",
        "import deltalake",
        "import deltalake, pyarrow\n"
        "deltalake.write_deltalake('t', pyarrow.table({'id': [1]}))\n"
        "rows = pyarrow.table({'id': [2]})\n"
        "merge = deltalake.DeltaTable('t').merge(rows, 's.id = t.id', source_alias='s', target_alias='t')\n"
        "merge.when_matched_update_all().when_not_matched_insert_all().execute()",
    ),
)


def measured(tool: Tool, packages: list[str | Path], directory: Path) -> dict[str, Any]:
    """Sizes in bytes by package, and CPU seconds beyond those of an empty program, medians of five."""
    environment = Environment.create(directory)
    environment.install(*packages)

    def cpu(code: str) -> float:
        taken = []
        for _ in range(_REPEATS):
            with tempfile.TemporaryDirectory() as place:
                taken.append(environment.run("python", "-c", code, cwd=Path(place)).cpu)
        return median(taken)

    nothing = cpu("pass")
    return {
        "title": tool.title,
        "sizes": environment.sizes(),
        "import_seconds": round(cpu(tool.imported) - nothing, 3),
        "first_write_seconds": round(cpu(tool.first_write) - nothing, 3),
    }


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        # Delta Lake takes any Arrow data, and a user without another source of it takes pyarrow.
        packages: dict[str, list[str | Path]] = {
            "lancewal": [built_wheel(place)],
            "lancedb": ["lancedb"],
            "deltalake": ["deltalake", "pyarrow"],
        }
        return [measured(tool, packages[tool.package], place / tool.package) for tool in TOOLS]


def table_of(found: list[dict[str, Any]]) -> str:
    names = sorted({name for each in found for name, size in each["sizes"].items() if size >= _LARGE})
    lines = ["| | " + " | ".join(each["title"] for each in found) + " |", "|---" * (len(found) + 1) + "|"]

    def row(title: str, cells: list[str]) -> None:
        lines.append(f"| {title} | " + " | ".join(cells) + " |")

    row("installed, MB", [_mb(sum(each["sizes"].values())) for each in found])
    for name in names:
        row(f"… of which `{name}`", [_mb(each["sizes"].get(name, 0)) for each in found])
    row("packages", [str(len(each["sizes"])) for each in found])
    row("`import`, CPU seconds", [f"{each['import_seconds']:.2f}" for each in found])
    row(
        "a program that writes one row, CPU seconds", [f"{each['first_write_seconds']:.2f}" for each in found]
    )
    return "\n".join(lines)


def _mb(size: int) -> str:
    """
    >>> _mb(1_500_000), _mb(0)
    ('2', '-')
    """
    return f"{size / 1e6:.0f}" if size else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"store the result, and show it in {PAGE.name}")
    given = parser.parse_args()
    found = run()
    print(table_of(found))
    if given.write:
        stored(RESULT, {"tools": found})
        write_between(PAGE, "weight", table_of(found))


if __name__ == "__main__":
    main()
