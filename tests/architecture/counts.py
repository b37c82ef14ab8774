"""How many tests each room has.

``python tests/architecture/counts.py [checkout …]`` collects them, slow ones included, and prints a column
for each checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path


def count(checkout: Path) -> Counter[str]:
    """Tests by the folder below ``tests``, or by the file where one lies in no folder."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "soak or not soak"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    found: Counter[str] = Counter()
    for line in done.stdout.splitlines():
        # One line for each file with -qq, as the settings of pytest and -q here add up to.
        file, _, number = line.rpartition(": ")
        if number.isdigit():
            top, *below = Path(file).parts
            found["examples in docstrings" if top == "src" else below[0]] += int(number)
    return found


def main() -> None:
    counted = [count(Path(each).resolve()) for each in sys.argv[1:] or ["."]]
    for room in sorted({room for each in counted for room in each}):
        print(f"{room:28}" + "".join(f" {each[room] or '-':>7}" for each in counted))
    print(f"{'all':28}" + "".join(f" {each.total():7}" for each in counted))


if __name__ == "__main__":
    main()
