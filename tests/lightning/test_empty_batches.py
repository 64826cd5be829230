"""Batches without samples: all ranks raise the same error, no rank has run the batch, and all are in step afterwards."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader
from watching import QUIET

from pipepart import Pipeline, PipelineStrategy
from pipepart.errors import PipepartError, PlanError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch["x"]), batch["y"])


def _batch(samples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    return {"x": x, "y": torch.randint(0, 2, (samples,), generator=generator)}


def _caught(action: Any) -> str:
    try:
        action()
    except PipepartError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def _pipeline(stages: int) -> tuple[list[str], float]:
    """Errors of empty batches, which the user catches, and the loss of the batch after them."""
    pipe = Pipeline(Net(), (_batch(8),), stages=stages, microbatches=2)
    pipe.step(_batch(8, 1))
    odd = pipe._runtime.groups is None or pipe._runtime.groups.replica == pipe._runtime.groups.mesh.replicas - 1
    found = [
        _caught(lambda: pipe.step(_batch(0 if odd else 8))),  # with replicas, one of them has an empty batch
        _caught(lambda: pipe.step({} if odd else _batch(8))),
        _caught(lambda: pipe.evaluate(_batch(0))),
    ]
    return found, float(pipe.step(_batch(8, 2)))


def _check(answers: list[tuple[list[str], float]], whose: str) -> None:
    wanted = float(Net()(_batch(8, 2)))
    for texts, loss in answers:
        assert texts[:2] == answers[0][0][:2], "of training, on all ranks; each replica evaluates its own batches"
        assert all("has no samples" in text and "do: leave empty batches out" in text for text in texts), texts
        assert f"the batch{whose} has no samples" in texts[0]
        assert loss == pytest.approx(wanted, rel=1e-5)


def test_pipeline_of_one_process() -> None:
    _check([_pipeline(1)], "")


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "whose"), [(2, ""), (4, " of replica 1")])
def test_pipeline(devices: int, whose: str) -> None:
    _check(run_ranks(devices, _pipeline, 2), whose)


def test_an_empty_example() -> None:
    with pytest.raises(PlanError, match="has no samples"):
        Pipeline(Net(), (_batch(0),), stages=1, microbatches=2)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = Net(), 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.net(batch))

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(stages: int, devices: int, sizes: list[int], validate: bool) -> tuple[str, int]:
    module = Module()
    strategy = PipelineStrategy(stages=stages, microbatches=2)
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=1, num_sanity_val_steps=0, **QUIET)
    good, bad = (DataLoader([_batch(size) for size in all_sizes], batch_size=None) for all_sizes in ([8], sizes))
    text = _caught(lambda: trainer.fit(module, good if validate else bad, bad if validate else None))
    return text, module.seen


@pytest.mark.slow
@pytest.mark.parametrize("validate", [False, True])
def test_trainer(validate: bool) -> None:
    """The batch after the empty one is not run by any rank."""
    for text, seen in run_ranks(2, _fit, 2, 2, [8, 0, 8], validate):
        assert "has no samples" in text
        assert "do: leave empty batches out" in text
        assert seen == 1


def test_trainer_on_one_device() -> None:
    text, seen = _fit(1, 1, [8, 0, 8], False)
    assert "training_step: the batch has no samples" in text
    assert seen == 1
