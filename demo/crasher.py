"""A writer that is going to be killed: ``python -m demo.crasher URI FIRST``.

Puts notes one by one and prints the number of each once its put has returned.
"""

from __future__ import annotations

import itertools
import sys

import lancewal
from demo.corpus import NOTE, Edition, remarks, rows


def note(number: int, text: str) -> Edition:
    return Edition(NOTE, f"{number:06}", 1, text)


def main(uri: str, first: int) -> None:
    texts = [document.text for document in remarks()]
    with lancewal.open(uri).writer() as writer:
        for number in itertools.count(first):
            writer.put(rows([note(number, texts[number % len(texts)])]))
            print(number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
