"""What cannot work is refused by name, with the same words on every rank; effects of steps are kept or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, MixedPrecision, Precision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from realistic import Boring, Classifier, build
from support.ranks import run_ranks
from torch.nn.utils import prune
from torch.utils.data import DataLoader
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.errors import ConfigError, PipepartError
from pipepart.lightning.known_ranks import device_of


class Manual(Boring):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Boring):
    def backward(self, loss):
        torch.autograd.grad(loss, list(self.parameters()), allow_unused=True)


class Iterator(Boring):
    def training_step(self, dataloader_iter):
        return None


class Sparse(Boring):
    def configure_optimizers(self):
        return torch.optim.SparseAdam(list(self.parameters()))


class DecidingByMetric(Classifier):
    def training_step(self, batch, batch_idx):
        answer = super().training_step(batch, batch_idx)
        return answer if answer["accuracy"] > 0.5 else answer["loss"]


class NoLoss(Boring):
    def training_step(self, batch, batch_idx):
        return {"outputs": self(batch).detach()}


class Growing(Boring):
    """Has a batch size that `Tuner.scale_batch_size` can change."""

    batch_size = 2

    def train_dataloader(self):
        return DataLoader(torch.randn(32, 32), batch_size=self.batch_size)


class ManyVariants(Boring):
    def training_step(self, batch, batch_idx):
        loss = self.loss(self(batch))
        return loss * 2 if self.global_step == 3 else loss


class Scale(torch.nn.Module):
    """Has values that only its constructor knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(32))

    def forward(self, x):
        return x * self.scale


class Unfilled(Boring):
    def configure_model(self):
        with torch.device("meta"):
            self.layer[1] = Scale()


class EmptyMetric(Boring):
    def configure_model(self):
        from torchmetrics import MeanMetric

        with torch.device("meta"):
            self.mean = MeanMetric()


class DifferentlyEmpty(Boring):
    def configure_model(self):
        with torch.device("meta" if torch.distributed.get_rank() else "cpu"):
            self.layer[0] = torch.nn.Linear(32, 32)


class OtherPrecision(Precision):
    def pre_backward(self, tensor, module):
        return super().pre_backward(tensor * 2, module)


class OtherNorm(Precision):
    def clip_grad_by_norm(self, optimizer, clip_val):
        pass


class OtherContext(MixedPrecision):
    def train_step_context(self):
        return self.forward_context()


