"""Steps that use the plan of another step (evaluation, later recordings) are proved before they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from support.ranks import error_of, run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pipepart import Pipeline, PipelineStrategy
from pipepart.build import agreement


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)))
        self.flag = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return (y * 2 if self.flag else y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).sum(1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@contextmanager
def _spoil(wanted: Any) -> Iterator[None]:
    """Inside, the second chunk of each recording that is `wanted` computes with something else."""
    split = agreement.split

    def spoiled(recording: Any, *args: Any) -> Any:
        chunks = split(recording, *args)
        if wanted(recording):
            graph = chunks[1].module.graph
            node = next(node for node in graph.nodes if node.op == "placeholder" and node.users)
            users = list(node.users)
            with graph.inserting_after(node):
                made = graph.call_function(torch.mul, (node, 1.01))
            for user in users:
                user.replace_input_with(node, made)
            chunks[1].module.recompile()
        return chunks

    agreement.split = spoiled  # type: ignore[attr-defined]
    try:
        yield
    finally:
        agreement.split = split  # type: ignore[attr-defined]


def _pipeline(changes: bool) -> None:
    x = torch.randn(8, 6)
    model = Model()
    with _spoil(lambda recording: not changes and not recording.training):
        pipe = Pipeline(model, (x,), stages=2, microbatches=2, schedule="1f1b")
    pipe.step(x)
    model.flag = True
    with _spoil(lambda recording: changes):
        pipe.step(x)


def _trainer(step: str) -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 6)), 8)
    strategy = PipelineStrategy(stages=2, microbatches=2, schedule="1f1b")
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, logger=False, max_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    with _spoil(lambda recording: recording.step == step):
        trainer.fit(Model(), loader, loader)


@pytest.mark.parametrize(
    "run", [partial(_pipeline, False), partial(_pipeline, True), partial(_trainer, "validation_step")]
)
def test_wrong_chunks_are_found_by_all_ranks(run: Callable[[], None]) -> None:
    """The evaluation of a pipeline, a step that is recorded again since a flag has changed, and a step of a trainer."""
    for text in run_ranks(2, error_of, run):
        assert "Model: " in text and "2 chunks, the recorded graph" in text, text
