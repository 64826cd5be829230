"""Numbers that a step makes with NumPy, draws with Python or keeps, and layers of torch that change buffers."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from stateful import Auto, loaders
from torch import nn
from watching import QUIET, assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy
from pipepart.errors import PipepartError


class Ramp(Auto):
    """The weight of a domain loss that grows with the step, and numbers of the loss (adversarial domain adaptation)."""

    def training_step(self, batch, batch_idx):
        loss, kl = self.losses(batch)
        steps = self.trainer.num_training_batches
        progress = float(batch_idx + self.current_epoch * steps) / (self.trainer.max_epochs * steps)
        alpha = 2.0 / (1.0 + np.exp(-10 * progress)) - 1
        if np.greater(progress, 0.6):
            alpha = alpha * np.float64(0.5) + np.minimum(progress, 0.3)
        self.log("alpha", alpha)
        self.log("perplexity", np.exp(loss.item()))
        self.log("clipped", np.clip(loss.item(), 0, self.most))
        self.log("between", np.interp(self.current_epoch, [0, 2], [1.0, 0.5]))
        return loss + alpha * kl.mean()

    def on_fit_start(self):
        self.most = 1.1  # some losses are larger


class Drawn(Auto):
    """Numbers that a hook draws before each step, and a layer that is skipped by one of them."""

    def on_train_batch_start(self, batch, batch_idx):
        self.lam, self.skip = np.random.beta(1.0, 1.0), random.random() < 0.5

    def training_step(self, batch, batch_idx):
        h = self.body(batch[0])
        if not self.skip:
            h = h + self.body[2](h)
        return (self.head(h * self.lam) - batch[1]).pow(2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Ramp, Drawn])
def test_equal_to_one_device(kind: type[Auto]) -> None:
    found = []
    for strategy in ("auto", PipelineStrategy(stages=1, microbatches=2)):
        random.seed(1)
        np.random.seed(1)
        found.append(run_fit(kind(), *loaders(), strategy, 1, max_epochs=3))
    assert_same_run(found[1], found[0], kind.__name__)
    assert_same_state(found[1]["state"], found[0]["state"], kind.__name__)
    for (step, line), (_, wanted) in zip(found[1]["logged"], found[0]["logged"]):
        assert line == pytest.approx(wanted, rel=1e-6), step


class Mixing(Auto):
    def losses(self, batch):
        return super().losses((batch[0] * np.random.beta(1.0, 1.0), batch[1]))


class Hyperparameters(Auto):
    """Before, such a change was made in each attempt to record the step, and never again."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"count": 0})

    def losses(self, batch):
        self.hparams.count += 1
        return super().losses(batch)


class OfClass(Auto):
    total = 0

    def losses(self, batch):
        type(self).total += 1
        return super().losses(batch)


class Spectral(Auto):
    normed: Any = staticmethod(nn.utils.parametrizations.spectral_norm)

    def __init__(self) -> None:
        super().__init__()
        self.body[2] = self.normed(self.body[2])


class OldSpectral(Spectral):
    normed = staticmethod(nn.utils.spectral_norm)


class Tracking(Auto):
    def __init__(self) -> None:
        super().__init__()
        self.body[1] = nn.InstanceNorm1d(10, track_running_stats=True).double()

    def losses(self, batch):
        return super().losses((batch[0].unsqueeze(1).expand(-1, 10, -1), batch[1].unsqueeze(1)))


REFUSED: dict[type[Auto], tuple[str, ...]] = {
    Mixing: ("random numbers outside torch", "do: draw the number with torch, or in a hook before the step"),
    Hyperparameters: ("hyperparameter 'count' (before:", "Keep it in an attribute of a LightningModule itself"),
    OfClass: ("the step sets OfClass.total, an attribute of the class", "set it on the module itself (self.total)"),
    Spectral: ("changes its buffer 'body.2.parametrizations.weight.0._u'", "microbatches=1"),
    OldSpectral: ("changes its buffer 'body.2.weight_u'", "microbatches=1"),
    Tracking: ("changes its buffer 'body.1.running_mean'", "microbatches=1"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_a_way_out(kind: type[Auto]) -> None:
    options: dict[str, Any] = {**QUIET, "max_steps": 2}
    with pytest.raises(PipepartError) as refused:
        L.Trainer(strategy=PipelineStrategy(stages=1, microbatches=2), devices=1, **options).fit(kind(), loaders()[0])
    assert all(words in str(refused.value) for words in REFUSED[kind]), str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Spectral, OldSpectral])
def test_spectral_norm_with_one_micro_batch_equals_one_device(kind: type[Auto]) -> None:
    strategies: list[Any] = ["auto", PipelineStrategy(stages=1, microbatches=1, split_at=["body.2"], chunks=2)]
    torch.manual_seed(0)
    modules = [kind(), kind()]
    modules[1].load_state_dict(modules[0].state_dict())
    expected, found = (run_fit(m, *loaders(), s, 1) for m, s in zip(modules, strategies))
    assert_same_run(found, expected, kind.__name__)
    assert_same_state(found["state"], expected["state"], kind.__name__)
