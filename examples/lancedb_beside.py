"""A LanceDB application and lancewal on one table.

The application goes on. What lancewal writes is durable and searchable at once with lancewal; LanceDB sees it
when it is flushed. docs/lancedb.md has the rules.
"""

from __future__ import annotations

import tempfile

import lancedb
from lancedb.index import IvfFlat

import lancewal


def main() -> None:
    directory = tempfile.mkdtemp()
    database = lancedb.connect(directory)
    rows = [{"id": n, "vector": [float(n), 1.0], "name": f"item {n}"} for n in range(256)]
    database.create_table("items", rows).create_index("vector", config=IvfFlat(num_partitions=1))

    table = lancewal.initialize(f"{directory}/items.lance", key="id")  # once, for a table that is in use
    with table.writer() as writer:
        writer.put({"id": 7, "vector": [7.0, 2.0], "name": "a newer seven"})
        writer.put({"id": 300, "vector": [300.0, 1.0], "name": "item 300"})
        newest = table.lookup(7)
        assert newest is not None
        print("lancewal sees at once:", newest["name"], "and", table.count_rows(), "rows")

    items = database.open_table("items")  # LanceDB sees what was flushed, as by the end of the writer
    seven = items.search([7.0, 2.0]).limit(1).to_list()[0]
    print("LanceDB finds:", seven["name"])
    assert seven["name"] == "a newer seven"

    table.compact()
    items = database.open_table("items")
    print("and after compaction it has", items.count_rows(), "rows")
    assert items.count_rows() == 257


if __name__ == "__main__":
    main()
