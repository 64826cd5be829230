"""Models that are built on the meta device: planned without memory, filled stage by stage, loaded from any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from realistic import Base, LanguageModel, Rows, build
from support.models import GPT
from support.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader
from watching import QUIET, Notes, assert_same_state

from pipepart import PipelineStrategy
from pipepart.lightning import materialise

SEED = 11


class Waves(nn.Module):
    """A table that is in no checkpoint, a scale that is a parameter of its own, attention with a layer inside."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(context, width), persistent=False)
        self.register_buffer("calls", torch.empty((), dtype=torch.long))
        self.scale = nn.Parameter(torch.empty(width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        context, width = self.table.shape
        self.table = torch.sin(torch.arange(context)[:, None] / (1 + torch.arange(width)))
        self.calls.zero_()
        nn.init.normal_(self.scale, 1.0, 0.1)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.scale * self.table[: h.shape[1]]
        return h + self.attention(h, h, h, need_weights=False)[0]


class Model(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.waves = Waves(16, 12)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.waves(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))


class Large(LanguageModel):
    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = Model().double()


def _fit(module: L.LightningModule, strategy: Any, devices: int, epochs: int, resume: Any, save: Any) -> dict[str, Any]:
    _, train, val = build("gpt")
    notes = Notes()
    torch.manual_seed(99 if devices > 1 and torch.distributed.get_rank() else SEED)  # the first rank's counts
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=epochs, callbacks=[notes], **QUIET)
    trainer.fit(module, train, val, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    own = {name for name, p in module.named_parameters() if not p.is_meta}
    state = {} if getattr(strategy, "sharded", False) else trainer.strategy.lightning_module_state_dict()
    return {
        "losses": notes.losses,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "state": {key: value.clone() for key, value in state.items()},
        "own": own,
        "empty_buffers": [name for name, buffer in module.named_buffers() if buffer.is_meta],
    }


CUTS = {2: ["model.blocks.1"], 3: ["model.blocks.1", "model.blocks.2"]}
"""Given, not measured: with the cut at the tied head the first of two stages would hold every parameter."""


def _pipelines(stages: int, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for run in runs:
        sharded = run.pop("sharded", False)
        strategy = PipelineStrategy(
            stages=stages, microbatches=3, schedule="1f1b", sharded=sharded, split_at=CUTS[stages]
        )
        found.append(_fit(Large(), strategy, stages, **run))
    return found


def _filled(seed: int) -> Large:
    module = Large()
    module.configure_model()
    materialise(module, seed)
    return module


def test_modules_fill_themselves() -> None:
    """In the order of construction, each with random numbers of its own, and nothing else is drawn from."""
    before = torch.get_rng_state()
    model = _filled(SEED).model
    assert torch.equal(torch.get_rng_state(), before)
    assert model.waves.attention.out_proj.bias.abs().max() == 0, "the module around it has the last word"
    assert model.tokens.weight is model.head.weight
    assert 0.8 < model.tokens.weight.std() < 1.2, "the first of tied modules counts"
    assert 0.1 < model.blocks[0].qkv.weight.std() < 0.3, "as _init_weights of the model says"
    assert not torch.equal(model.blocks[0].qkv.weight, model.blocks[1].qkv.weight)
    again, other = _filled(SEED).state_dict(), _filled(SEED + 1).state_dict()
    for name, value in model.state_dict(prefix="model.").items():
        assert torch.equal(again[name], value), name
    assert not torch.equal(other["model.tokens.weight"], again["model.tokens.weight"])
    with torch.device("meta"):
        half = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    half[0] = nn.Linear(3, 3)
    real = half[0].weight.clone()
    materialise(half, SEED)
    assert torch.equal(half[0].weight, real), "what has values keeps them"
    assert half[1].weight.isfinite().all()


@pytest.mark.slow
def test_filled_by_stages_and_loaded_from_plain_and_sharded_checkpoints(tmp_path) -> None:
    """At 2 and 3 stages: fresh, from a plain file, and from shards: as one process that fills the whole model."""
    one, shards = str(tmp_path / "one.ckpt"), str(tmp_path / "shards.ckpt")
    first = _fit(_filled(SEED), "auto", 1, 1, None, one)
    second = _fit(_filled(SEED + 1), "auto", 1, 2, one, None)
    fresh = {"epochs": 1, "resume": None, "save": shards, "sharded": True}
    for stages, runs in (
        (2, [fresh, {"epochs": 2, "resume": one, "save": None}]),
        (3, [{**fresh, "save": None}, {"epochs": 2, "resume": shards, "save": None}]),
    ):
        answers = run_ranks(stages, _pipelines, stages, runs)
        for rank, (begun, resumed) in enumerate(answers):
            assert begun["losses"] == pytest.approx(first["losses"], rel=1e-8), (stages, rank)
            assert begun["metrics"] == pytest.approx(first["metrics"], rel=1e-6), (stages, rank)
            assert resumed["losses"] == pytest.approx(second["losses"], rel=1e-8), (stages, rank)
            assert resumed["metrics"] == pytest.approx(second["metrics"], rel=1e-6), (stages, rank)
            assert 0 < len(begun["own"]) < len(second["own"]), "no rank holds the whole model"
        assert set.union(*(begun["own"] for begun, _ in answers)) == second["own"]
        assert any(begun["empty_buffers"] for begun, _ in answers), "buffers are where they are used"
        assert_same_state(answers[0][1]["state"], second["state"], f"{stages} stages")


class Wide(Base):
    """Much memory, little work."""

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            with torch.device("meta"):
                self.layers = nn.Sequential(*(nn.Linear(1536, 1536) for _ in range(12)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


class Peak(L.Callback):
    """How much memory the process had at most, more than at the beginning, until training starts."""

    def setup(self, trainer, module, stage) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = _memory("VmRSS")

    def on_train_start(self, trainer, module) -> None:
        self.bytes = _memory("VmHWM") - self.before


def _wide(stages: int, path: str) -> tuple[int, int]:
    torch.manual_seed(0)
    data = DataLoader(Rows(lambda: torch.randn(1536), 4, 1), batch_size=4)
    for epochs in (1, 2):  # the first one, without a checkpoint, brings in all that is only imported when used
        module, peak = Wide(), Peak()
        trainer = L.Trainer(
            strategy=PipelineStrategy(stages=stages, microbatches=2), devices=stages, max_epochs=epochs,
            callbacks=[peak], **QUIET,
        )  # fmt: skip
        trainer.fit(module, data, ckpt_path=path if epochs == 2 else None)
    own = sum(p.numel() * p.element_size() for p in module.parameters() if not p.is_meta)
    return own, peak.bytes


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to reset the peak")
def test_no_rank_ever_holds_the_whole_model(tmp_path) -> None:
    """Planning, filling and loading a full checkpoint: the peak of each of 3 ranks stays below the size of the model."""
    module = Wide()
    with L.Trainer(strategy=PipelineStrategy(stages=1), devices=1, **QUIET).init_module(empty_init=True):
        module.layers = nn.Linear(2, 2)
    assert module.layers.weight.is_meta, "as configure_model does, from outside"
    del module.layers
    module.configure_model()
    materialise(module, SEED)
    whole = sum(p.numel() * p.element_size() for p in module.parameters())
    data = DataLoader(Rows(lambda: torch.randn(1536), 4, 1), batch_size=4)
    trainer = L.Trainer(max_epochs=1, **QUIET)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "wide.ckpt")
    answers = run_ranks(3, _wide, 3, str(tmp_path / "wide.ckpt"))
    assert sum(own for own, _ in answers) == whole
    for own, peak in answers:
        assert own < 0.5 * whole
        assert peak < 0.9 * whole, f"own {own:,}, peak {peak:,}, whole {whole:,}"
