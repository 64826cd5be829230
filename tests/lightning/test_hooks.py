"""Hooks that read or write parameters, buffers and gradients of all stages: equal to one device, as they are written."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader
from watching import QUIET

from pipepart import PipelineStrategy
from pipepart.lightning import run_patches
from tools.bench.manual import byol

SLOW = partial(pytest.param, marks=pytest.mark.slow)


def _rows() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    return DataLoader([torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(24)], batch_size=8)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


class Momentum(L.LightningModule):
    """An online network, a target network that follows it, and a head."""

    statistics = False
    """Whether the head has running statistics, which are those of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.online = network()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.norm, self.head = nn.BatchNorm1d(6) if self.statistics else nn.LayerNorm(6), nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros(()))
        self.seen: list[Any] = []
        self.double()

    def training_step(self, batch, batch_idx):
        goal = self.target(batch)
        return F.mse_loss(self.head(self.norm(self.online(batch))), goal)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    def pairs(self):
        return zip(self.target.parameters(), self.online.parameters())

    def see(self, value: Any) -> None:
        self.seen.append(float(value))


class Data(Momentum):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for target, online in self.pairs():
            target.data = target.data * 0.9 + online.data * 0.1


class InPlace(Momentum):
    @torch.no_grad()
    def on_before_zero_grad(self, optimizer):
        for target, online in self.pairs():
            target.mul_(0.9).add_(online, alpha=0.1)


class AfterStep(Momentum):
    """The update after the step of the optimizer, in the hook that calls the optimizer."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.see(self.head.weight.norm())
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            for target, online in self.pairs():
                target.lerp_(online, 0.1)


class Foreach(Momentum):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        targets, onlines = (list(module.parameters()) for module in (self.target, self.online))
        torch._foreach_mul_(targets, 0.9)
        torch._foreach_add_(targets, [p.data for p in onlines], alpha=0.1)


class Sometimes(Momentum):
    """The hook touches nothing in its first calls."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.see(outputs["loss"])
        if self.global_step % 3 == 0:
            self.target.load_state_dict(self.online.state_dict())


class More(Momentum):
    """Later calls touch more than the first ones."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.see(self.head.weight.norm())
        if batch_idx > 0:
            self.seen.append([float(p.detach().norm()) for p in self.online.parameters()])
        if batch_idx > 1:
            self.seen.append([None if p.grad is None else float(p.grad.norm()) for p in self.parameters()])
            with torch.no_grad():
                self.head.weight.copy_(self.online[0].weight[:6] / self.steps.add(2.0))


class Reads(Momentum):
    """Norms, histograms, counts, comparisons, running statistics, a forward, a state dict."""

    statistics = True

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.seen.append({key: float(value) for key, value in norms.items()})

    def on_after_backward(self):
        total = sum(p.grad.pow(2).sum() for p in self.parameters() if p.grad is not None)
        self.see(total.sqrt())
        self.seen.append(sum(p.grad is not None for p in self.parameters()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.see(self.norm.running_mean.sum())
        for parameter in self.parameters():
            self.seen.append(torch.histogram(parameter.detach(), bins=5)[0].tolist())
        self.seen.append(sum(int((p.numpy() > 0).sum()) for p in (q.detach() for q in self.parameters())))
        self.seen.append([torch.equal(target, online) for target, online in self.pairs()])

    def on_train_epoch_end(self):
        with torch.no_grad():
            self.see(self.online(torch.ones(2, 6, dtype=torch.float64)).sum())
        self.seen.append({key: value.double().sum().item() for key, value in self.state_dict().items()})


class Clipped(Momentum):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.see(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for parameter in self.parameters():
            parameter.data.clamp_(-0.3, 0.3)


class Renewed(Momentum):
    """Weights are normalised, a layer starts again, a buffer counts."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.dim() > 1:
                parameter.div_(parameter.norm(dim=1, keepdim=True).clamp_min(1.0))
        self.steps += self.online[4].weight.abs().mean()
        if batch_idx == 1:
            torch.manual_seed(7)
            self.online[2].reset_parameters()

    def on_after_backward(self):  # a penalty with gradients of its own
        penalty = sum(torch.linalg.matrix_norm(layer.weight, 2) for layer in (self.online[0], self.online[4]))
        (0.1 * penalty).backward()


