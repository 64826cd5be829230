"""Texts of a batch that a step keeps, returns or counts are those of each batch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from stateful import Auto
from torch.utils.data import DataLoader
from watching import QUIET

from pipepart import PipelineStrategy

GENERATOR = torch.Generator().manual_seed(0)
ROWS = [tuple(torch.randn(n, generator=GENERATOR, dtype=torch.float64) for n in (6, 4)) for _ in range(11)]


def _collated(rows: list[Any]) -> dict[str, Any]:
    numbers = [number for number, _ in rows]
    pairs = [ROWS[number] for number in numbers]
    return {"rows": [torch.stack(part) for part in zip(*pairs)], "names": [f"sample {number}" for number in numbers]}


class Named(Auto):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.counts: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.losses(batch["rows"])[0]
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.losses(batch["rows"])[0]
        self.kept.append({"names": batch["names"], "loss": loss})
        self.counts.append(len(batch["names"]))

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"names": batch["names"], "loss": self.losses(batch["rows"])[0]}


def _run(strategy: Any) -> tuple[list[Any], list[float], list[int], list[Any]]:
    torch.manual_seed(0)
    module = Named()
    loader = DataLoader(list(enumerate(ROWS)), 4, collate_fn=_collated)  # type: ignore[arg-type]
    trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=1, **QUIET)
    trainer.fit(module, loader, loader)
    predicted: Any = trainer.predict(module, loader)
    names = [item["names"] for item in (*module.kept, *predicted)]
    return names, [float(item["loss"]) for item in module.kept], module.counts, [float(p["loss"]) for p in predicted]


@pytest.mark.slow
def test_equal_to_one_device() -> None:
    expected = _run("auto")
    names, losses, counts, predicted = _run(PipelineStrategy(stages=1, microbatches=2))
    assert names == expected[0]
    assert counts == expected[2]
    torch.testing.assert_close(losses, expected[1], rtol=1e-9, atol=0)
    torch.testing.assert_close(predicted, expected[3], rtol=1e-9, atol=0)
