"""When a run has ended the module is whole on every rank, as after DDP, or it says that it is not."""

from __future__ import annotations

import io
import pickle
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from support.ranks import RanksFailed, run_ranks
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.errors import ConfigError, ForeignTensorError, PipelineError


def _rows() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    return DataLoader([torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(16)], batch_size=4)


class Net(L.LightningModule):
    """Running statistics, a tied weight, a metric and a buffer that a hook writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6))
        self.tail = nn.Linear(6, 6, bias=False)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.tail.weight
        self.register_buffer("batches", torch.zeros((), dtype=torch.float64))
        self.mean, self.total = MeanMetric(), SumMetric()
        self.double()

    def forward(self, x):
        return self.again(torch.tanh(self.tail(self.body(x))))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch), batch)

    def validation_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch), batch)
        self.mean.update(loss)
        self.total.update(loss)
        self.log("val", loss)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def on_train_batch_end(self, *args):
        self.batches += 1

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _strategy(pipeline: bool, **options: Any) -> Any:
    return (
        PipelineStrategy(microbatches=1, split_at=["body.2"], **{"stages": 2, "schedule": "1f1b", **options})
        if pipeline
        else "auto"
    )


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def _runs(pipeline: bool, devices: int = 1, folder: str = "") -> dict[str, Any]:
    """Fit, use the module as one does afterwards, and go on with the same trainer and with another one."""
    module, rows, found = Net(), _rows(), {}
    strategy = _strategy(pipeline)
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=1, **QUIET)
    trainer.fit(module, rows, rows)
    found["fit"] = _state(module)
    weight, runtime = module.body[3].weight, getattr(strategy, "runtime", None)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = Net()
    other.load_state_dict(torch.load(file, weights_only=True))
    module.eval()
    with torch.no_grad():
        found["call"] = module(next(iter(rows)))
        assert torch.equal(other.eval()(next(iter(rows))), found["call"])
    loaded = pickle.loads(pickle.dumps(module))
    assert type(loaded.body[3].weight) is nn.Parameter and "_pipepart_cut" not in vars(loaded)
    found["metrics"] = (float(module.mean.compute()), float(module.total.compute()), module.mean._update_count)
    if pipeline:
        trainer.save_checkpoint(f"{folder}/after.ckpt")
    else:
        trainer.save_checkpoint(f"{folder}/plain.ckpt")
    found["test"] = trainer.test(module, rows, verbose=False)
    found["predict"] = torch.cat(trainer.predict(module, rows))
    assert getattr(strategy, "runtime", None) is runtime, "planned once"
    assert module.body[3].weight is weight, "parameters are the same objects all the time"
    with torch.no_grad():  # between runs the module is the user's; rank 0 counts where ranks differ
        module.body[0].weight.mul_(0.5 if not devices - 1 or torch.distributed.get_rank() == 0 else 7.0)
    found["changed"] = trainer.validate(module, rows, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, rows)
    found["again"] = _state(module)
    module.tail = nn.Linear(6, 6, bias=False).double()  # another head: what was planned no longer fits
    module.again.weight = module.tail.weight
    with torch.no_grad():
        module.tail.weight.copy_(torch.arange(36.0).view(6, 6) / 36)
    found["head"] = trainer.test(module, rows, verbose=False)
    assert not pipeline or strategy.runtime is not runtime
    second = L.Trainer(strategy=_strategy(pipeline), devices=devices, max_epochs=1, **QUIET)
    second.fit(module, rows)
    found["second"] = _state(module)
    found["first again"] = trainer.test(module, rows, verbose=False)
    return found


def _same(got: Any, wanted: Any, where: str) -> None:
    left, tree = torch.utils._pytree.tree_flatten(got)
    right, other = torch.utils._pytree.tree_flatten(wanted)
    assert tree == other, where
    for a, b in zip(left, right):
        assert torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-8, atol=1e-10), where


@pytest.mark.slow
def test_the_module_is_that_of_one_device_after_each_run(tmp_path: Path) -> None:
    """Parameters, running statistics, buffers and metrics, on every rank, and every later run goes on from there."""
    answers, expected = run_ranks(2, _runs, True, 2, str(tmp_path)), _runs(False, 1, str(tmp_path))
    for rank, answer in enumerate(answers):
        for key, value in expected.items():
            _same(answer[key], value, f"{key} on rank {rank}")
    got, wanted = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("after", "plain"))
    _same(got["state_dict"], wanted["state_dict"], "checkpoint")
    _same(got["optimizer_states"][0]["state"], wanted["optimizer_states"][0]["state"], "optimizer")


def _replicas() -> dict[str, torch.Tensor]:
    module = Net()
    trainer = L.Trainer(strategy=_strategy(True, replicas=2), devices=4, max_epochs=1, **QUIET)
    trainer.fit(module, _rows())
    module.total.update(torch.tensor(float(trainer.strategy.mesh.replica_of(trainer.global_rank) + 1)))
    assert float(module.total.compute()) == 3.0, "over the replicas, each once"
    return _state(module)


@pytest.mark.slow
def test_whole_on_all_ranks_of_all_replicas() -> None:
    first, *others = run_ranks(4, _replicas)
    for other in others:
        for key, value in first.items():
            if "running" not in key and "num_batches" not in key:  # each replica has its own batches
                assert torch.equal(value, other[key]), key


# ---- a module that stays in parts


class Large(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body: Any = None

    def configure_model(self):
        if self.body is None:
            with torch.device("meta"):
                self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
                self.body.append(nn.BatchNorm1d(6))
            self.double()

    def forward(self, x):
        return self.body(x)

    training_step, validation_step = (
        Net.training_step,
        lambda self, batch, _: self.log("val", F.mse_loss(self(batch), batch)),
    )
    configure_optimizers = Net.configure_optimizers


def _parts(large: bool, folder: str) -> dict[str, Any]:
    torch.manual_seed(1)
    module, rows = Large() if large else Net(), _rows()
    strategy = _strategy(True, **({} if large else {"after": "parts"}))
    trainer = L.Trainer(strategy=strategy, devices=2, max_epochs=1, **QUIET)
    trainer.fit(module, rows, rows)
    texts = []
    inner = next(part for part in module.modules() if any(p.is_meta for p in part.parameters(recurse=False)))
    example = next(iter(rows))
    for use in (
        lambda: module.state_dict(), lambda: inner.state_dict(), lambda: module(example), lambda: inner(example),
        lambda: torch.save(module.state_dict(), f"{folder}/nothing.pt"),
    ):  # fmt: skip
        with pytest.raises(ForeignTensorError) as caught:
            use()
        texts.append(str(caught.value))
    with pytest.raises(ForeignTensorError):
        pickle.dumps(module)
    trainer.save_checkpoint(f"{folder}/{large}.ckpt")
    value = trainer.validate(module, rows, verbose=False)
    strategy.make_whole()
    return {
        "texts": texts,
        "state": _state(module),
        "value": value,
        "foreign": [p.is_meta for p in module.parameters()],
    }


@pytest.mark.parametrize("large", [pytest.param(False, marks=pytest.mark.slow), True])
def test_in_parts_it_says_so(large: bool, tmp_path: Path) -> None:
    answers = run_ranks(2, _parts, large, str(tmp_path))
    why = "it was built on the meta device" if large else "after='parts' is set"
    saved = torch.load(tmp_path / f"{large}.ckpt", weights_only=True)["state_dict"]
    for answer in answers:
        assert all(why in text and "make_whole" in text for text in answer["texts"])
        assert not any(answer["foreign"])
        _same(answer["state"], dict(saved), "whole")
        assert answer["value"] == answers[0]["value"]


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected 'whole'"):
        PipelineStrategy(stages=2, after="hole")


# ---- a run that fails


class Fails(Net):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.where == "everywhere" and batch_idx == 1:
            raise ValueError("as planned")

    def on_train_end(self):
        if self.where == "one rank, at the end" and self.trainer.global_rank == 1:
            raise ValueError("as planned")


def _fails(where: str) -> tuple[str, float, str]:
    module, rows = Fails(where), _rows()
    trainer = L.Trainer(strategy=_strategy(True), devices=2, max_epochs=1, **QUIET)
    started = time.monotonic()
    with pytest.raises((ValueError, PipelineError)) as caught:
        trainer.fit(module, rows)
    seconds = time.monotonic() - started
    with pytest.raises(ForeignTensorError) as refused:
        torch.save(module.state_dict(), io.BytesIO())
    return f"{type(caught.value).__name__}: {caught.value}", seconds, str(refused.value)


@pytest.mark.parametrize("where", [pytest.param("everywhere", marks=pytest.mark.slow), "one rank, at the end"])
def test_a_failed_run_is_not_waited_for(where: str) -> None:
    try:
        answers = run_ranks(2, _fails, where, timeout=240)
    except RanksFailed as failed:
        pytest.fail(str(failed))
    for rank, (text, seconds, refused) in enumerate(answers):
        assert "as planned" in text and seconds < 150, "less than the 300 s that a rank waits for another"
        assert "is in parts" in refused, rank
    if where != "everywhere":
        assert answers[0][0].startswith("PipelineError") and "failed" in answers[0][0] and "rank 1" in answers[0][0]