class Codebook(Momentum):
    """A codebook that follows a weight, set as an attribute, and a weight of two layers on different stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6).double()
        self.first.weight = self.head.weight
        self.register_buffer("codes", torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6))

    def training_step(self, batch, batch_idx):
        near = self.codes[torch.cdist(batch, self.codes).argmin(1)]
        return super().training_step(self.first(batch), batch_idx) + F.mse_loss(self.online(batch), near)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.codes = self.codes * 0.9 + 0.1 * self.online[0].weight[:4]
        self.head.weight.mul_(0.9).add_(self.online[4].weight[:, :6], alpha=0.01)


class Groups(Momentum):
    """Parameters by the groups of an optimizer, and as one vector."""

    def on_before_optimizer_step(self, optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / (parameter.grad.norm() + 1.0)
        self.see(torch.nn.utils.parameters_to_vector(self.online.parameters()).detach().norm())

    @torch.no_grad()
    def on_train_epoch_end(self):
        vector = torch.nn.utils.parameters_to_vector(self.target.parameters())
        torch.nn.utils.vector_to_parameters(vector * 0.5, self.target.parameters())


class Outer(Momentum):
    """The work is done by callbacks."""


class Follow(L.Callback):
    def __init__(self) -> None:
        self.average: Any = None

    def on_fit_start(self, trainer, pl_module):
        self.average = copy.deepcopy(pl_module.online)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        update(self.average, pl_module.online)
        update(pl_module.target, self.average)


@torch.no_grad()
def update(into: nn.Module, source: nn.Module) -> None:
    for to, of in zip(into.parameters(), source.parameters()):
        to.copy_(0.8 * to + 0.2 * of)


class Histograms(L.Callback):
    """As loggers of histograms do: on the first rank only."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            for name, parameter in pl_module.named_parameters():
                pl_module.seen.append((name, float(parameter.detach().cpu().max())))
        pl_module.log("loss", outputs["loss"], sync_dist=True)


KINDS: dict[str, Callable[[], Momentum]] = {
    kind.__name__: kind
    for kind in (Data, InPlace, AfterStep, Foreach, Sometimes, More, Reads, Clipped, Renewed, Codebook, Groups, Outer)
}
CALLBACKS = {"Outer": [Follow, Histograms]}


def _fit(names: list[str], stages: int, devices: int) -> dict[str, Any]:
    found = {}
    for name in names:
        module = KINDS[name]()
        strategy: Any = "auto"
        if devices > 1:
            split, count = ["online.2", "target.2"][: stages - 1], 1 if module.statistics else 2
            strategy = PipelineStrategy(stages=stages, microbatches=count, schedule="1f1b", split_at=split)
        options: dict[str, Any] = {**QUIET, "callbacks": [kind() for kind in CALLBACKS.get(name, [])]}
        trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=2, **options)
        trainer.fit(module, _rows())
        state = {key: value.clone() for key, value in module.state_dict().items()}
        found[name] = (state, module.seen, dict(trainer.callback_metrics))
    return found


def _same(answers: list[dict[str, Any]], names: list[str], where: str) -> None:
    expected = _fit(names, 1, 1)
    for name in names:
        state, seen, metrics = expected[name]
        for rank, answer in enumerate(answers):
            got, noted, logged = answer[name]
            assert list(got) == list(state), name
            for key, value in state.items():
                assert torch.allclose(got[key], value, rtol=1e-10, atol=1e-13), (name, key, where, rank)
            if name != "Outer" or rank == 0:  # its notes are those of the first rank
                assert _flat(noted) == pytest.approx(_flat(seen), rel=1e-9, abs=1e-12), (name, where, rank)
            assert {key: float(value) for key, value in logged.items()} == pytest.approx(
                {key: float(value) for key, value in metrics.items()}, rel=1e-6
            ), (name, where, rank)


def _flat(values: Any) -> list[float]:
    """All numbers in a nested value, in order; names and None as numbers too."""
    if isinstance(values, dict):
        return [number for key in values for number in (_flat(str(key)) + _flat(values[key]))]
    if isinstance(values, (list, tuple)):
        return [number for value in values for number in _flat(value)]
    return [float(sum(map(ord, values)))] if isinstance(values, str) else [-1.0 if values is None else float(values)]


@pytest.mark.parametrize(
    ("stages", "devices", "names"),
    [
        (2, 2, ["Data"]),
        SLOW(2, 2, ["AfterStep", "More", "Clipped", "Reads"]),
        SLOW(3, 3, ["InPlace", "Renewed", "Codebook"]),
        SLOW(2, 4, ["Foreach", "Sometimes", "Outer", "Groups"]),
        SLOW(3, 6, ["Data", "Reads"]),
    ],
)
def test_equal_to_one_device(stages: int, devices: int, names: list[str]) -> None:
    _same(run_ranks(devices, _fit, names, stages, devices), names, f"{stages} stages, {devices} devices")


@pytest.mark.slow
def test_parameters_that_several_stages_use_equal_one_device() -> None:
    """A BYOL: both views go through the encoder, on two stages, and each of them moves its own copy of the target."""
    expected = byol.fit(0, 1)
    for state in run_ranks(2, byol.fit, 2, 1):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-13, msg=name)


