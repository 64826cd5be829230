"""One process with one stage and one micro-batch: the order of one device, and steps that run as they are written."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from realistic import Boring, build
from safetensors.torch import load_file
from support.ranks import run_ranks
from watching import QUIET

from pipepart import PipelineMonitor, PipelineStrategy, WeightEMA
from pipepart.errors import CaptureError, ConfigError, PipepartError
from pipepart.lightning import save_weights
from pipepart.lightning.refusals import check_module


class OwnData(Boring):
    """Writes down each call of its loaders, of its hooks and of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.data = build("boring")[1]

    def _loader(self, name: str) -> Any:
        self.order.append(name)
        return _Counted(self.data, self.order, name)

    def train_dataloader(self):
        return self._loader("train_dataloader")

    def val_dataloader(self):
        return self._loader("val_dataloader")

    def setup(self, stage):
        self.order.append("setup")

    def configure_optimizers(self):
        self.order.append("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.05)


class _Counted:
    def __init__(self, loader: Any, order: list[str], name: str) -> None:
        self._loader, self._order, self._name = loader, order, name

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._order.append(f"{self._name} is opened")
        return iter(self._loader)


for _name in ("on_fit_start", "on_sanity_check_start", "on_train_start", "on_train_batch_start", "on_validation_start"):
    setattr(OwnData, _name, lambda self, *args, _name=_name: self.order.append(_name))


def _fit(module: Any, ours: bool, data: Any = None, callbacks: Any = (), **options: Any) -> Any:
    strategy = PipelineStrategy(stages=1) if ours else "auto"
    limits = {"limit_train_batches": 3, "limit_val_batches": 2, "max_epochs": 2}
    trainer = L.Trainer(strategy=strategy, devices=1, callbacks=list(callbacks), **{**QUIET, **limits, **options})
    torch.manual_seed(1)
    random.seed(1)
    if data is None:
        trainer.fit(module)
    else:
        trainer.fit(module, data, data)
    return trainer


def _made(kind: type, *args: Any) -> Any:
    torch.manual_seed(0)
    return kind(*args).double()


def test_loaders_and_hooks_are_called_when_lightning_calls_them() -> None:
    modules = [_made(OwnData), _made(OwnData)]
    trainers = [_fit(module, ours) for module, ours in zip(modules, (False, True))]
    assert modules[1].order == modules[0].order
    assert trainers[1].strategy.plans_training, "it is recorded, and planned with the first batch"
    torch.testing.assert_close(modules[1].state_dict(), modules[0].state_dict(), rtol=1e-9, atol=1e-12)


class Sums(Boring):
    """Goes through its batch sample by sample, takes numbers of Python, opens a file, and drops values at random."""

    def training_step(self, batch, batch_idx):
        total = sum(float(sample.sum()) for sample in batch)
        with open("/dev/null", "w") as file:
            file.write(str(total))
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("total", total, on_epoch=True)
        return loss * (1.0 + 0.1 * torch.rand(())) * (1.0 + 0.1 * random.random())


class Reads(Boring):
    """Optimizes by itself and reads gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.norms: list[float] = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)["loss"]
        self.manual_backward(loss)
        self.norms.append(float(sum(p.grad.norm() for p in self.parameters())))
        optimizer.step()
        return loss


class ByHand(Boring):
    """Optimizes by itself, as steps do that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        optimizer.step()


class TakesIterator(Boring):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)

    def validation_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().validation_step(batch, batch_idx)


class OwnBackward(Reads):
    def backward(self, loss, *args):
        (2.0 * loss).backward()


class Late(Boring):
    """The step cannot be recorded from some batch on."""

    def training_step(self, batch, batch_idx):
        if self.global_step >= 2:
            with open("/dev/null", "w") as file:
                file.write("x")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Sums, Reads, TakesIterator, OwnBackward, Late], ids=lambda kind: kind.__name__)
