"""Real documents that every Python carries: its language reference, and its library's docstrings."""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt
import pyarrow as pa

DIMENSION = 64

#: Docstrings, by what they describe: a shard for each kind.
LIBRARY_KINDS = ("module", "class", "function", "method")
#: How the names of remarks begin, which people write about the library; no name of the library does.
REMARK = "remark/"
#: What somebody wrote down meanwhile.
NOTE = "note"

_KEY = "lance-schema:unenforced-primary-key"

SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), False, {_KEY: "true", f"{_KEY}:position": "1"}),
        pa.field("name", pa.string(), False, {_KEY: "true", f"{_KEY}:position": "2"}),
        pa.field("edition", pa.int32()),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), DIMENSION)),
    ]
)

_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
_SHORTEST_TEXT = 40
_WORD = re.compile(r"[a-z]{3,}")


@dataclass(frozen=True)
class Document:
    """One text under a name that stays when the text changes."""

    kind: str
    name: str
    text: str

    def edition(self, number: int, text: str | None = None) -> Edition:
        return Edition(self.kind, self.name, number, self.text if text is None else text)


@dataclass(frozen=True)
class Edition:
    """A version of a document, as the table stores it."""

    kind: str
    name: str
    number: int
    text: str


def remarks(limit: int | None = None) -> list[Document]:
    """The paragraphs of the language reference, in reading order, as remarks about all kinds in turn."""
    found: list[Document] = []
    for topic, body in sorted(topics.items()):
        for number, paragraph in enumerate(body.split("\n\n")):
            text = " ".join(paragraph.split())
            if len(text) >= _SHORTEST_TEXT:
                kind = LIBRARY_KINDS[len(found) % len(LIBRARY_KINDS)]
                found.append(Document(kind, f"{REMARK}{topic}/{number}", text))
    return found[:limit]


def library(limit: int | None = None) -> list[Document]:
    """The docstrings of the standard library, one for each name."""
    found: dict[tuple[str, str], Document] = {}
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _LEFT_OUT.isdisjoint(parts):
            for document in _docstrings(path, ".".join(part for part in parts if part != "__init__")):
                found.setdefault((document.kind, document.name), document)
        if limit is not None and len(found) >= limit:
            break
    return list(found.values())[:limit]


def rows(editions: Sequence[Edition]) -> pa.Table:
    """Rows of the demo table, with an embedding of each text."""
    vectors = [embed(each.text) for each in editions]
    flat = np.concatenate(vectors) if vectors else np.empty(0, np.float32)
    columns = [
        pa.array([each.kind for each in editions], pa.string()),
        pa.array([each.name for each in editions], pa.string()),
        pa.array([each.number for each in editions], pa.int32()),
        pa.array([each.text for each in editions], pa.string()),
        pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float32()), DIMENSION),
    ]
    return pa.table(columns, schema=SCHEMA)


def embed(text: str) -> npt.NDArray[np.float32]:
    """A unit vector of hashed words: crude, but texts with the same words are close."""
    vector = np.zeros(DIMENSION, np.float32)
    for word in _WORD.findall(text.lower()):
        code = zlib.crc32(word.encode())
        vector[code % DIMENSION] += 1.0 if code & 0x8000_0000 else -1.0
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm else vector


def _docstrings(path: Path, module: str) -> Iterator[Document]:
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        # Templates and samples that are no modules lie among them.
        return
    yield from _described("module", module, tree)
    yield from _inside(tree, module, "function")


def _inside(node: ast.Module | ast.ClassDef, prefix: str, callables: str) -> Iterator[Document]:
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            name = f"{prefix}.{child.name}"
            yield from _described("class", name, child)
            yield from _inside(child, name, "method")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _described(callables, f"{prefix}.{child.name}", child)


def _described(
    kind: str, name: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Document]:
    text = " ".join((ast.get_docstring(node) or "").split())
    if len(text) >= _SHORTEST_TEXT:
        yield Document(kind, name, text)
