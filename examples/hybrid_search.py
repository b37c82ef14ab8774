"""Retrieval over documents: searched by meaning and by words, from the moment they are written.

The embedding here counts words into a few dimensions, so that the example needs no model; put your own in
its place.
"""

from __future__ import annotations

import tempfile
import zlib

import numpy as np

import lancewal

DIMENSIONS = 64


def embedding(text: str) -> list[float]:
    vector = np.zeros(DIMENSIONS, np.float32)
    for word in text.lower().split():
        vector[zlib.crc32(word.encode()) % DIMENSIONS] += 1
    return [float(x) for x in vector / max(float(np.linalg.norm(vector)), 1e-9)]


def document(number: int, text: str) -> dict[str, object]:
    return {"id": number, "text": text, "vector": embedding(text)}


def main() -> None:
    uri = tempfile.mkdtemp() + "/documents.lance"
    table = lancewal.create(uri, [document(0, "how a write-ahead log keeps rows")], key="id")
    with table.writer() as writer:
        writer.put(
            [document(1, "vectors are compared by distance"), document(2, "a log is replayed after a crash")]
        )
        question = "what happens to the log after a crash"
        found = table.hybrid_search("vector", embedding(question), "text", question, k=2)
        print("before:", found["text"].to_pylist())

        writer.put(
            document(2, "a crash loses nothing: the log is replayed")
        )  # a newer version is found at once
        writer.delete(0)
        found = table.hybrid_search("vector", embedding(question), "text", question, k=2)
        print("after: ", found["text"].to_pylist())
    assert found["id"].to_pylist()[0] == 2
    assert 0 not in found["id"].to_pylist()


if __name__ == "__main__":
    main()