def test_a_step_that_cannot_be_recorded_runs_as_it_is_written(
    kind: type, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the draws, gradients, logs and clipped weights of one device, and a note."""
    monkeypatch.setattr(logging.getLogger("pipepart"), "propagate", True)
    _, train, _ = build("boring")
    options: dict[str, Any] = {} if issubclass(kind, (Reads,)) else {"gradient_clip_val": 0.1}
    modules = [_made(kind), _made(kind)]
    trainers = [_fit(module, ours, train, **options) for module, ours in zip(modules, (False, True))]
    torch.testing.assert_close(modules[1].state_dict(), modules[0].state_dict(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(trainers[1].logged_metrics, trainers[0].logged_metrics, rtol=1e-9, atol=1e-12)
    assert getattr(modules[1], "norms", None) == getattr(modules[0], "norms", None)
    assert f"{kind.__name__}.training_step is not recorded: " in caplog.text
    assert "as written, as without pipepart: one process has nothing to divide" in caplog.text
    assert trainers[1].strategy._written.steps >= {"training_step"}


def _counted(module: Any, name: str, calls: list[str]) -> None:
    """Replace a method of this object, as programs do that watch a module."""
    method = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(*args, **kwargs)

    setattr(module, name, call)


def test_methods_that_are_replaced_on_the_object() -> None:
    """A `backward` is called, and `manual_backward` keeps the step from being cut at it; all stay where they were put."""
    _, train, _ = build("boring")
    for kind, name in ((Boring, "backward"), (ByHand, "manual_backward")):
        found = []
        for ours in (False, True):
            module, calls = _made(kind), list[str]()
            _counted(module, name, calls)
            _fit(module, ours, train)
            found.append((calls, module.state_dict(), name in vars(module)))
        assert found[1][0] == found[0][0] and found[0][0], name
        assert found[1][2], "it is still there"
        torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-9, atol=1e-12)


def test_a_manual_backward_that_is_overridden_is_refused_where_steps_are_cut() -> None:
    module = _made(ByHand)
    _counted(module, "manual_backward", [])
    with pytest.raises(ConfigError, match=r"ByHand overrides manual_backward\(\)"):
        check_module(module)


class ValidatesOddly(Boring):
    def validation_step(self, batch, batch_idx):
        with open("/dev/null", "w") as file:
            file.write("x")
        return super().validation_step(batch, batch_idx)


def test_only_the_evaluation_runs_as_it_is_written() -> None:
    _, train, _ = build("boring")
    modules = [_made(ValidatesOddly), _made(ValidatesOddly)]
    trainers = [_fit(module, ours, train) for module, ours in zip(modules, (False, True))]
    assert trainers[1].strategy._written.steps == {"validation_step"}
    assert trainers[1].strategy.plans_training
    torch.testing.assert_close(trainers[1].callback_metrics, trainers[0].callback_metrics, rtol=1e-9, atol=1e-12)
    assert [t.validate(m, train, verbose=False) for t, m in zip(trainers, modules)][1]


def _refused(microbatches: Any, kinds: list[type]) -> list[str]:
    _, train, _ = build("boring")
    found = []
    for kind in kinds:
        devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        strategy = PipelineStrategy(stages=devices, microbatches=microbatches)
        trainer = L.Trainer(strategy=strategy, devices=devices, max_steps=1, limit_val_batches=0, **QUIET)
        try:
            trainer.fit(_made(kind), train)
            found.append("trained")
        except PipepartError as error:
            found.append(str(error))
    return found


def test_with_something_to_divide_the_same_steps_are_refused() -> None:
    """More micro-batches, or more stages: also with one micro-batch."""
    kinds: list[Any] = [Sums, TakesIterator, OwnBackward]
    for texts in (_refused(2, kinds), *run_ranks(2, _refused, 1, kinds)):
        assert "trained" not in texts
        assert "takes dataloader_iter" in texts[1]
        assert "overrides backward()" in texts[2]


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"recompute": True}, {"verify": True}, {"sharded": True}])
def test_options_that_ask_for_parts_are_not_ignored(options: dict[str, Any]) -> None:
    _, train, _ = build("boring")
    trainer = L.Trainer(strategy=PipelineStrategy(stages=1, **options), devices=1, max_steps=1, **QUIET)
    with pytest.raises(ConfigError, match="takes dataloader_iter"):
        trainer.fit(_made(TakesIterator), train, train)


class Consumes(Boring):
    """Takes an item of its own iterator in each step: attempts to record it have taken some."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def training_step(self, batch, batch_idx):
        with open("/dev/null", "w") as file:
            file.write(str(next(self.numbers)))
        return super().training_step(batch, batch_idx)


def test_attempts_that_cannot_be_undone_are_refused() -> None:
    _, train, _ = build("boring")
    with pytest.raises(
        CaptureError, match=r"numbers is an iterator, and attempts to record the step may have taken items"
    ):
        _fit(_made(Consumes), True, train)


def test_accumulated_batches_do_not_change_from_recorded_to_written() -> None:
    """Their gradients would have different weights in one step of the optimizer."""
    _, train, _ = build("boring")
    with pytest.raises(CaptureError, match="opens '/dev/null' for writing"):
        _fit(_made(Late), True, train, accumulate_grad_batches=2, limit_train_batches=6)


class _UsesStages(Callback):
    def on_train_start(self, trainer, pl_module):
        with trainer.strategy.whole_parameters():
            self.seen = [p.detach().clone() for p in pl_module.parameters()]


@pytest.mark.parametrize("kind", [Boring, Sums], ids=lambda kind: kind.__name__)
def test_callbacks_of_ours_and_checkpoints(kind: type, tmp_path: Path) -> None:
    """The monitor begins with the plan, or says that there is none; averages and checkpoints are those of the process."""
    _, train, _ = build("boring")
    monitor = PipelineMonitor(every_n_steps=2, folder=tmp_path)
    module, average, uses = _made(kind), WeightEMA(0.5), _UsesStages()
    trainer = _fit(module, True, train, callbacks=[monitor, average, uses])
    assert len(uses.seen) == len(list(module.parameters()))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert set(saved["pipepart_weight_ema"]["average"]) == {name for name, _ in module.named_parameters()}
    torch.testing.assert_close(dict(saved["state_dict"]), dict(module.state_dict()))
    assert (tmp_path / "report.html").exists() == (kind is Boring)
    save_weights(trainer, tmp_path / "weights")
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    torch.testing.assert_close(weights, dict(module.state_dict()))


@pytest.mark.parametrize("kind", [Boring, Sums], ids=lambda kind: kind.__name__)
def test_a_rate_is_found_and_the_weights_are_put_back(kind: type) -> None:
    """The finder trains and loads its checkpoint inside a run, with a plan or without one."""
    _, train, _ = build("boring")
    module = _made(kind)
    module.learning_rate = 0.1
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = L.Trainer(strategy=PipelineStrategy(stages=1), devices=1, max_epochs=1, **QUIET)
    L.pytorch.tuner.Tuner(trainer).lr_find(module, train, num_training=4, update_attr=False)
    torch.testing.assert_close(dict(module.state_dict()), before)


def test_a_checkpoint_in_shards_is_loaded(tmp_path: Path) -> None:
    _, train, _ = build("boring")
    strategy = PipelineStrategy(stages=1, sharded=True)
    trainer = L.Trainer(strategy=strategy, devices=1, max_steps=2, limit_val_batches=0, **QUIET)
    module, other = _made(Boring), _made(Boring)
    trainer.fit(module, train)
    trainer.save_checkpoint(tmp_path / "shards")
    again = L.Trainer(strategy=PipelineStrategy(stages=1), devices=1, max_steps=2, limit_val_batches=0, **QUIET)
    again.fit(other, train, ckpt_path=tmp_path / "shards")
    torch.testing.assert_close(dict(other.state_dict()), dict(module.state_dict()))
