"""A training set that stays the same while the table goes on.

A checkpoint names one state of the table. Every epoch, and every run next month, reads the same rows,
whatever is written, compacted and collected meanwhile, until the checkpoint is dropped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

import lancewal


class Samples(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The rows of one checkpoint."""

    def __init__(self, uri: str, checkpoint: str) -> None:
        self._uri = uri
        self._checkpoint = checkpoint

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # Opened here: workers of a DataLoader are processes of their own.
        view = lancewal.open(self._uri).at(self._checkpoint)
        for batch in view.scan(columns=["x", "y"]).to_batches():
            x = batch["x"].flatten().to_numpy().reshape(batch.num_rows, -1)
            y = batch["y"].to_numpy()
            yield from zip(torch.from_numpy(x), torch.from_numpy(y), strict=True)


def rows(first: int, count: int) -> list[dict[str, object]]:
    random = np.random.default_rng(first)
    x = random.normal(size=(count, 4))
    y = x @ [1.0, -2.0, 0.5, 0.0]
    return [{"id": first + n, "x": x[n].tolist(), "y": float(y[n])} for n in range(count)]


def main() -> None:
    uri = tempfile.mkdtemp() + "/samples.lance"
    table = lancewal.create(uri, rows(0, 200), key="id")
    with table.writer() as writer:
        writer.put(rows(200, 56))
        table.checkpoint("run-1")

        loader = DataLoader(Samples(uri, "run-1"), batch_size=32)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for epoch in range(10):
            seen = 0
            for x, y in loader:
                loss = torch.nn.functional.mse_loss(model(x.float()).squeeze(1), y.float())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen += len(y)
            losses.append(float(loss))
            assert seen == 256
            writer.put(rows(1000 + 10 * epoch, 10))  # the table goes on
            table.flush()
            table.compact()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
    print(f"the table has {table.count_rows()} rows by now, the checkpoint 256 as ever")
    assert losses[-1] < losses[0]
    table.drop_checkpoint("run-1")


if __name__ == "__main__":
    main()
