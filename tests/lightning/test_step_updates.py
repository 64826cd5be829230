"""Updates of parameters inside a step run once for each batch, at their moment, as on one device; others are refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from stateful import Auto, loaders
from support.ranks import run_ranks
from torch import nn
from watching import QUIET, assert_same_run, assert_same_state, run_fit

from pipepart import PipelineStrategy
from pipepart.errors import PipepartError


class Momentum(Auto):
    """A target network that follows the network, and is updated before it is used."""

    how, after = "mul", False

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.body).requires_grad_(False)

    @torch.no_grad()
    def update(self):
        if self.how == "foreach":
            torch._foreach_lerp_(list(self.target.parameters()), list(self.body.parameters()), 0.1)
        if self.how == "state dict":
            state = self.target.state_dict()
            for key, value in self.body.state_dict().items():
                state[key].mul_(0.9).add_(value * 0.1)
        tau = 1 - 0.1 * (math.cos(math.pi * self.global_step / 10) + 1) / 2
        for online, target in zip(self.body.parameters(), self.target.parameters()):
            if self.how == "data":
                target.data = target.data * 0.9 + online.data * 0.1
            elif self.how == "in data":
                target.data.mul_(0.9).add_(online.data, alpha=0.1)
            elif self.how == "copy":
                target.copy_(0.9 * target + 0.1 * online)
            elif self.how == "mul":
                target.mul_(tau).add_(online, alpha=1 - tau)
            elif self.how == "lerp":
                target.lerp_(online, 0.1)

    def training_step(self, batch, batch_idx):
        if not self.after:
            self.update()
        with torch.no_grad():
            wanted = self.target(batch[0])
        h = self.body(batch[0])
        loss = F.mse_loss(h, wanted) + F.mse_loss(self.head(h), batch[1])
        if self.after:
            self.update()
        self.log("loss", loss)
        return loss


class Decay(Auto):
    """Weight decay and clipping by hand."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.mul_(0.9)
        for parameter in self.body.parameters():
            parameter.data.clamp_(-0.3, 0.3)
        return super().training_step(batch, batch_idx)


def _kind(how: str, after: bool) -> type[Auto]:
    return type("Momentum", (Momentum,), {"how": how, "after": after})


CASES: dict[str, type[Auto]] = {
    **{how: _kind(how, False) for how in ("data", "in data", "copy", "mul", "lerp", "foreach", "state dict")},
    **{f"{how} after": _kind(how, True) for how in ("mul", "data")},
    "decay": Decay,
}


def _fit(names: list[str], stages: int, microbatches: int) -> dict[str, Any]:
    found = {}
    for name in names:
        strategy: Any = PipelineStrategy(stages=stages, microbatches=microbatches) if stages else "auto"
        found[name] = run_fit(CASES[name](), *loaders(), strategy, max(1, stages))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (1, 1)])
def test_equal_to_one_device(stages: int, microbatches: int) -> None:
    names = list(CASES) if stages > 1 else ["mul", "data", "decay"]
    answers = (
        run_ranks(stages, _fit, names, stages, microbatches) if stages > 1 else [_fit(names, stages, microbatches)]
    )
    expected = _fit(names, 0, 1)
    for name in names:
        for rank, answer in enumerate(answers):
            assert_same_run(answer[name], expected[name], f"{name} on rank {rank}")
        assert_same_state(answers[0][name]["state"], expected[name]["state"], name)


class Between(Momentum):
    """Uses the target before and after its update."""

    def training_step(self, batch, batch_idx):
        old = self.target(batch[0])
        return super().training_step(batch, batch_idx) + (self.body(batch[0]) - old).pow(2).mean()


class ActNorm(nn.Module):
    """A layer that sets its parameter by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(10, dtype=torch.float64))
        self.ready = False

    def forward(self, h):
        if not self.ready:
            self.shift.data.copy_(-h.detach().mean(0))
        return h + self.shift


class ByBatch(Auto):
    def __init__(self) -> None:
        super().__init__()
        self.body.append(ActNorm())


REFUSED: dict[str, tuple[type[Auto], tuple[str, ...]]] = {
    "between": (Between, ("'target.0.weight'", "before that, at test_step_updates.py:", "on_train_batch_start")),
    "batch": (
        ByBatch,
        ("the step changes parameter 'body.4.shift' by values of the batch, at test_step_updates.py:", "hook"),
    ),
}


def _refused(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        trainer = L.Trainer(strategy=PipelineStrategy(stages=2, microbatches=4), devices=2, max_epochs=1, **QUIET)
        try:
            trainer.fit(REFUSED[name][0](), loaders()[0])
            found[name] = "nothing was raised"
        except PipepartError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
def test_what_cannot_be_taken_out_of_the_step_is_refused_on_all_ranks() -> None:
    for rank, answer in enumerate(run_ranks(2, _refused, list(REFUSED))):
        for name, (_, words) in REFUSED.items():
            assert all(word in answer[name] for word in words), f"{name} on rank {rank}: {answer[name]}"