class RankFailure(Boring):
    """The last stage alone cannot go on: its metric refuses the labels."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics.classification import BinaryAccuracy

        self.accuracy = BinaryAccuracy()

    def training_step(self, batch, batch_idx):
        prediction = self(batch)
        self.accuracy.update(prediction, torch.full_like(prediction, 7).long())
        return self.loss(prediction)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "manual optimization": (Manual, {}, "runs no backward for the first batch"),
    "backward": (OwnBackward, {}, "OwnBackward.backward calls torch.autograd.grad"),
    "dataloader_iter": (Iterator, {}, "takes dataloader_iter"),
    "sparse adam": (Sparse, {}, "SparseAdam needs sparse gradients"),
    "pruning": (Boring, {"callbacks": [cb.ModelPruning("l1_unstructured")]}, "ModelPruning does not work"),
    "batch size tuner": (Growing, {}, "BatchSizeFinder does not work"),
    "batch size finder": (Boring, {"callbacks": [cb.BatchSizeFinder()]}, "BatchSizeFinder does not work"),
    "precision backward": (Boring, {"plugins": [OtherPrecision()]}, "OtherPrecision overrides pre_backward(), but"),
    "precision norm": (Boring, {"plugins": [OtherNorm()]}, "OtherNorm overrides clip_grad_by_norm(), but"),
    "precision context": (
        Boring,
        {"plugins": [OtherContext("bf16-mixed", "cpu")]},
        "OtherContext overrides train_step_context(), but steps run in parts",
    ),
    "precision plugin": (
        Boring,
        {"plugins": [DeepSpeedPrecision("32-true")]},
        "the precision plugin DeepSpeedPrecision is not supported in a pipeline: it belongs to another strategy",
    ),
    "metric decides": (DecidingByMetric, {}, "branches on it"),
    "unfilled": (Unfilled, {}, "nothing fills them, such as layer.1.scale: Scale has no reset_parameters() that does"),
    "metric on meta": (EmptyMetric, {}, "the metric mean (MeanMetric) was built on the meta device"),
    "meta on one rank": (DifferentlyEmpty, {}, "with different parts on the meta device"),
    "no loss": (NoLoss, {}, "returned no loss"),
    "last stage": (RankFailure, {}, "7"),
}


def _refused(names: list[str]) -> dict[str, str]:
    found = {}
    _, train, _ = build("boring", dtype=torch.float32)
    _, labelled, _ = build("classifier", dtype=torch.float32)
    for name in names:
        make, options, _ = REFUSED[name]
        module = make()
        try:
            trainer = L.Trainer(
                strategy=PipelineStrategy(stages=2, microbatches=3), devices=2, max_steps=2, **{**QUIET, **options}
            )
            if isinstance(module, Growing):
                Tuner(trainer).scale_batch_size(module)
            else:
                trainer.fit(module, labelled if isinstance(module, Classifier) else train)
            found[name] = "nothing was raised"
        except (PipepartError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.slow
def test_refused_on_all_ranks_with_the_same_words() -> None:
    answers = run_ranks(2, _refused, list(REFUSED), timeout=300)
    for name, (_, _, words) in REFUSED.items():
        for rank, answer in enumerate(answers):
            assert words in answer[name], f"{name} on rank {rank}: {answer[name]}"
        if name != "last stage":
            assert answers[0][name] == answers[1][name], name


def _changing() -> list[int]:
    """A step that decides by `global_step` is recorded again when its decision changes, and only then."""
    torch.manual_seed(0)
    module, train, _ = build("boring")
    module.__class__ = ManyVariants
    trainer = L.Trainer(strategy=PipelineStrategy(stages=2, microbatches=3), devices=2, max_steps=7, **QUIET)
    losses: list[float] = []
    module.on_train_batch_end = lambda outputs, batch, batch_idx: losses.append(float(outputs["loss"]))
    trainer.fit(module, train)
    return [losses, trainer.strategy._steps.variants["training_step"].made]


def test_step_that_changes_is_recorded_again() -> None:
    (losses, made), other = run_ranks(2, _changing)
    assert other == [losses, made]
    assert made == 2
    module, train, _ = build("boring")
    module.__class__ = ManyVariants
    expected: list[float] = []
    module.on_train_batch_end = lambda outputs, batch, batch_idx: expected.append(float(outputs["loss"]))
    L.Trainer(max_steps=7, **QUIET).fit(module, train)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert expected[3] > 1.5 * expected[4], "the fourth step has another loss"


class TwoForms(Boring):
    """Takes tensors and dicts of tensors, wide and narrow."""

    def training_step(self, batch, batch_idx):
        batch = batch["x"] if isinstance(batch, dict) else batch
        return self.loss(self(torch.nn.functional.pad(batch, (0, 32 - batch.shape[1]))))


def _forms(pipeline: bool, devices: int) -> list[float]:
    torch.manual_seed(0)
    batches = [
        torch.randn(8, 32).double(),
        {"x": torch.randn(6, 32).double()},
        torch.randn(8, 20).double(),
        {"x": torch.randn(2, 20).double()},
        torch.randn(7, 32).double(),
    ]
    torch.manual_seed(0)
    module = TwoForms().double()
    losses: list[float] = []
    module.on_train_batch_end = lambda outputs, batch, batch_idx: losses.append(float(outputs["loss"]))
    strategy = PipelineStrategy(stages=2, microbatches=3) if pipeline else "auto"
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=2, **QUIET)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return losses


@pytest.mark.slow
def test_batches_of_another_form_are_recorded_again() -> None:
    expected = _forms(False, 1)
    for losses in run_ranks(2, _forms, True, 2):
        assert losses == pytest.approx(expected, rel=1e-9)


def _pruned(pipeline: bool, devices: int) -> dict[str, torch.Tensor]:
    _, train, _ = build("boring")
    torch.manual_seed(0)
    module = Boring().double()
    for layer, amount in ((module.layer[0], 0.5), (module.layer[4], 0.3)):
        prune.l1_unstructured(layer, "weight", amount)
    strategy = PipelineStrategy(stages=2, microbatches=3, split_at=["layer.2"]) if pipeline else "auto"
    L.Trainer(strategy=strategy, devices=devices, max_steps=3, **QUIET).fit(module, train)
    return {**module.state_dict(), "result": module(torch.ones(2, 32, dtype=torch.float64)).detach()}


@pytest.mark.slow
def test_a_module_that_was_pruned_before_equals_one_device() -> None:
    """The way out that the refusal of ModelPruning names."""
    expected = _pruned(False, 1)
    assert int((expected["layer.0.weight_mask"] == 0).sum()) == 512
    for found in run_ranks(2, _pruned, True, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_devices_that_do_not_fit_are_refused_before_anything_starts() -> None:
    with pytest.raises(PipepartError, match="devices must be a multiple of stages"):
        L.Trainer(strategy=PipelineStrategy(stages=3), devices=4, **QUIET)


def test_an_accelerator_that_is_not_here_is_refused_by_lightning() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(MisconfigurationException, match="No supported gpu backend found"):
        L.Trainer(accelerator="gpu", devices=2, strategy=PipelineStrategy(stages=2), logger=False)


def test_a_process_without_a_device_is_refused() -> None:
    devices = [torch.device("cpu")] * 2
    assert device_of(1, devices) == devices[1]
    with pytest.raises(ConfigError, match="process with number 2 of this host has no device: the trainer uses 2 here"):
        device_of(2, devices)