class Drawn(Codebook):
    """Random numbers that differ on each rank."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        torch.manual_seed(self.trainer.strategy.global_rank)
        nn.init.normal_(self.head.weight, std=0.1)
        nn.init.normal_(self.online[0].weight, std=0.1)


@pytest.mark.slow
def test_random_values_are_the_same_on_all_copies() -> None:
    """The weight of two stages, and replicas: the stage that holds a parameter decides for all."""
    states = [answer["Drawn"][0] for answer in run_ranks(4, _fit, ["Drawn"], 2, 4)]
    for state in states[1:]:
        assert all(torch.equal(state[key], value) for key, value in states[0].items())


# ---- refusals


class InTheStep(Momentum):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for target, online in self.pairs():
                target.lerp_(online, 0.1)
        return super().training_step(batch, batch_idx)


class BeforeTheStep(Momentum):
    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            for target, online in self.pairs():
                target.lerp_(online, 0.1)


@pytest.mark.slow
def test_an_update_in_a_hook_before_the_step_equals_one_inside_the_step() -> None:
    inside = _fit(["InTheStep"], 1, 1)["InTheStep"][0]
    for answer in run_ranks(2, _fit, ["BeforeTheStep", "InTheStep"], 2, 2):
        for name in ("BeforeTheStep", "InTheStep"):
            state = answer[name][0]
            assert all(torch.allclose(state[key], value, rtol=1e-10, atol=1e-13) for key, value in inside.items()), name


class OnOneRank(Momentum):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_global_zero:
            for parameter in self.parameters():
                parameter.data.mul_(0.5)


class Replaced(Momentum):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.see(self.head.weight.norm())
        self.online[2] = nn.Linear(8, 8).double()


class Shared(Momentum):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for target, online in self.pairs():
            target.data = online.data


class Fails(Momentum):
    """One stage fails in the middle, the other one would wait for it."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_rank == 1:
            raise ValueError("no more")
        self.see(self.head.weight.norm())


class Apart(Momentum):
    """Code that tells the stages apart is left alone."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        held = [parameter for parameter in self.parameters() if not parameter.is_meta]
        self.seen.append((len(held), float(sum(parameter.detach().norm() for parameter in held))))


class Late(Momentum):
    """A hook whose code does not tell that it reaches parameters, and does so in a later call."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            self.see(getattr(self, "he" + "ad")._parameters["wei" + "ght"].detach().abs().max())


class Later(Late):
    """The other stage waits for this one when it fails."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == 0:
            time.sleep(1.5)
        super().on_train_batch_end(outputs, batch, batch_idx)


KINDS |= {"InTheStep": InTheStep, "BeforeTheStep": BeforeTheStep, "Drawn": Drawn}
OTHERS = {kind.__name__: kind for kind in (OnOneRank, Replaced, Shared, Fails, Apart, Late, Later)}


KEPT: list[L.Trainer] = []


def _refusal(name: str, keep: bool = False) -> tuple[str, list[Any]]:
    """The error of a fit. With `keep`, this process keeps the trainer, and so the connections of the job.

    Ranks exchange flags between all steps then.
    """
    module = OTHERS[name]()
    run_patches._MOST_CALLS = 1 if keep else 16
    strategy = PipelineStrategy(stages=2, microbatches=2, schedule="1f1b", split_at=["online.2"], timeout=60)
    trainer = L.Trainer(strategy=strategy, devices=2, max_epochs=1, **QUIET)
    KEPT[:] = [trainer] if keep else []
    try:
        trainer.fit(module, _rows())
    except Exception as error:
        return f"{type(error).__name__}: {error}", module.seen
    return "", module.seen


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OnOneRank", "OnOneRank.on_train_batch_end writes parameter 'head.bias' on the rank of stage 0"),
        SLOW("Replaced", "Replaced.on_train_batch_end replaces parameter objects (online.2.weight)"),
        SLOW(
            "Shared", "Shared.on_train_batch_end lets parameters 'online.0.weight' and 'target.0.weight' share memory"
        ),
    ],
)
def test_what_cannot_be_as_on_one_device_is_refused_on_all_ranks(name: str, words: str) -> None:
    assert all(text.startswith("ForeignTensorError") and words in text for text, _ in run_ranks(2, _refusal, name))


@pytest.mark.slow
def test_a_stage_that_fails_in_a_hook_is_not_waited_for() -> None:
    (first, _), (second, _) = run_ranks(2, _refusal, "Fails", timeout=50)
    assert second == "ValueError: no more"
    assert "another rank failed first" in first and "in on_train_batch_end" in first and "ValueError: no more" in first


@pytest.mark.slow
def test_a_failed_rank_that_stays_alive_is_not_waited_for() -> None:
    """The other rank waits in the exchange of flags after the step, and no connection breaks."""
    (first, _), (second, _) = run_ranks(2, _refusal, "Later", keep=True, timeout=50)
    assert first.startswith("ForeignTensorError") and "another rank failed first" in second


@pytest.mark.slow
def test_code_that_tells_stages_apart_is_left_alone() -> None:
    (one, first), (two, second) = run_ranks(2, _refusal, "Apart")
    assert one == two == ""
    assert {count for count, _ in first} == {8} and {count for count, _ in second} == {8}


@pytest.mark.slow
def test_a_late_touch_that_nothing_announced_is_refused_by_name() -> None:
    texts = [text for text, _ in run_ranks(2, _refusal, "Late")]
    assert any("parameter 'head.weight' lives on stage 1" in text and "whole_parameters" in text for text in texts)
    assert all(texts)
