"""A LanceDB application and lancewal on one table.

The application goes on as it is. What lancewal writes is durable at once; LanceDB sees it after a compaction,
which a service's upkeep does by itself.
"""

from __future__ import annotations

import tempfile

import lancedb

import lancewal


def main() -> None:
    directory = tempfile.mkdtemp()
    items = lancedb.connect(directory).create_table(
        "items", [{"id": n, "vector": [float(n), 1.0], "name": f"item {n}"} for n in range(100)]
    )

    table = lancewal.initialize(f"{directory}/items.lance", key="id")  # once; the application notices nothing
    with table.writer() as writer:
        writer.put({"id": 7, "vector": [7.0, 2.0], "name": "a newer seven"})
        writer.put({"id": 100, "vector": [100.0, 1.0], "name": "item 100"})
        print("lancewal sees it now:", table.lookup(7)["name"], "and", table.count_rows(), "rows")

    table.compact()
    items.checkout_latest()
    seven = items.search([7.0, 2.0]).limit(1).to_list()[0]
    print("and LanceDB after compaction:", seven["name"], "and", items.count_rows(), "rows")
    assert (seven["name"], items.count_rows()) == ("a newer seven", 101)


if __name__ == "__main__":
    main()
