"""Tensors that a step keeps, where samples lie along another dimension than the first: as in one process, or named."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader

from pipepart import PipelineStrategy
from pipepart.lightning.follows import Follows, Sizes, follows

TIME, CLASSES = 5, 3


class Keeping(L.LightningModule):
    """A time-major network. Its batch begins with a tensor without samples, and the step keeps all kinds of tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(4, 6), nn.Linear(6, CLASSES)
        self.kept: dict[str, list[torch.Tensor]] = {}
        self.rows: list[torch.Tensor] = []
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.rnn(batch["x"])[0]
        out = self.head(hidden)
        self.rows.append(out.detach())
        self.rows.append(out.transpose(0, 1).detach())
        self.last = hidden[-1].detach()
        self.pair = (out.argmax(-1), out.detach().movedim(1, 2))
        self.whole(out.detach())
        each = F.cross_entropy(out.flatten(0, 1), batch["y"].flatten(), batch["weights"], reduction="none")
        return each.mean()

    def whole(self, out: torch.Tensor) -> None:
        """Values of the batch: means, and others."""
        self.mean = out.mean(1)
        self.largest = out.amax(1)
        self.counts = F.one_hot(out.argmax(-1), CLASSES).sum((0, 1))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        names = ("last", "pair", "mean", "largest", "counts")
        held = [value for name in names if name in vars(self) for value in _tensors(vars(self)[name])]
        self.kept[f"batch {batch_idx}"] = [*self.rows, *held]
        self.rows.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _tensors(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


class PerSample(Keeping):
    def whole(self, out: torch.Tensor) -> None:
        pass


class Gram(PerSample):
    def whole(self, out: torch.Tensor) -> None:
        rows = out.mean(0)
        self.gram = rows @ rows.t()


class Largest(PerSample):
    def whole(self, out: torch.Tensor) -> None:
        self.largest = out.amax(1)


def _batch(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    x, y = zip(*rows)
    return {"weights": torch.ones(CLASSES).double(), "x": torch.stack(x, 1), "y": torch.stack(y, 1)}


def _fit(kind: type[Keeping], devices: int, **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    data = [(torch.randn(TIME, 4).double(), torch.randint(0, CLASSES, (TIME,))) for _ in range(31)]
    module = kind()
    options = {"stages": 2, "microbatches": 4, "batch_dim": {"x": 1, "y": 1}, **options}
    trainer = L.Trainer(
        strategy=PipelineStrategy(**options) if devices > 1 else "auto",
        devices=devices, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(data, batch_size=8, collate_fn=_batch))  # type: ignore[arg-type]
        except Exception as error:
            return {"error": str(error)}
    texts = [str(item.message) for item in said if item.category.__name__ == "SamplesMeet"]
    state = {name: p.detach().clone() for name, p in module.named_parameters()}
    return {"kept": module.kept, "state": state, "said": texts}


def _equal(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    assert "error" not in answer, answer["error"]
    torch.testing.assert_close(answer["state"], expected["state"], rtol=1e-9, atol=1e-12)
    assert answer["kept"].keys() == expected["kept"].keys()
    for batch, wanted in expected["kept"].items():
        for index, (a, b) in enumerate(zip(answer["kept"][batch], wanted, strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=f"{batch}, value {index}")


@pytest.mark.slow
def test_tensors_that_a_time_major_step_keeps() -> None:
    """Along whichever dimension their samples lie, and for values of the whole batch, too; the last batch is smaller."""
    expected = _fit(Keeping, 1)
    for answer in run_ranks(2, _fit, Keeping, 2):
        _equal(answer, expected)
        assert not answer["said"]


@pytest.mark.slow
def test_samples_are_put_together_without_the_check_of_the_batch() -> None:
    expected = _fit(PerSample, 1)
    for answer in run_ranks(2, _fit, PerSample, 2, loss="microbatch"):
        assert {b: [t.shape for t in v] for b, v in answer["kept"].items()} == {
            b: [t.shape for t in v] for b, v in expected["kept"].items()
        }
        for a, b in zip(answer["kept"]["batch 0"], expected["kept"]["batch 0"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        assert not answer["said"]


@pytest.mark.slow
def test_what_cannot_be_put_together_is_named() -> None:
    for answer in run_ranks(2, _fit, Gram, 2, loss="microbatch"):
        assert "self.gram: the values of 4 micro-batches cannot be combined into that of the batch" in answer["error"]
        assert "microbatches=1" in answer["error"]
    *_, last = run_ranks(2, _fit, Largest, 2, loss="microbatch")
    assert any("self.largest: the values of micro-batches differ" in text for text in last["said"])


def test_the_dimension_of_the_samples() -> None:
    base, more, longer = Sizes(2, ((5, 4),)), Sizes(3, ((5, 4),)), Sizes(2, ((7, 4),))
    assert follows({base: (5, 2, 6), more: (5, 3, 6), longer: (7, 2, 6)}) == Follows((1,))
    assert follows({base: (5, 6), longer: (7, 6), more: (5, 6)}) == Follows(())
    assert follows({base: (5, 2), longer: (7, 2)}) == Follows(None)
    assert follows({base: 4, more: 6}) == Follows((), counts=True)
    equal = [torch.Size((5, 2))] * 3
    assert Follows((1,)).dim(equal, (2, 2, 2)) == 1
    assert Follows(()).dim(equal, (2, 2, 2)) is None
    assert Follows(None).dim(equal, (2, 2, 2)) == 1
    with pytest.raises(ValueError, match=r"dimensions \[0, 1\]"):
        Follows(None).dim([torch.Size((2, 2))] * 3, (2, 2, 2))
