"""Programs as users of Fabric write them; `pipelined` makes a step of a function, on one device it is called as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8
"""Samples of a batch of all replicas together."""


class Language(nn.Module):
    """Predicts the next token; the embedding is also the last layer, so that two stages hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


def make(seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Language().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-2, eps=1e-4)


def data(samples: int = 24) -> TensorDataset:
    drawn = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 11, (samples, 6), generator=drawn)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def replicas_of(fabric: Any) -> int:
    mesh = getattr(fabric.strategy, "mesh", None)
    return 1 if mesh is None else mesh.replicas


def loader_of(fabric: Any) -> Any:
    return fabric.setup_dataloaders(DataLoader(data(), batch_size=BATCH // replicas_of(fabric)))


def pipelined(fabric: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    step = getattr(fabric.strategy, "step", None)
    return function if step is None else step(function)


def gathered(fabric: Any, model: Any) -> dict[str, torch.Tensor]:
    """The whole state of the model, on rank 0."""
    state = fabric.strategy.get_module_state_dict(model._forward_module)
    return {name: value.detach().clone() for name, value in state.items()}


def train(fabric: Any, folder: str, epochs: int = 2, resume: str | None = None) -> dict[str, Any]:
    """Train, clip, schedule, log, validate and save, as the guides of Fabric do."""
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer = fabric.setup(model, optimizer)
    batches, losses, norms, correct = loader_of(fabric), [], [], []
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    if resume is not None:
        rest = fabric.load(resume, state)
        assert rest == {}

    def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        logits = model(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}

    run = pipelined(fabric, step)
    for epoch in range(state["epoch"], epochs):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            result = run(x, y)
            fabric.backward(result["loss"])
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
            optimizer.step()
            scheduler.step()
            assert result["logits"].shape == (len(x), 5, 11)
            losses.append(float(fabric.all_reduce(result["loss"].detach().clone())))
        model.eval()
        with torch.no_grad():
            for x, y in batches:
                hits = (model(x).argmax(-1) == y).sum()
                correct.append(int(fabric.all_reduce(hits, reduce_op="sum")))
        state["epoch"] = epoch + 1
        fabric.save(Path(folder) / f"{epoch}.ckpt", state)
    fabric.print("done")
    return {"losses": losses, "norms": norms, "correct": correct, "state": gathered(fabric, model)}


def accumulate(fabric: Any) -> dict[str, Any]:
    """Three windows of two batches; replicas exchange gradients once for each window."""
    model, optimizer = make(seed=2)
    model, optimizer = fabric.setup(model, optimizer)
    run = pipelined(
        fabric, lambda x, y: nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="mean")
    )
    batches, seen = list(loader_of(fabric)), []
    for number, (x, y) in enumerate([*batches, *batches], 1):
        waits = number % 2 != 0
        with fabric.no_backward_sync(model, enabled=waits):
            loss = run(x, y)
            fabric.backward(loss / 2 + 1.0)
        if not waits:
            seen.append(float(fabric.clip_gradients(model, optimizer, max_norm=1e9)))
            optimizer.step()
            optimizer.zero_grad()
    return {"norms": seen, "state": gathered(fabric, model)}


def one_device(program: Callable[..., Any], *args: Any, **options: Any) -> Any:
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    fabric.launch()
    return program(fabric, *args)
