"""Random numbers that do not depend on the shape: a run with dropout has the same losses however it is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from watching import QUIET

from pipepart import Pipeline, PipelineStrategy
from pipepart.errors import ConfigError
from pipepart.recording.execution.draws import mix


class Block(nn.Module):
    """Each kind of draw: modules, functions, attention, noise, in a region of activation checkpointing or not."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.second, self.again = nn.Linear(8, 8), nn.Linear(8, 8), again
        self.drop = nn.Dropout(0.3)

    def body(self, h):
        h = h + self.drop(torch.relu(self.first(h)))
        q = h.view(-1, 2, 1, 4)
        h = h + F.scaled_dot_product_attention(q, q, q, dropout_p=0.4 if self.training else 0.0).flatten(1)
        return h + F.dropout(self.second(h), 0.2, self.training)

    def forward(self, h):
        h = checkpoint(self.body, h, use_reentrant=False) if self.again else self.body(h)
        return h + 0.1 * torch.randn_like(h)


class Noisy(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.Sequential(*(Block(again=i == 1) for i in range(4)))
        self.double()

    def training_step(self, batch, batch_idx):
        h = self.blocks(batch)
        keep = torch.bernoulli(torch.full_like(h, 0.8))
        return (h * keep).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", (self.blocks(batch) + torch.rand_like(batch)).pow(2).mean())  # draws in eval as well

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Watch(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.outside: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, *args):
        self.losses.append(float(outputs["loss"]))
        self.outside.append(float(torch.rand(())) + random.random() + np.random.rand())


def _rows() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    return DataLoader([torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(18)], batch_size=6)


def _run(stages: int, seed: int = 7, epochs: int = 1, save: str = "", resume: Any = None, **options: Any) -> Any:
    L.seed_everything(seed, verbose=False)
    watch, module = Watch(), Noisy()
    L.seed_everything(seed if stages == 1 or torch.distributed.get_rank() == 0 else 99, verbose=False)  # rank 0 counts
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(seed)
    strategy = PipelineStrategy(stages=stages, microbatches=3, **{"randomness": "op", **options})
    replicas = options.get("replicas", 1)
    trainer = L.Trainer(
        strategy=strategy, devices=stages * replicas, max_epochs=epochs, num_sanity_val_steps=0,
        **{**QUIET, "callbacks": [watch]},
    )  # fmt: skip
    trainer.fit(module, _rows(), _rows(), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    values = torch.cat([p.detach().flatten() for p in module.parameters()])
    return watch.losses, float(trainer.callback_metrics["val"]), values, watch.outside, strategy.plan.stages


SHAPES: dict[str, dict[str, Any]] = {
    "2 stages": {"stages": 2},
    "gpipe": {"stages": 2, "schedule": "gpipe"},
    "two chunks each": {"stages": 2, "schedule": "interleaved", "chunks": 2},
    "split backward": {"stages": 2, "schedule": "zb_h1"},
    "run again": {"stages": 2, "recompute": True},
    "3 stages": {"stages": 3},
}


@pytest.fixture(scope="module")
def alone() -> Any:
    return _run(1)


@pytest.mark.parametrize(
    "shape", ["2 stages", *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES if s != "2 stages")]
)
def test_the_same_losses_at_every_shape(shape: str, alone: Any) -> None:
    options = SHAPES[shape]
    losses, value, weights, _, _ = alone
    assert len(set(losses)) == 3
    for answer in run_ranks(options["stages"], _run, **options):
        assert answer[0] == pytest.approx(losses, rel=1e-10), "losses"
        assert answer[1] == pytest.approx(value, rel=1e-10), "validation"
        assert torch.allclose(answer[2], weights, rtol=1e-9, atol=1e-12)
    assert answer[4] == options["stages"]


@pytest.mark.slow
def test_draws_outside_of_steps_go_on_as_if_steps_drew_nothing(alone: Any) -> None:
    random.seed(0)
    np.random.seed(0)
    first, *_ = run_ranks(2, _run, stages=2)
    assert first[3] == alone[3]
    assert len(set(alone[3])) == 3


@pytest.mark.slow
def test_after_a_resume_at_another_shape(tmp_path: Path) -> None:
    whole = _run(1, epochs=2)
    run_ranks(2, _run, stages=2, epochs=1, save=str(tmp_path / "half.ckpt"))
    rest = _run(1, epochs=2, resume=tmp_path / "half.ckpt")
    assert rest[0] == pytest.approx(whole[0][3:], rel=1e-10)
    assert torch.allclose(rest[2], whole[2], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_other_seeds_steps_micro_batches_and_replicas_draw_differently(alone: Any) -> None:
    assert _run(1, seed=8)[0] != alone[0]
    draws = run_ranks(2, _first_draws)
    assert len({tuple(row) for replica in draws for row in replica}) == 12, "2 replicas x 2 steps x 3 micro-batches"
    assert len({mix(a, b) for a in range(100) for b in range(-1, 100)}) == 100 * 101


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)
        self.register_buffer("seen", torch.zeros(6, 4))

    def forward(self, x, rows):
        noise = torch.rand(1, 4).expand(len(x), 4)
        return (self.layer(x) * 0 + noise).mean(), noise


def _first_draws() -> list[list[float]]:
    torch.manual_seed(3)
    pipe = Pipeline(
        Drawn(), (torch.ones(6, 2), torch.arange(6)), stages=1, replicas=2, microbatches=3, randomness="op"
    )  # fmt: skip
    found = []
    for _ in range(2):
        _, noise = pipe.step(torch.ones(6, 2), torch.arange(6))
        found += noise[::2].tolist()
    return found


def test_pipeline_goes_on_by_its_count() -> None:
    def losses(start: int, steps: int) -> list[float]:
        torch.manual_seed(3)
        pipe = Pipeline(Drawn(), (torch.ones(6, 2), torch.arange(6)), stages=1, microbatches=3, randomness="op")
        pipe.steps_done = start
        return [float(pipe.step(torch.ones(6, 2), torch.arange(6))[0]) for _ in range(steps)]

    assert losses(0, 4)[2:] == losses(2, 2)


def test_stages_draw_from_their_own_streams_if_asked(alone: Any) -> None:
    assert _run(1, randomness="stage")[0] != alone[0]


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected 'op'"):
        PipelineStrategy(stages=2, randomness="seed")
    with pytest.raises(ConfigError, match="expected 'op'"):
        Pipeline(Drawn(), (torch.ones(6, 2), torch.arange(6)), randomness="seed")
